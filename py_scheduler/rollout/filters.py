"""Which groups and samples of a step survive. Source: seed 1, section 5 (survivorship filters).

Invariants: rejection comes first, and finish-only looks at what it left. Each reports what it dropped and why. No step
is handed out empty without a word about it (`next_move`).
"""

from __future__ import annotations

import math
from collections import Counter
from enum import StrEnum
from typing import TYPE_CHECKING, Literal

import msgspec

from py_scheduler.domain.generation import FinishReason
from py_scheduler.domain.results import Outcome
from py_scheduler.domain.training.steps import FilterReport
from py_scheduler.errors import FailedPreconditionError, FieldViolation, InvalidArgumentError
from py_scheduler.rollout.groups import Group

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from py_scheduler.domain.results import SampleDone

MAX_TASK_IDS = 1_000
"""Dropped tasks that a report names; its counts have no such bound."""

# What an agent says when something else than itself ended its episode.
_CUT_SHORT = frozenset({"max_turns", "context_overflow", "length", "timeout", "agent_timeout"})


class Rejection(StrEnum):
    """THRESHOLD keeps the samples that score at least `min_score`. SPREAD drops whole groups whose scores are (nearly)
    equal, because nothing can be learnt from their differences: with a `min_spread` of 0, a group that scored 1, 1, 1,
    1 goes and one that scored 1, 0, 1, 1 stays. Both look at model results alone.
    """

    OFF = "off"
    THRESHOLD = "threshold"
    SPREAD = "spread"


class FilterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Both filters, and what to do when too few groups survive them. Raises InvalidArgumentError with every fault."""

    rejection: Rejection = Rejection.OFF
    min_score: float = 1.0
    """What a sample must score at least, with THRESHOLD."""
    min_spread: float = 0.0
    """What the distance between a group's best and worst score must exceed, with SPREAD."""
    finish_only: bool = False
    """Keeps the episodes that ended by themselves."""
    min_samples: int = 1
    """A group that a filter leaves with fewer is dropped."""
    when_insufficient: Literal["fetch", "keep"] = "fetch"
    """With "fetch" a step rolls out more groups. After max_fetches it goes on as with "keep": with what there is."""
    max_fetches: int = 8
    """Times that more groups are fetched for one step."""

    def __post_init__(self) -> None:
        faults = [
            FieldViolation(field, f"is {getattr(self, field)}, must be at least {least}")
            for field, least in (("min_spread", 0), ("min_samples", 1), ("max_fetches", 0))
            if not getattr(self, field) >= least
        ]
        if not math.isfinite(self.min_score):
            faults.append(FieldViolation("min_score", f"is {self.min_score}, must be a number"))
        if faults:
            raise InvalidArgumentError(faults)


class GroupFilter:
    """Both filters, for groups that come one by one. Memory does not grow with what is dropped."""

    def __init__(self, settings: FilterSettings) -> None:
        self._stages: list[_Stage] = []
        if settings.rejection is Rejection.THRESHOLD:
            reasons = _below(settings.min_score)
            self._stages.append(_Stage("rejection", reasons, settings.min_samples))
        elif settings.rejection is Rejection.SPREAD:
            reasons = _without_spread(settings.min_spread)
            self._stages.append(_Stage("rejection", reasons, settings.min_samples))
        if settings.finish_only:
            self._stages.append(_Stage("finish_only", _unfinished, settings.min_samples))

    def admit(self, group: Group) -> Group | None:
        """The group with its surviving samples, or None."""
        left: Group | None = group
        for stage in self._stages:
            left = stage.admit(left) if left is not None else None
        return left

    @property
    def reports(self) -> tuple[FilterReport, ...]:
        """One to each filter that is on, rejection first."""
        return tuple(stage.report() for stage in self._stages)


class NextMove(StrEnum):
    """What a step does with its survivors."""

    ENOUGH = "enough"
    FETCH = "fetch"
    KEEP = "keep"


def next_move(
    survivors: int,
    wanted: int,
    settings: FilterSettings,
    reports: Sequence[FilterReport] = (),
    *,
    fetches: int = 0,
    can_fetch: bool = True,
) -> NextMove:
    """ENOUGH, FETCH more, or KEEP too few, which the caller then says (`shortfall`).

    fetches: how often the step has fetched more. can_fetch: whether the source has any left.
    Raises FailedPreconditionError when nothing survived and nothing more is fetched.
    """
    if survivors >= wanted:
        return NextMove.ENOUGH
    if settings.when_insufficient == "fetch" and can_fetch and fetches < settings.max_fetches:
        return NextMove.FETCH
    if survivors == 0:
        raise FailedPreconditionError(
            f"{shortfall(0, wanted, reports)}: a step cannot be empty. Loosen the filters, raise max_fetches "
            f"({settings.max_fetches}), or give the data source more tasks"
        )
    return NextMove.KEEP


def shortfall(survivors: int, wanted: int, reports: Sequence[FilterReport] = ()) -> str:
    """Says that too few survived, and which filter dropped them."""
    why = "; ".join(str(report) for report in reports)
    return f"{survivors} of {wanted} groups survived" + (f" ({why})" if why else "")


def ended_short(sample: SampleDone) -> str | None:
    """Why an episode did not end by itself; None when it did."""
    if sample.outcome not in (Outcome.SOLVED, Outcome.WRONG_ANSWER):
        return sample.outcome.value
    if sample.error:
        return "error"
    if sample.termination_reason in _CUT_SHORT:
        return sample.termination_reason
    generated = sample.trajectory.generated_turns
    if generated and generated[-1].finish_reason in (FinishReason.LENGTH, FinishReason.ABORT):
        return generated[-1].finish_reason.value
    return None


class _Stage:
    """One filter with its tally. `reasons` says of each sample of a group why it is dropped; None where it is kept."""

    def __init__(self, name: str, reasons: Callable[[Group], list[str | None]], min_samples: int) -> None:
        self._name = name
        self._reasons = reasons
        self._min_samples = min_samples
        self._counts: Counter[str] = Counter()
        self._group_reasons: Counter[str] = Counter()
        self._sample_reasons: Counter[str] = Counter()
        self._dropped_task_ids: list[str] = []

    def admit(self, group: Group) -> Group | None:
        reasons = self._reasons(group)
        kept = tuple(sample for sample, reason in zip(group.samples, reasons, strict=True) if reason is None)
        self._sample_reasons.update(reason for reason in reasons if reason is not None)
        if len(kept) < self._min_samples:
            # A reason that all samples share is the group's; else it is that too few are left.
            shared = {reason for reason in reasons if reason is not None} if not kept else set()
            self._drop(group, shared.pop() if len(shared) == 1 else "too_few_samples")
            self._sample_reasons["too_few_samples"] += len(kept)
            return None
        self._counts.update(kept_groups=1, kept_samples=len(kept), dropped_samples=len(group.samples) - len(kept))
        return group if len(kept) == len(group.samples) else msgspec.structs.replace(group, samples=kept)

    def report(self) -> FilterReport:
        return FilterReport(
            filter=self._name,
            group_reasons=dict(self._group_reasons),
            sample_reasons={reason: count for reason, count in self._sample_reasons.items() if count},
            dropped_task_ids=tuple(self._dropped_task_ids),
            **self._counts,
        )

    def _drop(self, group: Group, reason: str) -> None:
        self._counts.update(dropped_groups=1, dropped_samples=len(group.samples))
        self._group_reasons[reason] += 1
        if len(self._dropped_task_ids) < MAX_TASK_IDS:
            self._dropped_task_ids.append(group.task_id)


def _below(min_score: float) -> Callable[[Group], list[str | None]]:
    def reason(sample: SampleDone) -> str | None:
        if not sample.outcome.is_model_result:
            return sample.outcome.value
        return None if sample.reward.score >= min_score else "below_threshold"

    return lambda group: [reason(sample) for sample in group.judged]


def _without_spread(min_spread: float) -> Callable[[Group], list[str | None]]:
    def reasons(group: Group) -> list[str | None]:
        results = [sample.reward.score for sample in group.judged if sample.outcome.is_model_result]
        if not results:
            return ["no_model_result"] * len(group.samples)
        has_spread = max(results) - min(results) > min_spread
        return [None if has_spread else "no_spread"] * len(group.samples)

    return reasons


def _unfinished(group: Group) -> list[str | None]:
    return [ended_short(sample) for sample in group.judged]
