"""Handlers of the cases that docs/faults.md numbers, for servers in processes of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.results import AgentResult, Reward, SampleDone

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.task import Task


class _Agent(BaseAgent):
    """`gate`: a file, which another process makes."""

    def __init__(self, gate: str = "") -> None:
        self._gate = Path(gate)

    async def run(self, episode: Episode) -> AgentResult:
        return AgentResult(answer=episode.sample.task.prompt)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)

    async def _until_the_gate_is_open(self) -> None:
        while not self._gate.exists():  # noqa: ASYNC110 - another process makes it
            await asyncio.sleep(0.05)


class OneSleeps(_Agent):
    """One run of each group never returns."""

    async def run(self, episode: Episode) -> AgentResult:
        if episode.sample.sample_no == 1:
            await asyncio.Event().wait()
        return await super().run(episode)


class Counted(_Agent):
    """Each lives until the gate is open, and tells how many lived at once at most."""

    alive = most = 0

    async def run(self, episode: Episode) -> AgentResult:
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        try:
            await self._until_the_gate_is_open()
        finally:
            Counted.alive -= 1
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0, details={"most": Counted.most})


class GatedScore(_Agent):
    """Its groups are scored once the gate is open."""

    async def eval_group(self, task: Task, samples: Sequence[SampleDone]) -> Sequence[Reward]:
        await self._until_the_gate_is_open()
        return [Reward(score=2.0) for _ in samples]
