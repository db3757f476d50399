"""Events of SGLang's stream, and what is made of them."""

from __future__ import annotations

from typing import Any

import msgspec

from py_scheduler.adapters.sglang.output import SglangOutput
from py_scheduler.domain.generation import Generation

CHARACTERS = "aé€🙂"
"""One for each length in bytes."""


def event(start: int, end: int, *, version: str = "default", told: int | None = None, **meta: Any) -> bytes:
    """Tokens [start, end) of ids from 100 on, as an event says that there are `told` in all, or `end`."""
    said = {
        "finish_reason": None,
        "weight_version": version,
        "output_token_logprobs": [[-i / 128, 100 + i, None] for i in range(start, end)],
        "output_token_logprobs_length": end if told is None else told,
        "prompt_tokens": 3,
    }
    text = "".join(CHARACTERS[i % 4] for i in range(start, end))
    answer = {"text": text, "output_ids": [100 + i for i in range(start, end)], "meta_info": said | meta}
    return msgspec.json.encode(answer)


def read(*events: bytes) -> SglangOutput:
    output = SglangOutput()
    for each in events:
        output.add(each)
    output.settle()
    return output


def assert_first(generation: Generation, count: int) -> None:
    """The first `count` tokens, each once and with its own log-prob, text and weights."""
    assert_first_tokens(generation, count)
    assert generation.text == "".join(CHARACTERS[i % 4] for i in range(count))


def assert_first_tokens(generation: Generation, count: int) -> None:
    """All of that but the text, which has no known end where ids and log-probs do not agree."""
    assert generation.token_ids == [100 + i for i in range(count)]
    assert generation.log_probs == [-i / 128 for i in range(count)]
    covered = [place for span in generation.weight_spans for place in range(span.start, span.end)]
    assert covered == list(range(count))
