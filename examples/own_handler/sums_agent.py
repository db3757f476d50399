"""A handler of one's own: it asks for a sum and scores the first number of the answer.

The server imports it, because scheduler.toml beside it names it; clients only name its evaluator.
"""

from __future__ import annotations

import re

from py_scheduler import AgentResult, BaseAgent, ChatMessage, Episode, Reward

_NUMBER = re.compile(r"-?\d+")


class SumsAgent(BaseAgent):
    """Tasks bring the question as their prompt and the right answer as metadata["answer"]."""

    def __init__(self, examples: int = 2) -> None:
        """The keys of handler_args. A small model needs to be shown what is wanted."""
        self._examples = [
            message
            for left, right in [(2, 2), (1, 5), (4, 3)][:examples]
            for message in (
                ChatMessage("user", f"What is {left} + {right}?"),
                ChatMessage("assistant", str(left + right)),
            )
        ]

    async def run(self, episode: Episode) -> AgentResult:
        question = ChatMessage("user", episode.sample.task.prompt)
        token_ids = await episode.encode_chat([*self._examples, question])
        episode.observe(token_ids, question.content)  # loss mask 0
        generation = await episode.generate()  # loss mask 1, with log-probs and the weights that made it
        return AgentResult(answer=generation.text)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        number = _NUMBER.search(result.answer)
        expected = episode.sample.task.metadata["answer"]
        is_right = number is not None and int(number[0]) == expected
        return Reward(score=float(is_right), details={"said": result.answer, "expected": expected})
