"""What a server has sent of one generation, put together from its events.

Invariants

- What leaves here is whole. Every token id has its log-prob, and the spans of the weights cover each token once, in
  order. A generation of which the server says otherwise is an error, with the tokens before the fault as `partial`.
- How the output comes is read off the events, not off what the server was asked or once said: it may have come back
  with other flags, and the workers of a router may differ. Each event tells how many log-probs there are so far. So it
  is known to be the whole, the next increment, or neither, which is a fault: no token is lost or had twice. One that
  does not tell can only be the first, and the last one tells how many tokens there are.
- Of a stream that repeats its output the first two events are read, which tell that it does, and then the newest alone.
  Of the others no more is read than the weights and the count. An event that may not repeat the output, such as an
  error, replaces none.
"""

from __future__ import annotations

from array import array
from itertools import takewhile
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.adapters.http_server.values import BAD_REQUEST, SERVER_ERRORS
from py_scheduler.adapters.sglang.events import (
    UNSAID,
    Meta,
    decode_event,
    head_of_repeating,
)
from py_scheduler.adapters.sglang.streaming import Streaming
from py_scheduler.domain.generation import FinishReason, Generation, LogProbKind, WeightSpan, little_endian
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.http_server.values import SaidSpan
    from py_scheduler.adapters.sglang.events import Event, Finish, Refused, Scored

_NO_META = Meta()


class _Span(msgspec.Struct, gc=False):
    version: str
    start: int
    end: int


class SglangOutput:
    """Grows by `add`. `streaming`: CUMULATIVE or INCREMENTS as soon as two events with tokens have told; else None.

    `refused`: what came in place of tokens, if anything did. `finish`: as the last event that was read says.
    """

    def __init__(self) -> None:
        self.streaming: Streaming | None = None
        self.refused: Refused | None = None
        self._token_ids = array("i")
        self._log_probs = array("f")
        self._texts: list[str] = []
        self._spans: list[_Span] = []
        """The weights that the server named with the event that first had the token. They may reach further than the
        tokens that were read.
        """
        self._last = _NO_META
        """Of the last event that was read, all but its tokens."""
        self._unread: bytes | None = None
        self._newest_length = 0
        """Tokens of the newest event, read or not."""
        self._prompt_tokens = self._cached_tokens = 0

    @property
    def finish(self) -> Finish:
        return self._last.finish_reason or UNSAID

    @property
    def _is_aborted(self) -> bool:
        """By the last event. One that says nothing is on the way."""
        said = self._last.finish_reason
        return said is not None and said.type is FinishReason.ABORT

    def add(self, payload: bytes) -> None:
        """Takes the next event. Raises EngineUnavailableError for one that cannot be read or does not fit."""
        head = head_of_repeating(payload) if self.streaming is Streaming.CUMULATIVE else None
        if head is not None and head.output_token_logprobs_length >= self._newest_length:
            self._newest_length = head.output_token_logprobs_length
            self._cover(head.weight_version, head.output_token_logprobs_length)
            self._unread = payload
        else:
            self.settle()
            self._read(payload)

    def settle(self) -> bool:
        """Reads what is left to read; False when there was no event at all. Raises as `add` does."""
        if self._unread is not None:
            unread, self._unread = self._unread, None
            self._read(unread)
        return self._last is not _NO_META or self.refused is not None

    def whole(self) -> Generation:
        """After the last event. Raises EngineUnavailableError when tokens are missing, or nobody can tell which weights
        generated what.
        """
        count, wanted = len(self._token_ids), self._last.completion_tokens
        if wanted is not None and wanted != count and not self._is_aborted:
            raise EngineUnavailableError(f"SGLang gave {count} tokens of {wanted} that it generated", self._cut())
        return self._generation(self.finish.type)

    @property
    def failure(self) -> tuple[int, str] | None:
        """Status, as in HTTP, and message of what the server says went wrong, which is nobody's abort."""
        finish = self.finish
        if self.refused is not None:
            # Who has tokens was not refused: what says no status then is the server's own failure.
            return self.refused.code or (SERVER_ERRORS if self._token_ids else BAD_REQUEST), self.refused.message
        if finish.type is FinishReason.ABORT and finish.status_code is not None:
            return finish.status_code, str(finish.message)
        return None

    def partial(self) -> Generation:
        """What came of a generation that did not end properly, as far as its ids and log-probs agree."""
        try:
            self.settle()
        except EngineUnavailableError as error:
            if not isinstance(error.partial, Generation):
                raise
            return error.partial
        return self._generation(FinishReason.ABORT)

    # -- one event

    def _read(self, payload: bytes) -> None:
        try:
            event = decode_event(payload)
        except EngineUnavailableError as error:
            error.partial = self._generation(FinishReason.ABORT)
            raise
        if event.error is not None:
            self.refused = event.error
            return
        meta = event.meta_info or Meta()
        # Its tokens go into the arrays. As objects they would take six times as much until the next event is read.
        self._last = msgspec.structs.replace(meta, output_token_logprobs=None)
        self._prompt_tokens = meta.prompt_tokens or self._prompt_tokens
        self._cached_tokens = meta.cached_tokens or self._cached_tokens
        scored, total = meta.output_token_logprobs or [], meta.output_token_logprobs_length
        if total is None:
            if self._token_ids and (scored or not self._is_aborted):
                message = f"SGLang gave {len(scored)} tokens after {len(self._token_ids)}, and not how many they make"
                raise EngineUnavailableError(message, self._cut())
            total = len(scored)
        if len(scored) >= total:
            self._take_whole(event, scored, total)
        elif len(self._token_ids) + len(scored) == total:
            if scored:
                self.streaming = Streaming.INCREMENTS
            elif self.streaming is not Streaming.INCREMENTS and (event.text or "").startswith("".join(self._texts)):
                # An abort may come without tokens, however they came: here with the whole text once more.
                self._texts.clear()
            self._grow(self._scored_ids(event, scored, len(self._token_ids)), scored, event.text or "")
        else:
            message = f"SGLang gave {len(scored)} tokens after {len(self._token_ids)}, which it says make {total}"
            raise EngineUnavailableError(message, self._cut())

    def _take_whole(self, event: Event, scored: list[Scored], total: int) -> None:
        known, text = len(self._token_ids), event.text or ""
        if len(scored) < known:
            if self._is_aborted:
                return
            raise EngineUnavailableError(f"SGLang gave {len(scored)} tokens, and {known} before", self._cut())
        if self._is_aborted or self.streaming is Streaming.INCREMENTS:
            # An increment is never the whole. But who is aborted while he waits to go on, after SGLang had taken back
            # his memory, is told everything once more, behind an increment that was not sent yet. So an abort does not
            # tell how the tokens come.
            twice = len(scored) - total
            scored = scored[twice:]
            text = text[(len(text) - len("".join(self._texts))) // 2 if twice else 0 :]
        elif known:
            self.streaming = Streaming.CUMULATIVE
        token_ids = self._scored_ids(event, scored, 0)
        del self._token_ids[:], self._log_probs[:], self._texts[:]
        self._grow(token_ids, scored, text)

    def _scored_ids(self, event: Event, scored: list[Scored], before: int) -> list[int]:
        """The ids of the log-probs. Raises EngineUnavailableError when the event's are others.

        `before`: the tokens that stay.
        """
        token_ids, theirs = event.output_ids or [], [each.token_id for each in scored]
        if token_ids == theirs:
            return theirs
        if self._is_aborted:
            if token_ids[: len(theirs)] == theirs:
                return theirs  # It may end with a token of no meaning and without log-prob.
            if before == 0 and self.streaming is not Streaming.CUMULATIVE and token_ids[-1:] == theirs[-1:]:
                return theirs  # Told everything once more, but for the ids.
        count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(token_ids, theirs, strict=False)))
        if before + count > len(self._token_ids):
            del self._token_ids[before:], self._log_probs[before:]
            self._grow(theirs[:count], scored[:count], "")
        message = f"SGLang gave {len(token_ids)} token ids and {len(theirs)} log-probs that do not match them"
        raise EngineUnavailableError(message, self._cut())

    def _grow(self, token_ids: list[int], scored: list[Scored], text: str) -> None:
        """By tokens whose ids were found to be those of their log-probs."""
        self._token_ids.fromlist(token_ids)
        self._log_probs.fromlist([each.log_prob for each in scored])
        self._texts.append(text)
        self._newest_length = len(self._token_ids)
        self._cover(self._last.weight_version, self._newest_length)

    def _cover(self, said: str | None, end: int) -> None:
        """`said`: the weights of the tokens up to `end` that have none yet."""
        version, spans = said or "default", self._spans
        if spans and (end <= spans[-1].end or spans[-1].version == version):
            spans[-1].end = max(end, spans[-1].end)
        elif end:
            spans.append(_Span(version, spans[-1].end if spans else 0, end))

    # -- what is made of them

    def _cut(self) -> Generation:
        """Up to a fault. Without text, which may go on beyond that or end before."""
        spans = self._told_spans() or self._spans
        return self._made(FinishReason.ABORT, "", spans)

    def _generation(self, reason: FinishReason) -> Generation:
        return self._made(reason, "".join(self._texts), self._told_spans() or self._spans)

    def _made(self, reason: FinishReason, text: str, spans: Sequence[SaidSpan | _Span]) -> Generation:
        count = len(self._token_ids)
        return Generation(
            token_id_bytes=little_endian(self._token_ids),
            log_prob_bytes=little_endian(self._log_probs),
            text=text,
            finish_reason=reason,
            weight_spans=tuple(
                [
                    WeightSpan(span.version, span.start, min(span.end, count))
                    for span in spans
                    if span.start < min(span.end, count)
                ]
            ),
            log_prob_kind=LogProbKind.SAMPLED,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )

    def _told_spans(self) -> Sequence[SaidSpan]:
        """The server's, which the last event has of a generation that has ended. They may reach further than the
        tokens: they count those that were left out too.
        """
        told, count = self._last.weight_versions, len(self._token_ids)
        if not told or not count:
            return ()
        edges = [0, *(span.end for span in told)]
        if edges != sorted(edges) or edges[:-1] != [span.start for span in told] or edges[-1] < count:
            raise EngineUnavailableError(f"SGLang gave {count} tokens and weight versions for others: {told[:10]}")
        return told
