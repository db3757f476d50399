"""An engine whose handlers run in processes of their own."""

from __future__ import annotations

import asyncio
import os
import weakref
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.children.process_host import ProcessHost, import_path
from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.domain.runners.runner import ANYWHERE, DEFAULT_ENVIRONMENT, HandlerPlan, RunnerSettings
from py_scheduler.execution.children.runners import ChildRunners
from py_scheduler.handlers.loading import handler_elsewhere
from py_scheduler.rollout.environment import variables
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.agents.child_handlers import TOLD_BYTES
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.runners.runner import ChildHost, RunnerKey

AGENT = "tests.support.agents.child_handlers:OddAgent"


class Pipe:
    """What handlers tell through `child_handlers.tell`, in that order; it stays until it is asked for."""

    def __init__(self, path: Path) -> None:
        self.path = path
        os.mkfifo(path)
        # Both ends: so nobody waits to open it, and a child that is killed takes nothing along.
        self._ends = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        weakref.finalize(self, os.close, self._ends)

    async def told(self) -> int:
        """The process id of the child that says it."""
        loop, is_there = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(self._ends, is_there.set)
        try:
            async with asyncio.timeout(60):
                await is_there.wait()
        finally:
            loop.remove_reader(self._ends)
        return int(os.read(self._ends, TOLD_BYTES))

    def __str__(self) -> str:
        return str(self.path)


class Children(Harness):
    """A harness with the runner behind it."""

    def __init__(self, harness: Harness, runner: ChildRunners) -> None:
        super().__init__(harness.engine)
        self.runner = runner

    @property
    def pids(self) -> list[int]:
        return sorted(view.pid for view in self.runner.views() if view.pid)


@asynccontextmanager
async def children(
    handler: str = AGENT,
    arguments: dict[str, Any] | None = None,
    *,
    settings: RunnerSettings | None = None,
    engine_settings: EngineSettings | None = None,
    host: ChildHost | None = None,
    first_key: RunnerKey = ANYWHERE,
    spec: dict[str, Any] | None = None,
    **engine: Any,
) -> AsyncIterator[Children]:
    """One evaluator, `agent`. Nothing of a child is left behind."""
    clock = engine.pop("clock", None) or LoopClock()
    runner = ChildRunners(
        "agent",
        HandlerPlan(name=handler, arguments=arguments or {}, key="evaluator[0]"),
        host or ProcessHost(),
        settings or runner_settings(),
        clock,
        variables,
        import_path=import_path(),
        first_key=first_key,
    )
    pids: set[int] = set()
    stands_for = spec_of(handler_elsewhere(handler, "evaluator[0]"), runner=runner.kind, **spec or {})
    async with running_engine(
        stands_for, clock=clock, runners={"agent": runner}, settings=engine_settings or quick(), **engine
    ) as harness:
        made = Children(harness, runner)
        yield made
        pids.update(made.pids)
    if runner.kind == "ray":  # Which says that an actor has ended before its process has.
        await eventually(lambda: not any(map(is_there, pids)), pause_seconds=0.01)
    assert not [pid for pid in pids if is_there(pid)], "a child outlived its server"


def is_there(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def runner_settings(**changes: Any) -> RunnerSettings:
    values: dict[str, Any] = {"max_runners": 2, "environment": (*DEFAULT_ENVIRONMENT, "TEST_HANDED_ON")}
    return RunnerSettings(**values | changes)


def quick(**changes: Any) -> EngineSettings:
    return EngineSettings(**{"stop_grace_seconds": 0.5, "retry_backoff_seconds": 0.01} | changes)
