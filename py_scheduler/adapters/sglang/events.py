"""Events of SGLang's stream, read as generations.

Invariant: what leaves here is whole. Every token id has its log-prob, both fit the arrays of a trajectory, and the
spans of the weights cover each token once, in order. A generation of which the server says otherwise is an error.
"""

from __future__ import annotations

from itertools import takewhile

import msgspec

from py_scheduler.adapters.http_client import UNREADABLE
from py_scheduler.adapters.sglang.answers import LogProb, TokenId, Version
from py_scheduler.domain.generation import FinishReason, Generation, LogProbKind, WeightSpan
from py_scheduler.errors import EngineUnavailableError

SERVER_ERRORS = 500
NOTHING = Generation(token_ids=[], log_probs=[], text="", finish_reason=FinishReason.ABORT)


class Scored(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One output token; the server appends its text, which is not asked for."""

    log_prob: LogProb
    token_id: TokenId


class SaidSpan(msgspec.Struct, frozen=True, gc=False):
    version: Version
    start: int
    end: int


class Finish(msgspec.Struct, frozen=True, gc=False):
    """Why it ended. status_code: of an abort that is the server's own failure or refusal, as in HTTP."""

    type: FinishReason
    status_code: int | None = None
    message: str | None = None


UNSAID = Finish(FinishReason.ABORT, SERVER_ERRORS, "the stream ended without a finish reason")


class Meta(msgspec.Struct, frozen=True):
    finish_reason: Finish | None = None
    output_token_logprobs: list[Scored] | None = None
    weight_version: Version | None = None
    weight_versions: list[SaidSpan] | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Refused(msgspec.Struct, frozen=True):
    message: str = ""
    code: int | None = None


class Event(msgspec.Struct, frozen=True):
    """The whole output so far, or an error in its place."""

    text: str | None = None
    output_ids: list[TokenId] | None = None
    meta_info: Meta | None = None
    error: Refused | None = None

    @property
    def finish(self) -> Finish:
        return (self.meta_info and self.meta_info.finish_reason) or UNSAID


_EVENT = msgspec.json.Decoder(Event)


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


def read_partial(event: Event) -> Generation:
    """What an event brought of a generation that did not end properly, as far as its ids and log-probs agree."""
    try:
        return msgspec.structs.replace(read_generation(event), finish_reason=FinishReason.ABORT)
    except EngineUnavailableError as error:
        if not isinstance(error.partial, Generation):
            raise
        return error.partial


def read_generation(event: Event) -> Generation:
    """One event as a generation; one without finish reason counts as aborted.

    Raises EngineUnavailableError when ids and log-probs do not belong together, with those that do as `partial`, and
    when nobody can tell which weights generated what.
    """
    meta = event.meta_info or Meta()
    token_ids, scored = event.output_ids or [], meta.output_token_logprobs or []
    reason = event.finish.type
    if reason is FinishReason.ABORT:
        # An aborted one may end with a token of no meaning and without log-prob.
        token_ids = token_ids[: len(scored)]
    if [each.token_id for each in scored] != token_ids:
        count = _aligned(token_ids, scored)
        # Its text is left out, for it goes on beyond that.
        partial = _generation(meta, scored[:count], "", FinishReason.ABORT)
        message = f"SGLang gave {len(token_ids)} token ids and {len(scored)} log-probs that do not match them"
        raise EngineUnavailableError(message, partial)
    return _generation(meta, scored, event.text or "", reason)


def _aligned(token_ids: list[int], scored: list[Scored]) -> int:
    """How many ids have their log-prob, up to the first that has not."""
    pairs = zip(token_ids, scored, strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1].token_id, pairs))


def _generation(meta: Meta, scored: list[Scored], text: str, reason: FinishReason) -> Generation:
    return Generation(
        token_ids=[each.token_id for each in scored],
        log_probs=[each.log_prob for each in scored],
        text=text,
        finish_reason=reason,
        weight_spans=_spans(meta, len(scored)),
        log_prob_kind=LogProbKind.SAMPLED,
        prompt_tokens=meta.prompt_tokens or 0,
        cached_tokens=meta.cached_tokens or 0,
    )


def _spans(meta: Meta, count: int) -> tuple[WeightSpan, ...]:
    """Of the first `count` tokens. The server's may reach further: they count the tokens that were left out too."""
    if not count:
        return ()
    told = meta.weight_versions or [SaidSpan(meta.weight_version or "default", 0, count)]
    edges = [0, *(span.end for span in told)]
    if edges != sorted(edges) or edges[:-1] != [span.start for span in told] or edges[-1] < count:
        raise EngineUnavailableError(f"SGLang gave {count} tokens and weight versions for others: {told[:10]}")
    return tuple(
        [
            WeightSpan(span.version, span.start, min(span.end, count))
            for span in told
            if span.start < min(span.end, count)
        ]
    )
