"""Places for children: starts, retries, backoffs and who gets which, with children that a test plays."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.domain.runner_frames import MakeHandler, Ping, Pong, Ready, Unfit, encode, read_server_frame
from py_scheduler.domain.runners import HandlerPlan, RunnerKey, RunnerSettings, RunnerState
from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.child_runner import ChildRunner
from py_scheduler.execution.runner import SeatGoneError
from tests.support.fake_clock import FakeClock, settle

if TYPE_CHECKING:
    from collections.abc import Callable


class FakeToken:
    def __init__(self, node_ip: str, *gpu_ids: int) -> None:
        self.node_ip = node_ip
        self.gpu_ids = [*gpu_ids]

    def release(self) -> None: ...


class FakeChild:
    """Answers at once, until it is killed."""

    def __init__(self, pid: int, unfit: str) -> None:
        self.pid = pid
        self.is_alive = True
        self._unfit = unfit

    def listen(self, on_frame: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self._on_frame, self._on_end = on_frame, on_end

    def send(self, frame: bytes) -> None:
        said = read_server_frame(frame)
        if isinstance(said, MakeHandler):
            self._on_frame(encode(Unfit(message=self._unfit) if self._unfit else Ready()))
        elif isinstance(said, Ping) and self.is_alive:
            self._on_frame(encode(Pong(resident_mib=1.0)))

    def kill(self, why: str = "") -> None:
        self.die(why)

    def die(self, how: str = "signal SIGKILL") -> None:
        if self.is_alive:
            self.is_alive = False
            asyncio.get_running_loop().call_soon(self._on_end, how)

    def resident_mib(self) -> float | None:
        return None


class FakeHost:
    """`gate` holds starts up while it is closed; `unfit` is what the next children say of themselves."""

    kind = "fake"

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.unfit = ""
        self.broken: Exception | None = None
        self.launched: list[tuple[RunnerKey, FakeChild]] = []
        self.starting = self.peak = 0

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
        child = FakeChild(len(self.launched), self.unfit)
        self.launched.append((key, child))
        return child


class Rig:
    def __init__(self, **changes: Any) -> None:
        self.clock = FakeClock()
        self.host = FakeHost()
        self.runner = ChildRunner(
            "agent",
            HandlerPlan(name="m:C"),
            self.host,
            RunnerSettings(**{"min_runners": 0, "max_runners": 4} | changes),
            self.clock,
            lambda _: {},
        )

    def take(self, token: Any = None) -> asyncio.Task[Any]:
        return asyncio.create_task(self.runner.take_seat(token))

    @property
    def states(self) -> list[str]:
        return sorted(view.state for view in self.runner.views())


async def test_starts_are_bounded_and_a_place_is_no_capacity_before_its_child_is_ready() -> None:
    rig = Rig(max_runners=20, prepare_concurrency=8)
    rig.host.gate.clear()
    seats = [rig.take() for _ in range(20)]
    await settle()
    assert rig.host.peak == 8
    assert rig.states == [RunnerState.STARTING] * 20
    assert not any(seat.done() for seat in seats)
    rig.host.gate.set()
    await asyncio.wait(seats)
    assert rig.states == [RunnerState.BUSY] * 20
    assert rig.host.peak == 8
    await rig.runner.close()


async def test_a_start_that_fails_is_tried_again_at_once_and_then_after_a_backoff_that_grows() -> None:
    rig = Rig(max_runners=1, prepare_max_retries=2)
    rig.host.unfit = "no model"
    seat = rig.take()
    waits = []
    for starts in (3, 6, 9, 12):
        await settle()
        assert len(rig.host.launched) == starts
        assert rig.states == [RunnerState.FAILED]
        assert rig.runner.views()[0].message == "no model"
        begun = rig.clock.now
        while len(rig.host.launched) == starts:
            await rig.clock.advance(0.5)
        waits.append(rig.clock.now - begun)
    assert waits == [1.0, 2.0, 4.0, 8.0]
    rig.host.unfit = ""
    await rig.clock.advance(30.0)
    (await seat).leave()
    assert rig.states == [RunnerState.IDLE]
    await rig.runner.close()


async def test_whatever_keeps_a_host_from_a_start_the_place_is_tried_again() -> None:
    rig = Rig(max_runners=1, prepare_max_retries=0)
    rig.host.broken = OSError(24, "Too many open files")
    seat = rig.take()
    await settle()
    assert rig.states == [RunnerState.FAILED]
    assert rig.runner.views()[0].message == "OSError: [Errno 24] Too many open files"
    rig.host.broken = None
    await rig.clock.advance(1.0)
    (await seat).leave()
    assert rig.states == [RunnerState.IDLE]
    await rig.runner.close()


async def test_a_failed_place_that_nobody_waits_for_is_given_up() -> None:
    rig = Rig()
    rig.host.unfit = "no model"
    seat = rig.take()
    await settle()
    seat.cancel()
    await rig.clock.advance(60.0)
    assert rig.runner.views() == []
    assert len(rig.host.launched) == 3
    await rig.runner.close()


async def test_an_engine_that_wants_runners_at_its_start_hears_why_there_are_none() -> None:
    rig = Rig(min_runners=2)
    rig.host.unfit = "no model"
    with pytest.raises(RunnerStartError, match="no model"):
        await rig.runner.start()
    assert not any(child.is_alive for _, child in rig.host.launched)


async def test_who_dies_before_it_is_pinged_is_replaced_and_costs_nothing() -> None:
    rig = Rig(max_runners=1)
    (await rig.take()).leave()
    rig.host.launched[0][1].is_alive = False  # It has ended, and nobody has told yet.
    seat = rig.take()
    await settle()
    rig.host.launched[0][1]._on_end("signal SIGKILL")
    (await seat).leave()
    assert [view.restarts for view in rig.runner.views()] == [1]
    await rig.runner.close()


async def test_a_child_that_leaves_when_it_is_asked_is_not_killed_later() -> None:
    rig = Rig(max_runners=1, max_resident_mib=0.5)
    (await rig.take()).leave()
    child = rig.host.launched[0][1]
    await settle()
    assert (child.is_alive, rig.clock.live_timers) == (True, 1)
    child.die("exit status 0")
    await settle()
    assert rig.clock.live_timers == 0
    (await rig.take()).leave()
    await rig.clock.advance(5.0)
    assert not rig.host.launched[1][1].is_alive, "it did not leave"
    await rig.runner.close()


async def test_a_child_plays_for_the_gpus_it_was_started_with_alone() -> None:
    rig = Rig(max_runners=2)
    first, second = await rig.take(FakeToken("", 0)), await rig.take(FakeToken("", 1))
    third = rig.take(FakeToken("", 2))
    await settle()
    assert not third.done(), "there is no place"
    first.leave()
    (await third).leave()
    assert [key for key, _ in rig.host.launched] == [("", (0,)), ("", (1,)), ("", (2,))]
    assert not rig.host.launched[0][1].is_alive, "its place was needed"
    second.leave()
    again = await rig.take(FakeToken("", 1))
    assert len(rig.host.launched) == 3
    again.leave()
    await rig.runner.close()


async def test_who_has_waited_longest_is_next_whichever_children_would_do() -> None:
    rig = Rig(max_runners=1)
    seat = await rig.take(FakeToken("", 0))
    order: list[str] = []

    async def take(name: str, token: Any) -> None:
        taken = await rig.runner.take_seat(token)
        order.append(name)
        taken.leave()

    waiting = []
    for name, token in (("a", FakeToken("", 0)), ("any", None), ("b", FakeToken("", 0))):
        waiting.append(asyncio.create_task(take(name, token)))
        await settle()
    seat.leave()
    await asyncio.wait(waiting)
    assert order == ["a", "any", "b"]
    await rig.runner.close()


async def test_nobody_waits_on_a_node_that_is_gone() -> None:
    rig = Rig(max_runners=1)
    seat = await rig.take(FakeToken("node-a"))
    waiting = rig.take(FakeToken("node-a"))
    await settle()
    rig.runner.drop_node("node-a")
    with pytest.raises(SeatGoneError):
        await waiting
    with pytest.raises(SeatGoneError):
        await rig.take(FakeToken("node-a"))
    rig.host.launched[0][1].die("its node is gone")
    await settle()
    seat.leave()
    assert rig.runner.views() == [], "it is not started there again"
    (await rig.take(FakeToken("node-b"))).leave()
    rig.runner.add_node("node-a")
    (await rig.take(FakeToken("node-a"))).leave()
    await rig.runner.close()


class Chaos:
    """What slots, children and the machine may do, each at any moment."""

    def __init__(self) -> None:
        self.rig = Rig(max_runners=3)
        self.waiting: list[asyncio.Task[Any]] = []
        self.taken: list[Any] = []

    async def turn(self) -> None:
        await settle()
        for seat in [seat for seat in self.waiting if seat.done()]:
            self.waiting.remove(seat)
            if not seat.cancelled():
                self.taken.append(seat.result())
        assert len(self.taken) <= 3
        assert len(self.rig.runner.views()) <= 3

    async def take(self, number: int) -> None:
        self.waiting.append(self.rig.take(FakeToken("", number % 3)))

    async def leave(self, number: int) -> None:
        if self.taken:
            self.taken.pop(number % len(self.taken)).leave()

    async def cancel(self, number: int) -> None:
        if self.waiting:
            self.waiting[number % len(self.waiting)].cancel()

    async def die(self, number: int) -> None:
        if launched := self.rig.host.launched:
            launched[number % len(launched)][1].die()

    async def spoil(self, number: int) -> None:
        self.rig.host.unfit = "no model" if number % 2 else ""

    async def wait(self, number: int) -> None:
        await self.rig.clock.advance(number)

    async def end(self) -> None:
        """All that is wrong is put right, and whoever has a seat leaves it."""
        self.rig.host.unfit = ""
        for _ in range(200):
            await self.turn()
            if not (self.waiting or self.taken):
                break
            while self.taken:
                self.taken.pop().leave()
            await self.rig.clock.advance(30.0)
        assert not self.waiting, "somebody waits for ever"
        assert RunnerState.BUSY not in self.rig.states
        await self.rig.runner.close()
        assert not any(child.is_alive for _, child in self.rig.host.launched)


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "leave", "cancel", "die", "spoil", "wait"]), st.integers(0, 7), st.booleans()),
    max_size=60,
)


@settings(max_examples=100)
@given(STEPS)
def test_no_place_is_ever_lost(steps: list[tuple[str, int, bool]]) -> None:
    """Whatever happens in whichever order, everybody who waits gets a seat in the end, and never too many at once."""

    async def play() -> None:
        chaos = Chaos()
        for name, number, has_turn in steps:
            await getattr(chaos, name)(number)
            if has_turn:
                await chaos.turn()
        await chaos.end()

    asyncio.run(play())
