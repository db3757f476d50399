"""Children that a test plays, and a runner of such."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.runners.frames import Cancel, Leave, MakeHandler, Ping, Pong, Ready, Unfit, encode
from py_scheduler.domain.runners.frames import read_server_frame as read
from py_scheduler.domain.runners.runner import HandlerPlan, RunnerKey, RunnerSettings
from py_scheduler.execution.children.runners import ChildRunners
from tests.support.fake_clock import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.runners.frames import ChildFrame, ServerFrame

MOODS = (
    "",
    "unfit",
    "dies at its start",
    "dies when it is ready",
    "dies at a ping",
    "talks nonsense",
    "mixes words up",
)


class FakeToken:
    def __init__(self, node_ip: str, *gpu_ids: int) -> None:
        self.node_ip = node_ip
        self.gpu_ids = [*gpu_ids]

    def release(self) -> None: ...


class FakeChild:
    """Answers at once, as its mood is, until it is killed. `heard`: what it has been told.

    One that lingers goes on for a while when it is killed, until it dies.
    """

    def __init__(self, pid: int, mood: str = "") -> None:
        self.pid = pid
        self.mood = mood
        self.is_alive = True
        self.is_killed = False
        self.heard: list[ServerFrame] = []

    def listen(self, on_frame: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self.say_bytes, self._on_end = on_frame, on_end

    def say(self, frame: ChildFrame) -> None:
        self.say_bytes(encode(frame))

    def send(self, frame: bytes) -> None:
        self.heard.append(order := read(frame))
        if not self.is_alive or isinstance(order, Cancel | Leave):
            return
        if self.mood == "talks nonsense":
            self.say_bytes(b"\xc1")
        elif isinstance(order, MakeHandler):
            self._make(order.order_no)
        elif isinstance(order, Ping):
            self._answer_ping(order.order_no)

    def _make(self, order_no: int) -> None:
        if self.mood == "dies at its start":
            self.die()
            return
        self.say(Unfit(order_no=order_no, message="no model") if self.mood == "unfit" else Ready(order_no=order_no))
        if self.mood == "dies when it is ready":
            self.die()

    def _answer_ping(self, order_no: int) -> None:
        if self.mood == "dies at a ping":
            self.die()
        elif self.mood == "mixes words up":
            self.say(Ready(order_no=order_no))
        elif self.mood != "says nothing to a ping":
            self.say(Pong(order_no=order_no, resident_mib=1.0))

    def kill(self, why: str = "") -> None:
        self.is_killed = True
        if self.mood != "lingers":
            self.die(why)

    def die(self, how: str = "signal SIGKILL") -> None:
        if self.is_alive:
            self.is_alive = False
            asyncio.get_running_loop().call_soon(self._on_end, how)

    def resident_mib(self) -> float | None:
        return None


class FakeHost:
    """`gate` holds starts up while it is closed; `moods`: of the next children, by the key; `mood`: of all others."""

    kind = "fake"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.mood = ""
        self.moods: dict[RunnerKey, str] = {}
        self.broken: Exception | None = None
        self.launched: list[tuple[RunnerKey, FakeChild]] = []
        self.starting = self.peak = 0

    @property
    def live(self) -> list[RunnerKey]:
        return [key for key, child in self.launched if child.is_alive]

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def key_of(self, token: Any) -> RunnerKey:
        return (token.node_ip, tuple(token.gpu_ids))

    async def launch(self, key: RunnerKey, settings: RunnerSettings) -> FakeChild:
        self.starting += 1
        self.peak = max(self.peak, self.starting)
        try:
            await self.gate.wait()
        finally:
            self.starting -= 1
        if self.broken is not None:
            raise self.broken
        child = FakeChild(len(self.launched), self.moods.get(key, self.mood))
        self.launched.append((key, child))
        return child


class Rig:
    """A runner of such children, and a clock that stands still."""

    def __init__(self, **changes: Any) -> None:
        self.clock = FakeClock()
        self.host = FakeHost()
        self.runner = ChildRunners(
            "agent",
            HandlerPlan(name="m:C"),
            self.host,
            RunnerSettings(**{"min_runners": 0, "max_runners": 4} | changes),
            self.clock,
            lambda _: {},
        )

    def take(self, token: Any = None) -> asyncio.Task[Any]:
        return asyncio.create_task(self.runner.take_handle(token))

    @property
    def states(self) -> list[str]:
        return sorted(view.state for view in self.runner.views())
