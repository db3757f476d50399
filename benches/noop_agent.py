"""The handler that does nothing: what is left of a task's cost is the scheduler's own."""

from __future__ import annotations

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
