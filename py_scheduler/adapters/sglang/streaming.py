"""How the tokens of a generation come from a server, and how long it may be silent meanwhile.

Invariant: what a token costs does not depend on how many come before it. Increments may be as many as they are; where
each event repeats the output so far, the number of events does not grow with the output.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.http_server.attempt import Silence

if TYPE_CHECKING:
    from py_scheduler.adapters.sglang.settings import SglangSettings


class Streaming(StrEnum):
    """INCREMENTS: an event has what is new since the one before. CUMULATIVE: it has the whole output so far. PLAIN: no
    events, one answer at the end.
    """

    INCREMENTS = "increments"
    CUMULATIVE = "cumulative"
    PLAIN = "plain"

    @property
    def words(self) -> str:
        return _WORDS[self]


_WORDS = {
    Streaming.INCREMENTS: "increments",
    Streaming.CUMULATIVE: "a few events of the whole output: --incremental-streaming-output would make it cheaper",
    Streaming.PLAIN: "plain answers: what breaks is lost",
}


def stream_interval(streaming: Streaming, max_new_tokens: int, settings: SglangSettings) -> int | None:
    """Tokens from one event to the next; the first token has an event of its own. None: as the server likes.

    With 8 events and an interval of 64, cumulative events of 32 768 tokens are 4 096 apart, and those of 256 are 64.
    """
    if streaming is not Streaming.CUMULATIVE:
        return settings.stream_interval
    return max(settings.stream_interval or 1, -(-max_new_tokens // settings.cumulative_events))


def silence_of(body: dict[str, Any], settings: SglangSettings) -> Silence:
    """For this body of /generate: the more tokens lie between two events, the longer is the silence there."""
    sampling = body["sampling_params"]
    tokens = sampling["max_new_tokens"]
    first, between = (0, min(tokens, sampling.get("stream_interval", 1))) if body["stream"] else (tokens, 0)
    return Silence.of(first, between, settings)
