"""Events of SGLang's stream, one at a time; `output.py` makes a generation of them.

Invariant: nothing that an event says is used before it was read as this: ids and log-probs fit the arrays of a
trajectory.
"""

from __future__ import annotations

import msgspec

from py_scheduler.adapters.http_client import UNREADABLE
from py_scheduler.adapters.http_server.values import SERVER_ERRORS, LogProb, SaidSpan, TokenId, Version
from py_scheduler.domain.generation import FinishReason
from py_scheduler.errors import EngineUnavailableError


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One output token; the server appends its text, which is not asked for."""

    log_prob: LogProb
    token_id: TokenId


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Why it ended. status_code: of an abort that is the server's own failure or refusal, as in HTTP."""

    type: FinishReason
    status_code: int | None = None
    message: str | None = None


UNSAID = Finish(FinishReason.ABORT, SERVER_ERRORS, "the stream ended without a finish reason")


class Meta(msgspec.Struct, frozen=True):
    finish_reason: Finish | None = None
    output_token_logprobs: list[Scored] | None = None
    output_token_logprobs_length: int | None = None
    """Of the whole output so far, whatever this event has of it."""
    weight_version: Version | None = None
    weight_versions: list[SaidSpan] | None = None
    completion_tokens: int | None = None
    """Generated so far, with and without a log-prob."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Refused(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | None = None


class Event(msgspec.Struct, frozen=True):
    """The output so far or what is new of it, or an error in its place. A plain answer is one event."""

    text: str | None = None
    output_ids: list[TokenId] | None = None
    meta_info: Meta | None = None
    error: Refused | None = None


class HeadMeta(msgspec.Struct, frozen=True):
    output_token_logprobs_length: int
    finish_reason: Finish | None = None
    weight_version: Version | None = None


class Head(msgspec.Struct, frozen=True):
    """Of an event that has tokens, all but the tokens: a fifth of the time that reading the event takes."""

    meta_info: HeadMeta


_EVENT = msgspec.json.Decoder(Event)
_HEAD = msgspec.json.Decoder(Head)


def decode_event(payload: bytes) -> Event:
    """Raises EngineUnavailableError for what is no event of SGLang's."""
    try:
        event = _EVENT.decode(payload)
    except UNREADABLE as error:
        message = f"SGLang sent an event that cannot be read: {error}: {payload[:200]!r}"
        raise EngineUnavailableError(message) from error
    if event.meta_info is None and event.error is None:
        raise EngineUnavailableError(f"SGLang sent an event that says nothing: {payload[:200]!r}")
    return event


def head_of_repeating(payload: bytes) -> HeadMeta | None:
    """Of an event that repeats the output so far, where the stream does. None for one that may not: an abort, an error,
    what cannot be read.
    """
    try:
        meta = _HEAD.decode(payload).meta_info
    except UNREADABLE:
        return None
    is_abort = meta.finish_reason is not None and meta.finish_reason.type is FinishReason.ABORT
    return None if is_abort else meta
