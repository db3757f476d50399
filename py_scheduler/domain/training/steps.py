"""Whole steps of a training loop, as callers ask for them and what they are told at the end (design word: Rollout)."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from py_scheduler.domain.results import Outcome


class StepKind(StrEnum):
    """What a step is: it produces training data, or it measures."""

    ROLLOUT = "rollout"
    EVAL = "eval"


class StepRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Asks for one step. The same request_id with the same content joins it or is told its report again.

    groups, samples: in place of the configured groups of a step and samples of a group (copies of a prompt in an eval);
    None: as configured. cancel_on_disconnect: the step is cancelled when the last caller that follows it goes away.
    """

    kind: StepKind
    rollout_id: int
    request_id: str
    groups: int | None = None
    samples: int | None = None
    cancel_on_disconnect: bool = False

    @property
    def content(self) -> tuple[object, ...]:
        """What is the same whenever the same step is asked for."""
        return (self.kind, self.rollout_id, self.groups, self.samples)


class FilterReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one filter did: how much it kept and dropped, and why, by reason.

    dropped_samples counts those of dropped groups too. dropped_task_ids: of the first thousand dropped groups.
    """

    filter: str
    kept_groups: int = 0
    kept_samples: int = 0
    dropped_groups: int = 0
    dropped_samples: int = 0
    group_reasons: dict[str, int] = {}
    sample_reasons: dict[str, int] = {}
    dropped_task_ids: tuple[str, ...] = ()

    def __str__(self) -> str:
        reasons = ", ".join(f"{reason} {count}" for reason, count in self.sample_reasons.items())
        dropped = f"dropped {self.dropped_groups} groups and {self.dropped_samples} samples"
        return f"{self.filter} {dropped} ({reasons})" if reasons else f"{self.filter} {dropped}"


class DatasetOutcomes(msgspec.Struct, frozen=True, kw_only=True):
    """How the samples of one data set ended. mean_reward: of the model's results; None when there is none."""

    dataset: str
    outcomes: dict[Outcome, int]
    mean_reward: float | None = None


class KeptGroup(msgspec.Struct, frozen=True):
    """A group that a step kept, and which of its samples the filters left."""

    task_id: str
    sample_nos: tuple[int, ...]


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a step.

    submission_id: of its tasks' events; empty when nothing was rolled out. kept: in the order of the training samples;
    of an eval, every copy of every prompt.
    rounds: how often tasks were fetched. files: relative to the server's artifact folder.
    reused_from: the file whose samples took the place of a rollout; empty when there was one. samples_of: the iteration
    whose saved samples these are, for `read_samples`; None when the server keeps none of them.
    """

    kind: StepKind
    rollout_id: int
    request_id: str
    submission_id: str = ""
    kept: tuple[KeptGroup, ...] = ()
    rounds: int = 0
    training_samples: int = 0
    filters: tuple[FilterReport, ...] = ()
    metrics: dict[str, float] = {}
    datasets: tuple[DatasetOutcomes, ...] = ()
    files: tuple[str, ...] = ()
    reused_from: str = ""
    warnings: tuple[str, ...] = ()
    samples_of: int | None = None

    @property
    def task_ids(self) -> tuple[str, ...]:
        """Of the groups that were kept."""
        return tuple(group.task_id for group in self.kept)
