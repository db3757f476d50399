"""Events of vLLM's stream of tokens, one at a time; `output.py` makes a generation of them.

Invariant: nothing that an event says is used before it was read as this: ids and log-probs fit the arrays of a
trajectory.
"""

from __future__ import annotations

import msgspec

from py_scheduler.adapters.http_client import UNREADABLE
from py_scheduler.adapters.http_server.values import LogProb, SaidSpan, TokenId
from py_scheduler.domain.generation import FinishReason
from py_scheduler.errors import EngineUnavailableError

_REASONS = {
    "stop": FinishReason.STOP,
    "length": FinishReason.LENGTH,
    # It was told to stop at what repeats itself.
    "repetition": FinishReason.STOP,
    "abort": FinishReason.ABORT,
}


class Scored(msgspec.Struct, frozen=True, gc=False):
    """One output token. In mode "text" it goes without its id; its text is not asked for."""

    logprob: LogProb


class LogProbs(msgspec.Struct, frozen=True):
    content: list[Scored] | None = None


class Choice(msgspec.Struct, frozen=True):
    """What is new of the output. weight_versions: of all of it, in the last event alone."""

    text: str = ""
    token_ids: list[TokenId] | None = None
    logprobs: LogProbs | None = None
    finish_reason: str | None = None
    weight_versions: list[SaidSpan] | None = None


class PromptDetails(msgspec.Struct, frozen=True, gc=False):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class Refused(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | None = None


class Event(msgspec.Struct, frozen=True):
    """What is new of the one choice that was asked for, what the whole took, or an error in place of either."""

    choices: list[Choice] | None = None
    usage: Usage | None = None
    error: Refused | None = None


_EVENT = msgspec.json.Decoder(Event)


def decode_event(payload: bytes) -> Event:
    """Raises EngineUnavailableError for what is no event of vLLM's."""
    try:
        event = _EVENT.decode(payload)
    except UNREADABLE as error:
        raise EngineUnavailableError(f"vLLM sent an event that cannot be read: {error}: {payload[:200]!r}") from error
    if event.choices is None and event.error is None:
        raise EngineUnavailableError(f"vLLM sent an event that says nothing: {payload[:200]!r}")
    if event.choices is not None and len(event.choices) > 1:
        raise EngineUnavailableError(f"vLLM sent {len(event.choices)} choices, and one was asked for")
    return event


def reason_of(said: str) -> FinishReason:
    """Raises EngineUnavailableError for a reason that is not known."""
    if said not in _REASONS:
        raise EngineUnavailableError(f"vLLM ended a generation for the reason {said!r}, which is not known")
    return _REASONS[said]
