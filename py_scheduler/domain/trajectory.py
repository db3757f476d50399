"""The tokens of one episode, as a trainer wants them: flat arrays of equal length, and what each stretch of them is.

Invariants: `token_ids`, `log_probs` and `loss_mask` have one entry per token of the episode, in context order; the
mask is 1 on generated tokens alone, and on all of them unless off-policy ones were left out; environment tokens have
log-prob 0. Arrays are kept as little-endian bytes, because that is how they travel and are stored, and are read as
numpy views without a copy.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from py_scheduler.domain.generation import (
    FinishReason,
    Generation,
    LogProbKind,
    WeightSpan,
    first_of,
    little_endian,
    log_probs_of,
    token_ids_of,
)
from py_scheduler.domain.prompt import Prompt, ends_of, id_array
from py_scheduler.domain.values.plain import safe_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

ENVIRONMENT = "environment"


class Turn(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """Tokens [start, end) of the trajectory, from one source: the environment or the backend role that generated
    them. The environment neither finishes nor has log-probs of any kind.
    """

    start: int
    end: int
    source: str
    text: str = ""
    finish_reason: FinishReason | None = None
    log_prob_kind: LogProbKind | None = None


class Trajectory(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, gc=False):
    """One episode's tokens. Weight spans and turns count positions in the arrays."""

    token_id_bytes: bytes = b""
    log_prob_bytes: bytes = b""
    loss_mask_bytes: bytes = b""
    turns: tuple[Turn, ...] = ()
    weight_spans: tuple[WeightSpan, ...] = ()

    @property
    def token_ids(self) -> NDArray[np.int32]:
        """Shape (tokens,), read-only."""
        return np.frombuffer(self.token_id_bytes, dtype="<i4")

    @property
    def log_probs(self) -> NDArray[np.float32]:
        """Shape (tokens,), read-only, natural logarithm; of what, each turn's `log_prob_kind` says."""
        return np.frombuffer(self.log_prob_bytes, dtype="<f4")

    @property
    def loss_mask(self) -> NDArray[np.uint8]:
        """Shape (tokens,), read-only: 1 where the model generated what is to be learnt from."""
        return np.frombuffer(self.loss_mask_bytes, dtype="u1")

    def __len__(self) -> int:
        return len(self.loss_mask_bytes)

    def __repr__(self) -> str:
        """As a Generation's: with the first tokens in place of all bytes."""
        arrays = [
            f"{name}={first_of(getattr(self, name).tolist())}" for name in ("token_ids", "log_probs", "loss_mask")
        ]
        return f"Trajectory({', '.join(arrays)}, turns={self.turns!r}, weight_spans={self.weight_spans!r})"

    @property
    def generated_tokens(self) -> int:
        """All of them, also those that the loss mask leaves out."""
        return sum([turn.end - turn.start for turn in self.turns if turn.source != ENVIRONMENT])

    @property
    def generated_turns(self) -> tuple[Turn, ...]:
        """Those that a backend wrote, complete or cut."""
        return tuple([turn for turn in self.turns if turn.source != ENVIRONMENT])

    @property
    def read_text(self) -> str:
        """What the model read, over all turns."""
        return "\n".join([turn.text for turn in self.turns if turn.source == ENVIRONMENT])

    @property
    def written_text(self) -> str:
        """What the model wrote, over all turns."""
        return "\n".join([turn.text for turn in self.generated_turns])


EMPTY_TRAJECTORY = Trajectory()
_NOTHING_ASKED = Prompt.of(())


class TrajectoryBuilder:
    """Appends only: what was said once is never tokenised again."""

    __slots__ = ("_asked", "_log_probs", "_loss_mask", "_spans", "_token_ids", "_turns")

    def __init__(self) -> None:
        # Nobody else ever has it: an array cannot grow while somebody, such as numpy, has a view of it.
        self._token_ids = array("i")
        self._log_probs = array("f")
        self._loss_mask = bytearray()
        self._turns: list[Turn] = []
        self._spans: list[WeightSpan] = []
        self._asked = _NOTHING_ASKED

    @property
    def token_count(self) -> int:
        """Tokens so far."""
        return len(self._token_ids)

    @property
    def token_ids(self) -> list[int]:
        """The context so far, in a list of the caller's own."""
        return self._token_ids.tolist()

    @property
    def turns_generated(self) -> int:
        return sum(turn.source != ENVIRONMENT for turn in self._turns)

    def prompt(self) -> Prompt:
        """The context so far. It keeps what was made of the one before."""
        self._asked = self._asked.grown(self._token_ids[len(self._asked) :])
        return self._asked

    def append_environment(self, token_ids: Iterable[int], text: str = "") -> None:
        """Tokens that the model reads but did not write: prompts, tool results."""
        # Made whole first: a faulty id raises here and leaves the arrays as they were.
        added = id_array(token_ids)
        low, _ = ends_of(added)
        if low < 0:
            raise ValueError(f"{low} is no token id")
        start, count = len(self._token_ids), len(added)
        self._token_ids.extend(added)
        self._log_probs.frombytes(bytes(4 * count))
        self._loss_mask.extend(bytes(count))
        self._turns.append(Turn(start=start, end=start + count, source=ENVIRONMENT, text=safe_text(text)))

    def append_generation(self, generation: Generation, source: str) -> None:
        """Tokens that the backend in role `source` generated, complete or partial."""
        added, log_probs = token_ids_of(generation.token_id_bytes), log_probs_of(generation.log_prob_bytes)
        if len(added) != len(log_probs):
            raise ValueError(f"{len(added)} token ids came with {len(log_probs)} log-probs")
        start, count = len(self._token_ids), len(added)
        self._token_ids.extend(added)
        self._log_probs.extend(log_probs)
        self._loss_mask.extend(b"\x01" * count)
        self._spans.extend(
            WeightSpan(safe_text(span.version), start + span.start, start + span.end)
            for span in generation.weight_spans
        )
        self._turns.append(
            Turn(
                start=start,
                end=start + count,
                source=source,
                text=safe_text(generation.text),
                finish_reason=generation.finish_reason,
                log_prob_kind=generation.log_prob_kind,
            )
        )

    def build(self, *, mask_off_policy_prefix: bool = False) -> Trajectory:
        """`mask_off_policy_prefix`: tokens of other weights than the newest of their source have loss mask 0."""
        if not self._turns:
            return EMPTY_TRAJECTORY
        return Trajectory(
            token_id_bytes=little_endian(self._token_ids),
            log_prob_bytes=little_endian(self._log_probs),
            loss_mask_bytes=bytes(self._on_policy_mask() if mask_off_policy_prefix else self._loss_mask),
            turns=tuple(self._turns),
            weight_spans=tuple(self._spans),
        )

    def _on_policy_mask(self) -> bytearray:
        mask = bytearray(self._loss_mask)
        starts = [turn.start for turn in self._turns]
        sources = [self._turns[bisect_right(starts, span.start) - 1].source for span in self._spans]
        newest = {source: span.version for source, span in zip(sources, self._spans, strict=True)}
        for source, span in zip(sources, self._spans, strict=True):
            if span.version != newest[source]:
                mask[span.start : span.end] = bytes(span.end - span.start)
        return mask
