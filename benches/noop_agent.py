"""The handler that does nothing: what is left of a task's cost is the scheduler's own."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult, Reward

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode

_RESULT = AgentResult(termination_reason="answered")
_REWARD = Reward(score=1.0)


class NoOpAgent(BaseAgent):
    """Solves everything at once."""

    async def run(self, episode: Episode) -> AgentResult:  # noqa: ARG002
        return _RESULT

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:  # noqa: ARG002
        return _REWARD


class StampingAgent(NoOpAgent):
    """Waits, does nothing, and its reward is when it ended, on the clock that all processes of a machine share."""

    def __init__(self, wait_seconds: float = 0.0) -> None:
        self._wait_seconds = wait_seconds

    async def run(self, episode: Episode) -> AgentResult:
        if self._wait_seconds:
            await asyncio.sleep(self._wait_seconds)
        return await super().run(episode)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:  # noqa: ARG002
        return Reward(score=time.monotonic())
