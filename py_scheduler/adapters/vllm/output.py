"""What a vLLM server has sent of one generation, put together from its events.

Invariants

- What leaves here is whole. Every token id has its log-prob, and the spans of the weights cover each token once, in
  order. A generation of which the server says otherwise is an error, with the tokens before the fault as `partial`.
- Each event has what is new, as many log-probs as ids. The last but one says why it ended, and which weights made which
  tokens; the last says how many tokens there are. One without either of them has not ended.
- Only the end tells the weights. A generation that was cut before has no spans: whoever made the attempt names them.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from py_scheduler.adapters.http_server.values import BAD_REQUEST, SERVER_ERRORS
from py_scheduler.adapters.vllm.events import decode_event, reason_of
from py_scheduler.domain.generation import FinishReason, Generation, LogProbKind, WeightSpan, little_endian
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from py_scheduler.adapters.http_server.values import SaidSpan
    from py_scheduler.adapters.vllm.events import Choice, Refused

NO_LOG_PROB: Final = -9999.0
"""What the server writes where it has none, or none that is a number."""


class VllmOutput:
    """Grows by `add`."""

    def __init__(self, log_prob_kind: LogProbKind) -> None:
        self._log_prob_kind = log_prob_kind
        self._refused: Refused | None = None
        self._reason: FinishReason | None = None
        self._told_spans: list[SaidSpan] | None = None
        self._token_ids = array("i")
        self._log_probs = array("f")
        self._texts: list[str] = []
        self._prompt_tokens = self._cached_tokens = 0
        self._completion_tokens: int | None = None
        self._has_begun = False

    def add(self, payload: bytes) -> None:
        """Takes the next event. Raises EngineUnavailableError for one that cannot be read or does not fit."""
        try:
            event = decode_event(payload)
            self._has_begun = True
            self._refused = event.error or self._refused
            for choice in event.choices or ():
                self._grow(choice)
        except EngineUnavailableError as error:
            error.partial = self.partial()
            raise
        if event.usage is not None:
            self._prompt_tokens, self._completion_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
            details = event.usage.prompt_tokens_details
            self._cached_tokens = (details.cached_tokens if details is not None else None) or 0

    def settle(self) -> bool:
        return self._has_begun

    @property
    def failure(self) -> tuple[int, str] | None:
        if self._refused is not None:
            # Who has tokens was not refused: what says no status then is the server's own failure.
            return self._refused.code or (SERVER_ERRORS if self._token_ids else BAD_REQUEST), self._refused.message
        if self._reason is None:
            return SERVER_ERRORS, "the stream ended without a finish reason"
        return None

    def whole(self) -> Generation:
        count = len(self._token_ids)
        if self._reason is None or self._completion_tokens != count:
            message = f"vLLM gave {count} tokens of {self._completion_tokens} that it generated"
            raise EngineUnavailableError(message, self.partial())
        try:
            spans = self._spans()
        except EngineUnavailableError as error:
            error.partial = self.partial()
            raise
        return self._made(self._reason, spans)

    def partial(self) -> Generation:
        try:
            spans = self._spans()
        except EngineUnavailableError:
            spans = ()
        return self._made(FinishReason.ABORT, spans)

    def _grow(self, choice: Choice) -> None:
        token_ids = choice.token_ids or []
        scored = (choice.logprobs.content if choice.logprobs is not None else None) or []
        if self._reason is not None and token_ids:
            raise EngineUnavailableError(f"vLLM gave {len(token_ids)} tokens after the end")
        if len(scored) != len(token_ids):
            raise EngineUnavailableError(f"vLLM gave {len(token_ids)} token ids and {len(scored)} log-probs")
        log_probs = [each.logprob for each in scored]
        if log_probs and (NO_LOG_PROB in log_probs or max(log_probs) > 0):
            worst = NO_LOG_PROB if NO_LOG_PROB in log_probs else max(log_probs)
            raise EngineUnavailableError(f"vLLM gave {worst} as a log-prob, which is none")
        reason = reason_of(choice.finish_reason) if choice.finish_reason is not None else None
        self._token_ids.fromlist(token_ids)
        self._log_probs.fromlist(log_probs)
        self._texts.append(choice.text)
        if reason is not None:
            self._reason, self._told_spans = reason, choice.weight_versions

    def _spans(self) -> tuple[WeightSpan, ...]:
        told, count = self._told_spans, len(self._token_ids)
        if told is None:
            return ()
        edges = [0, *(span.end for span in told)]
        if edges != sorted(edges) or edges[:-1] != [span.start for span in told] or edges[-1] != count:
            raise EngineUnavailableError(f"vLLM gave {count} tokens and weight versions for others: {told[:10]}")
        return tuple([WeightSpan(span.version, span.start, span.end) for span in told if span.start < span.end])

    def _made(self, reason: FinishReason, spans: tuple[WeightSpan, ...]) -> Generation:
        return Generation(
            token_id_bytes=little_endian(self._token_ids),
            log_prob_bytes=little_endian(self._log_probs),
            text="".join(self._texts),
            finish_reason=reason,
            weight_spans=spans,
            log_prob_kind=self._log_prob_kind,
            prompt_tokens=self._prompt_tokens,
            cached_tokens=self._cached_tokens,
        )
