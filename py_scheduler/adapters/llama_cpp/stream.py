"""One generation of llama.cpp as it streams in, and the tokens that its stream leaves out.

llama.cpp sends a token once the text so far is whole UTF-8. Of a character made of several tokens only the last is
sent, with the bytes of all; its count tells how many went before. `Received` keeps a `Gap` for them, and `fill_gaps`
asks the model at each such place for the token whose bytes fit.

Invariants: `token_ids` and `log_probs` have one entry per generated token, gaps included; stop strings are looked for
here and not in the server, so nothing but unfinished characters is ever held back by it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.generation import FinishReason, Generation, LogProbKind, WeightSpan
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.domain.generation import SamplingParams

UNKNOWN = -1


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """A token that the model might have chosen at one place."""

    id: int
    logprob: float
    bytes: list[int]


class Scored(msgspec.Struct, frozen=True):
    """A generated token; `bytes` is the text sent with it, `top_logprobs` the likeliest tokens at its place."""

    id: int
    logprob: float
    bytes: list[int]
    top_logprobs: list[Candidate] = []


class Chunk(msgspec.Struct, frozen=True):
    """One event of /completion, or its whole answer."""

    stop: bool = False
    stop_type: str = ""
    tokens_predicted: int = 0
    tokens_evaluated: int = 0
    cached_tokens: int = msgspec.field(name="timings/cache_n", default=0)
    completion_probabilities: list[Scored] = []
    error: dict[str, object] | None = None


class Gap(msgspec.Struct, frozen=True):
    """`count` tokens from `start` on that were not sent; `text_bytes` is theirs and the next token's."""

    start: int
    count: int
    text_start: int
    text_bytes: bytes


class Received:
    """What has come of one generation."""

    def __init__(self, sampling: SamplingParams) -> None:
        self.token_ids: list[int] = []
        self.log_probs: list[float] = []
        self.gaps: list[Gap] = []
        self.finish_reason: FinishReason | None = None
        self._text = bytearray()
        self._last = Chunk()
        self._stop_strings = [stop.encode() for stop in sampling.stop or () if stop]
        self._longest_stop = max(map(len, self._stop_strings), default=0)
        self._stop_token_ids = frozenset(sampling.stop_token_ids or ())

    def add(self, chunk: Chunk) -> None:
        """Takes the next event; `finish_reason` is set when nothing more is wanted.

        Raises EngineUnavailableError when the event does not continue what came before.
        """
        self._last = chunk
        for scored in chunk.completion_probabilities:
            missing = chunk.tokens_predicted - len(self.token_ids) - 1
            if missing < 0:
                raise EngineUnavailableError("llama.cpp counted fewer tokens than it sent")
            text = bytes(scored.bytes)
            if missing:
                self.gaps.append(Gap(len(self.token_ids), missing, len(self._text), text))
            self.token_ids += [UNKNOWN] * missing + [scored.id]
            self.log_probs += [0.0] * missing + [scored.logprob]
            if scored.id in self._stop_token_ids:
                self.finish_reason = FinishReason.STOP
                return
            self._text += text
            self._look_for_stop_string(len(text))
        if chunk.stop and self.finish_reason is None:
            self.finish_reason = FinishReason.LENGTH if chunk.stop_type == "limit" else FinishReason.STOP

    def generation(self, weight_version: str, *, complete: bool) -> Generation:
        """What was received, if not `complete` only up to the first gap and with finish reason ABORT."""
        tokens, text = len(self.token_ids), len(self._text)
        if self.gaps and not complete:
            tokens, text = self.gaps[0].start, self.gaps[0].text_start
        reason = self.finish_reason if complete else None
        return Generation.of(
            self.token_ids[:tokens],
            self.log_probs[:tokens],
            text=self._text[:text].decode(errors="replace"),
            finish_reason=reason or FinishReason.ABORT,
            weight_spans=(WeightSpan(weight_version, 0, tokens),) if tokens else (),
            log_prob_kind=LogProbKind.MODEL,
            prompt_tokens=self._last.tokens_evaluated,
            cached_tokens=self._last.cached_tokens,
        )

    def _look_for_stop_string(self, added: int) -> None:
        """Cuts the text before the first stop string; the ids keep it, as SGLang does."""
        searched_from = max(0, len(self._text) - added - self._longest_stop)
        found = [at for stop in self._stop_strings if (at := self._text.find(stop, searched_from)) >= 0]
        if found:
            del self._text[min(found) :]
            self.finish_reason = FinishReason.STOP


async def fill_gaps(
    received: Received, prompt: Sequence[int], likeliest: Callable[[list[int], bytes], Awaitable[list[Candidate]]]
) -> None:
    """Finds the ids and log-probs that the stream left out.

    `likeliest(ids, text)` gives tokens that may follow `ids` and whose bytes begin `text`, likeliest first. Where
    several fit, the likeliest is taken: another split of the same bytes is possible, but models do not write so.
    Raises EngineUnavailableError when none fits.
    """
    for gap in received.gaps:
        text = gap.text_bytes
        for place in range(gap.start, gap.start + gap.count):
            bytes_for_the_others = gap.start + gap.count - place
            fitting = [
                candidate
                for candidate in await likeliest([*prompt, *received.token_ids[:place]], text)
                if len(candidate.bytes) <= len(text) - bytes_for_the_others
            ]
            if not fitting:
                raise EngineUnavailableError(f"llama.cpp left out token {place} and none fits its bytes {text!r}")
            received.token_ids[place] = fitting[0].id
            received.log_probs[place] = fitting[0].logprob
            text = text[len(fitting[0].bytes) :]
    received.gaps.clear()
