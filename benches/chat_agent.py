"""The handler that most users begin with: one question, one answer by the model, and a score of what it said."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import ChatMessage
from py_scheduler.domain.results import AgentResult, Reward

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode


class OneTurnAgent(BaseAgent):
    async def run(self, episode: Episode) -> AgentResult:
        await episode.observe_chat([ChatMessage("user", episode.sample.task.prompt)])
        generation = await episode.generate()
        return AgentResult(answer=generation.text, termination_reason=str(generation.finish_reason))

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        expected = episode.sample.task.metadata["answer"]
        return Reward(score=float(result.answer.strip() == expected), details={"answer": result.answer[:100]})
