"""A language model that says what a test tells it to, behind the port that real engines have.

Its tokens are the bytes of the text, so that what is in a context can be read back exactly. Its chat template opens and
closes every message with a token of its own, as those of real models do.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from py_scheduler.domain.generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    LogProbKind,
    ModelInfo,
    WeightSpan,
)
from py_scheduler.errors import ContextOverflowError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from py_scheduler.domain.generation import ChatMessage

OPEN, CLOSE = 1, 2
_FIRST_BYTE = 3


class ScriptedModel:
    """The n-th generation of an episode is the n-th reply; the last one is said again and again."""

    def __init__(self, *replies: str, context_length: int = 65_536) -> None:
        self.replies = replies
        self.requests: list[GenerationRequest] = []
        self._context_length = context_length
        self._said: defaultdict[str, int] = defaultdict(int)

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    async def model_info(self) -> ModelInfo:
        return ModelInfo(
            name="scripted",
            vocab_size=_FIRST_BYTE + 256,
            context_length=self._context_length,
            weight_version="v1",
            log_prob_kind=LogProbKind.SAMPLED,
        )

    async def encode(self, text: str) -> list[int]:
        return [_FIRST_BYTE + byte for byte in text.encode()]

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        ids = []
        for message in messages:
            ids += [OPEN, *await self.encode(f"{message.role}\n{message.content}"), CLOSE]
        return [*ids, OPEN, *await self.encode("assistant\n")]

    async def generate(self, request: GenerationRequest) -> Generation:
        self.requests.append(request)
        limit = request.sampling.max_new_tokens or self._context_length - len(request.token_ids)
        if len(request.token_ids) + limit > self._context_length:
            raise ContextOverflowError("the scripted model's context is full")
        turn = self._said[request.session_id]
        self._said[request.session_id] += 1
        text = self.replies[min(turn, len(self.replies) - 1)]
        whole = [*await self.encode(text), CLOSE]
        ids = whole[:limit]
        return Generation.of(
            token_ids=ids,
            log_probs=[-0.5] * len(ids),
            text=read_text(ids),
            finish_reason=FinishReason.STOP if ids == whole else FinishReason.LENGTH,
            weight_spans=(WeightSpan("v1", 0, len(ids)),),
        )

    async def abort(self, rid: str) -> None:
        pass


def read_text(token_ids: Iterable[int]) -> str:
    """The text of token ids, with the template's own left out."""
    return bytes(token - _FIRST_BYTE for token in token_ids if token >= _FIRST_BYTE).decode(errors="replace")
