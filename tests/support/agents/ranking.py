"""A handler that scores groups, and what a test asks of it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import Outcome, Reward, SampleDone
from tests.support.handlers import ScriptedAgent

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.task import Task
    from tests.support.harness import Harness


class RankingAgent(ScriptedAgent):
    """Gives each sample of a group its rank; waits at the gate before it does. Reward order is that of sample_no."""

    def __init__(self, *, is_open: bool = True, **behaviours: Any) -> None:
        super().__init__(**behaviours)
        self.gate = asyncio.Event()
        self.asked: list[tuple[str, list[int]]] = []
        self.outcomes: list[list[Outcome]] = []
        self.cancelled = 0
        self.more = asyncio.Event()
        if is_open:
            self.gate.set()

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        self.asked.append((task.prompt, [sample.sample_no for sample in samples]))
        self.more.set()
        self.outcomes.append([sample.outcome for sample in samples])
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return [Reward(score=sample.sample_no / len(samples), details={"of": len(samples)}) for sample in samples]


async def one_done(harness: Harness, reply: Any) -> TaskDone:
    (done,) = (await harness.done(reply)).values()
    return done
