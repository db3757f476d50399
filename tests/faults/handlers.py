"""What is rolled out while a server is killed: everything a handler may do, except for being well behaved."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.results import AgentResult, Reward, SampleDone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.task import Task

BEHAVIOURS = ("well", "badly", "unlucky", "large", "deaf")


class Chaotic(BaseAgent):
    """Its prompt is "BEHAVIOUR MILLISECONDS": after that time it ends well; raises; loses its connection in the first
    attempt; ends well with many tokens; or ignores a first cancel.
    """

    async def run(self, episode: Episode) -> AgentResult:
        behaviour, milliseconds = episode.sample.task.prompt.split()
        try:
            await asyncio.sleep(int(milliseconds) / 1_000)
        except asyncio.CancelledError:
            if behaviour != "deaf":
                raise
            await asyncio.sleep(0.05)
        if behaviour == "badly":
            raise ValueError(behaviour)
        if behaviour == "unlucky" and episode.attempt_no == 1:
            raise ConnectionRefusedError
        episode.observe(range(3_000 if behaviour == "large" else 3))
        return AgentResult(answer=behaviour)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0, details={"answer": result.answer})


class ChaoticGroup(Chaotic):
    """Scores a task's samples together, and not at once."""

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        await asyncio.sleep(0.01)
        if task.prompt.startswith("deaf"):
            raise ValueError(task.prompt)
        return [Reward(score=float(sample.sample_no)) for sample in samples]
