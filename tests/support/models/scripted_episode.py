"""An episode with a script in the model's place, for handlers on their own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.generation import ChatMessage, FinishReason, Generation, SamplingParams, StoppingCriteria
from py_scheduler.domain.task import Sample, Task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.training.iteration import IterationContext


class ScriptedEpisode:
    """Answers every question with `answer`, and keeps what was asked."""

    def __init__(
        self, task: Task, answer: str | Callable[[str], str] = "", reason: FinishReason = FinishReason.STOP
    ) -> None:
        self.sample = Sample(task_id="t", sample_no=0, task=task)
        self.sampling = SamplingParams()
        self.stopping = StoppingCriteria()
        self.attempt_no = 1
        self.token: PlacementToken | None = None
        self.iteration: IterationContext | None = None
        self.termination_reason = ""
        self.token_ids: Sequence[int] = ()
        self.remaining_seconds: float | None = None
        self.messages: list[ChatMessage] = []
        self.observed_text = ""
        self._answer = answer
        self._reason = reason

    @property
    def workdir(self) -> Path:
        raise NotImplementedError

    @property
    def api_base_url(self) -> str:
        raise NotImplementedError

    @property
    def api_key(self) -> str:
        raise NotImplementedError

    @property
    def api_socket(self) -> str:
        raise NotImplementedError

    def show(self, key: str, value: object) -> None: ...

    def choose_role(self) -> str:
        return "student"

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        self.messages = list(messages)
        return [1, 2, 3]

    async def observe_chat(self, messages: Sequence[ChatMessage]) -> None:
        self.observe(await self.encode_chat(messages), "\n".join(message.content for message in messages))

    async def encode(self, text: str) -> list[int]:
        raise NotImplementedError

    def observe(self, token_ids: Iterable[int], text: str = "") -> None:
        self.token_ids = [*self.token_ids, *token_ids]
        self.observed_text += text

    async def generate(
        self, *, role: str = "student", max_new_tokens: int | None = None, sampling: SamplingParams | None = None
    ) -> Generation:
        text = self._answer if isinstance(self._answer, str) else self._answer(self.messages[-1].content)
        return Generation.of(token_ids=[7], log_probs=[-0.5], text=text, finish_reason=self._reason)
