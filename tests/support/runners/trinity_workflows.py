"""Workflows that do what a test tells them, and schedulers for them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from py_scheduler.interfaces.trinity import Config, Experience, ExplorerConfig, Scheduler, Task, Workflow

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    Play = Callable[["Told"], Awaitable[list[Experience] | None]]


class Told(Workflow):
    """Plays `workflow_args["play"]`, if there is one, and returns one experience unless that returns others."""

    is_async = True

    async def run_async(self) -> list[Experience]:
        play = self.task.workflow_args.get("play")
        made = None if play is None else await play(self)
        return [Experience(metrics={"score": 1.0})] if made is None else made


class ToldSync(Workflow):
    """Likewise, in a thread; its `play` is no coroutine."""

    def run(self) -> list[Experience]:
        made = self.task.workflow_args["play"](self)
        return [Experience(metrics={"score": 1.0})] if made is None else made


class ToldRepeatable(Told):
    """Makes all its runs at once; `play` is told how many through `repeats`, from `base` on."""

    can_repeat = True
    can_reset = True
    repeats = base = 0

    def set_repeat_times(self, repeat_times: int, run_id_base: int) -> None:
        self.repeats, self.base = repeat_times, run_id_base

    def reset(self, task: Any) -> None:
        self.task = task

    async def run_async(self) -> list[Experience]:
        made = await super().run_async()
        if self.task.workflow_args.get("play") is not None:
            return made
        experiences = []
        for run in range(self.base, self.base + self.repeats):
            experience = Experience(metrics={"score": float(run)})
            experience.eid.run = run
            experiences.append(experience)
        return experiences


class Gate:
    """Holds whoever comes until it is opened. `arrived`: set by the first that comes."""

    def __init__(self) -> None:
        self.arrived = asyncio.Event()
        self._open = asyncio.Event()
        self.visits = 0
        self.passed = False

    def open(self) -> None:
        self._open.set()

    async def __call__(self, _workflow: object) -> None:
        self.visits += 1
        self.arrived.set()
        await self._open.wait()
        self.passed = True


def told(
    play: Any = None, repeats: int | None = 1, *, workflow: type[Workflow] = Told, is_eval: bool = False, **more: Any
) -> Task:
    arguments = {**more} if play is None else {"play": play, **more}
    return Task(workflow, repeats, workflow_args=arguments, is_eval=is_eval)


def new_config(**explorer: Any) -> Config:
    defaults: dict[str, Any] = {"runner_per_model": 2, "max_timeout": 60.0, "max_retry_times": 1}
    return Config(explorer=replace(ExplorerConfig(), **{**defaults, **explorer}))


@asynccontextmanager
async def started(scheduler_class: type[Scheduler] = Scheduler, **explorer: Any) -> AsyncIterator[Scheduler]:
    scheduler = scheduler_class(new_config(**explorer))
    await scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.stop_deadline_seconds = 0.0
        await scheduler.close()


def read(payloads: list[bytes]) -> list[Experience]:
    return [experience for payload in payloads for experience in Experience.deserialize_many(payload)]
