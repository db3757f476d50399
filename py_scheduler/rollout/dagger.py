"""How the teacher's share β falls over a training run, and how the tail t_max grows. Source: seed 1, section 5."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.training.iteration import IterationContext, checked_rollout_id
from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator


class Decay(StrEnum):
    """The shape in which β goes from `beta_start` to `beta_end`.

    LINEAR and COSINE arrive after `decay_iterations` and stay there. EXPONENTIAL multiplies the distance to the end by
    `rate` in each iteration, STEP only in every `step_iterations`-th; both come ever closer. From 1 to 0 with a rate of
    0.5, EXPONENTIAL goes 1, 0.5, 0.25; STEP with 2 iterations goes 1, 1, 0.5, 0.5, 0.25.
    """

    LINEAR = "linear"
    COSINE = "cosine"
    EXPONENTIAL = "exponential"
    STEP = "step"


_MAX_TOKENS = 2**31 - 1
"""More than any context has, and exact as a float."""


class DAggerSchedule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """β and t_max of each iteration, from 0. Raises InvalidArgumentError with every fault."""

    decay: Decay = Decay.LINEAR
    beta_start: float = 1.0
    """A probability."""
    beta_end: float = 0.0
    """Another one, not above the start."""
    decay_iterations: int = 10
    """After so many, LINEAR and COSINE have arrived."""
    rate: float = 0.5
    """What EXPONENTIAL and STEP leave of the distance to the end: with 0.5, β goes 1, 0.5, 0.25 on its way to 0."""
    step_iterations: int = 1
    """Iterations between two falls of STEP."""
    t_max_start: int = 0
    """Tokens of the tail at first; 0: the schedule says nothing about it."""
    t_max_end: int = 0
    """And after t_max_iterations. In between it goes in a line, rounded to whole tokens."""
    t_max_iterations: int = 10

    def __post_init__(self) -> None:
        if violations := list(self._faults()):
            raise InvalidArgumentError(violations)

    def beta(self, rollout_id: int) -> float:
        """The probability with which a turn of this iteration is the teacher's. It never rises with rollout_id."""
        left = self._left(checked_rollout_id(rollout_id))
        if left == 1:
            return self.beta_start
        # A product and a sum of one term each: rounding keeps their order, which it does not for a weighted mean.
        return min(self.beta_start, self.beta_end + left * (self.beta_start - self.beta_end))

    def t_max(self, rollout_id: int) -> int:
        """Tokens of the tail in this iteration; 0: nothing is said."""
        done = min(1.0, checked_rollout_id(rollout_id) / self.t_max_iterations)
        return round(self.t_max_start + done * (self.t_max_end - self.t_max_start))

    def context(self, rollout_id: int) -> IterationContext:
        """What the episodes of this iteration are told."""
        return IterationContext(rollout_id=rollout_id, beta=self.beta(rollout_id), t_max=self.t_max(rollout_id))

    def _left(self, rollout_id: int) -> float:
        """How much of the way from start to end is still ahead, from 1 to 0."""
        match self.decay:
            case Decay.LINEAR:
                return 1 - min(1.0, rollout_id / self.decay_iterations)
            case Decay.COSINE:
                return (1 + math.cos(math.pi * min(1.0, rollout_id / self.decay_iterations))) / 2
            case Decay.EXPONENTIAL:
                return self.rate**rollout_id
            case Decay.STEP:
                return self.rate ** (rollout_id // self.step_iterations)

    def _faults(self) -> Iterator[FieldViolation]:
        for field in ("beta_start", "beta_end"):
            value = getattr(self, field)
            if not 0 <= value <= 1:
                yield FieldViolation(field, f"is {value}, must be a probability from 0 to 1")
        if self.beta_end > self.beta_start:
            yield FieldViolation("beta_end", f"is {self.beta_end}, above beta_start ({self.beta_start}): β only falls")
        if not 0 < self.rate < 1:
            yield FieldViolation("rate", f"is {self.rate}, must be above 0 and below 1")
        for field in ("decay_iterations", "step_iterations", "t_max_iterations"):
            value = getattr(self, field)
            if value < 1:
                yield FieldViolation(field, f"is {value}, must be at least 1")
        for field in ("t_max_start", "t_max_end"):
            value = getattr(self, field)
            if value < 0:
                yield FieldViolation(field, f"is {value}, must be 0 (nothing is said) or more tokens")
            elif value > _MAX_TOKENS:
                yield FieldViolation(field, f"is {value}, must be at most {_MAX_TOKENS} tokens")
