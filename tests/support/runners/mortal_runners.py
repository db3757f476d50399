"""Runners that die when they are told to, and a scheduler of them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, ClassVar

from py_scheduler.errors import RunnerLostError
from py_scheduler.interfaces.trinity import RunnerWrapper, Scheduler

if TYPE_CHECKING:
    from py_scheduler.interfaces.trinity import TaskWrapper


class MortalRunner(RunnerWrapper):
    """Dies when it is told to. `failures`: how many of its next preparations fail. `log`: of all of them."""

    failures: ClassVar[int] = 0
    log: ClassVar[list[str]] = []
    preparing: ClassVar[int] = 0
    most_preparing: ClassVar[int] = 0

    @classmethod
    def forget(cls) -> None:
        """What other tests did."""
        cls.failures = cls.preparing = cls.most_preparing = 0
        cls.log.clear()

    def _create_runner(self) -> Any:
        self.death: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        return super()._create_runner()

    def die(self, how: str = "killed") -> None:
        if not self.death.done():
            self.death.set_result(how)

    def kill(self) -> None:
        self.log.append(f"kill {self.runner_id}")
        self.die()

    async def prepare(self) -> None:
        cls = type(self)
        cls.preparing += 1
        cls.most_preparing = max(cls.most_preparing, cls.preparing)
        await asyncio.sleep(0)
        cls.preparing -= 1
        if cls.failures:
            cls.failures -= 1
            self.log.append(f"failed {self.runner_id}")
            raise OSError("no room for a runner")
        self.log.append(f"prepared {self.runner_id}")
        await super().prepare()

    async def confirm_alive(self) -> None:
        if self.death.done():
            raise RunnerLostError(self.death.result())

    async def run_task(self, task: TaskWrapper, repeat_times: int, run_id_base: int, collect_partial_runs: bool) -> Any:
        work = asyncio.ensure_future(super().run_task(task, repeat_times, run_id_base, collect_partial_runs))
        try:
            either: list[asyncio.Future[Any]] = [work, self.death]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
        if self.death.done():
            raise RunnerLostError(self.death.result())
        return work.result()


class MortalScheduler(Scheduler):
    runner_class = MortalRunner
    stop_grace_seconds = 0.05
