"""What is checked of a generation request before any backend sees it.

A backend is a poor judge of its input: one token id outside the vocabulary ends a whole SGLang server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.prompt import Prompt
from py_scheduler.errors import ContextOverflowError, EngineRejectedError

if TYPE_CHECKING:
    from py_scheduler.domain.generation import GenerationRequest, ModelInfo


def check_request(request: GenerationRequest, info: ModelInfo, max_new_tokens: int) -> None:
    """Raises EngineRejectedError for an empty prompt, an id outside the vocabulary or no token asked for.

    Raises ContextOverflowError when prompt and `max_new_tokens` together exceed the context. Against a vocabulary that
    is not known yet no id is checked.
    """
    try:
        ids = Prompt.of(request.token_ids)
    except OverflowError as error:
        raise EngineRejectedError(f"no model has such token ids: {error}") from error
    if not ids:
        raise EngineRejectedError("the prompt is empty: give at least one token id")
    if max_new_tokens < 1:
        raise EngineRejectedError(f"max_new_tokens is {max_new_tokens}: ask for at least 1")
    low, high = ids.low, ids.high
    if low < 0 or (info.vocab_size and high >= info.vocab_size):
        outside = low if low < 0 else high
        raise EngineRejectedError(
            f"token id {outside} is outside the vocabulary of {info.name}, [0, {info.vocab_size}): "
            "encode the prompt with this model's tokenizer"
        )
    if len(ids) + max_new_tokens > info.context_length:
        raise ContextOverflowError(
            f"{len(ids)} prompt tokens and {max_new_tokens} new ones exceed the context of {info.context_length}: "
            "shorten the prompt or lower max_new_tokens"
        )
