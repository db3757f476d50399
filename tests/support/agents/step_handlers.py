"""Handlers for whole steps: what becomes of a sample stands in its task's row."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult, Reward

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode


class Rated(BaseAgent):
    """Scores sample n of a task with `scores[n]` of its row; a row with `raises` raises that."""

    async def run(self, episode: Episode) -> AgentResult:
        metadata = episode.sample.task.metadata
        episode.observe([1, 2, 3], episode.sample.task.prompt)
        if "raises" in metadata:
            raise ConnectionError(metadata["raises"])
        return AgentResult(answer=episode.sample.task.prompt)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        metadata, iteration = episode.sample.task.metadata, episode.iteration
        scores = metadata.get("scores", [1.0])
        told = {} if iteration is None else {"rollout_id": iteration.rollout_id, "beta": iteration.beta}
        return Reward(score=scores[episode.sample.sample_no % len(scores)], details=told)


class Held(Rated):
    """Stays in `run` until the test, in the same process, opens the gate that it made."""

    gate: ClassVar[asyncio.Event]
    entered: ClassVar[asyncio.Event]
    inside: ClassVar[int] = 0

    @classmethod
    def close_gate(cls) -> None:
        cls.gate, cls.entered, cls.inside = asyncio.Event(), asyncio.Event(), 0

    async def run(self, episode: Episode) -> AgentResult:
        Held.inside += 1
        self.entered.set()
        try:
            # Every other sample passes, so that there is something to see meanwhile.
            if episode.sample.sample_no % 2:
                await self.gate.wait()
        finally:
            Held.inside -= 1
        return await super().run(episode)


class HeldInIteration(Rated):
    """In one iteration only the first tasks get through, until a file is there: time to be killed in the middle."""

    def __init__(self, rollout_id: int, free: int, gate: str) -> None:
        self._rollout_id, self._free, self._gate = rollout_id, free, Path(gate)
        self._begun = 0

    async def run(self, episode: Episode) -> AgentResult:
        iteration = episode.iteration
        is_eval = episode.sample.task.config.is_eval
        if iteration is not None and iteration.rollout_id == self._rollout_id and not is_eval:
            self._begun += 1
            if self._begun > self._free and not self._gate.exists():
                await asyncio.Event().wait()
        return await super().run(episode)


class Published(Rated):
    """Says what stands in the environment."""

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0, details={k: v for k, v in os.environ.items() if k.startswith("STACX_")})
