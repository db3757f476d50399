"""Workflows for runners that are processes: they are imported there, and tell tests by files what they did."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

from py_scheduler.interfaces.trinity import Experience, Task, Workflow


def count_in(trace: str) -> int:
    """Notes that this process was here; how often that was noted."""
    with Path(trace).open("a") as file:
        file.write(f"{os.getpid()}\n")
    return len(pids_in(trace))


def pids_in(trace: str) -> list[int]:
    return [int(line) for line in Path(trace).read_text().splitlines()]


class Model:
    """Generates nothing."""

    def __init__(self, engine_id: int) -> None:
        self.model_version = 7 + engine_id


class FailingModels:
    """An `open_model` that fails at those of its calls."""

    def __init__(self, trace: str, calls: range) -> None:
        self.trace, self.calls = trace, calls

    def __call__(self, engine_id: int) -> Model:
        if count_in(self.trace) in self.calls:
            raise OSError("no room for a model")
        return Model(engine_id)


class InLoop(Workflow):
    """Does what `workflow_args` name: `first` at its first try (noted in the file `trace`), `always` at each.

    Then it returns one experience: of which try, and of which process.
    """

    is_async = True

    async def run_async(self) -> list[Experience]:
        told = self.task.workflow_args
        number = count_in(told["trace"]) if "trace" in told else 1
        what = told.get("always") or (told.get("first") if number == 1 else None)
        if what is not None:
            await getattr(self, what)()
        return [Experience(reward=float(number), metrics={"score": 1.0}, info={"pid": os.getpid()})]

    async def exit(self) -> None:
        sys.exit(1)

    async def die(self) -> None:
        os._exit(3)

    async def interrupt(self) -> None:
        raise KeyboardInterrupt

    async def block(self) -> None:
        time.sleep(600)  # noqa: ASYNC251 -- what a workflow should not do

    async def hang(self) -> None:
        await asyncio.Event().wait()

    async def come_back_late(self) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            pass  # And reports, as if nothing had been said.

    async def grow(self) -> None:
        type(self).hoard = os.urandom(200 << 20)

    async def say_how_far(self) -> None:
        self.state["progress"] = 0.5
        await asyncio.Event().wait()

    hoard = b""


class InThread(InLoop):
    """Likewise, in a thread."""

    is_async = False

    def run(self) -> list[Experience]:
        return asyncio.run(self.run_async())


def told(workflow: type[Workflow] = InLoop, repeats: int = 1, **arguments: Any) -> Task:
    return Task(workflow, repeats, workflow_args=arguments)
