"""What a step hands out (design words: Rollout, Group)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.results import Outcome
from py_scheduler.domain.training.steps import DatasetOutcomes, KeptGroup, StepKind, StepReport
from py_scheduler.rollout.files.iteration_summary import IterationSummary
from py_scheduler.rollout.groups import Group
from py_scheduler.rollout.training import TrainingSample

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from py_scheduler.domain.training.steps import StepRequest


class RolloutResult(msgspec.Struct, frozen=True, kw_only=True):
    """A training step.

    groups: those that survived the filters, in the order in which they were fetched; none when the step was reused.
    samples: what to train on, group by group and all groups of one size: dummies stand in for what is missing.
    files: relative to the artifact folder. reused_from: the file that the samples were read from; empty when they were
    rolled out. samples_of: the iteration whose saved samples they are; None where they are not saved.
    warnings: what a user ought to hear.
    """

    rollout_id: int
    groups: tuple[Group, ...] = ()
    samples: tuple[tuple[TrainingSample, ...], ...] = ()
    summary: IterationSummary
    submission_id: str = ""
    rounds: int = 0
    files: tuple[str, ...] = ()
    reused_from: str = ""
    samples_of: int | None = None
    warnings: tuple[str, ...] = ()

    @property
    def metrics(self) -> dict[str, float]:
        """`rollout/mean_reward` and `rollout/accuracy` of all model results, those that filters dropped included, and
        `rollout/dummies`, the samples to train on that are none.
        """
        total, metrics = self.summary.total, {"rollout/dummies": float(self.summary.dummies)}
        if total.accuracy is not None:
            metrics |= {"rollout/mean_reward": total.reward.mean, "rollout/accuracy": total.accuracy}
        return metrics

    def report(self, request: StepRequest) -> StepReport:
        """The step in short: for those who asked for it from afar."""
        return StepReport(
            kind=StepKind.ROLLOUT,
            rollout_id=self.rollout_id,
            request_id=request.request_id,
            submission_id=self.submission_id,
            kept=tuple(KeptGroup(g.task_id, tuple(sample.sample_no for sample in g.samples)) for g in self.groups),
            rounds=self.rounds,
            training_samples=sum(map(len, self.samples)),
            filters=self.summary.filters,
            metrics=self.metrics,
            datasets=_outcomes_of(self.summary),
            files=self.files,
            reused_from=self.reused_from,
            samples_of=self.samples_of,
            warnings=self.warnings,
        )


class EvalResult(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluation: one group to a prompt, with a sample of each copy, by data set in the order of the prompts.

    metrics: `eval/{name}/accuracy`, and `eval/{name}/pass@k` when prompts have several copies.
    """

    rollout_id: int
    datasets: dict[str, tuple[Group, ...]]
    metrics: dict[str, float]
    summary: IterationSummary
    submission_id: str = ""
    files: tuple[str, ...] = ()

    def report(self, request: StepRequest) -> StepReport:
        """The eval in short: for those who asked for it from afar."""
        return StepReport(
            kind=StepKind.EVAL,
            rollout_id=self.rollout_id,
            request_id=request.request_id,
            submission_id=self.submission_id,
            kept=tuple(
                KeptGroup(copy.task_id, (0,)) for gs in self.datasets.values() for g in gs for copy in g.samples
            ),
            rounds=1,
            metrics=self.metrics,
            datasets=_outcomes_of(self.summary),
            files=self.files,
        )


def relative_files(files: Iterable[Path], root: Path | None) -> tuple[str, ...]:
    """What a caller is told of files: where they are below the artifact folder, never where that is."""
    return () if root is None else tuple(file.relative_to(root).as_posix() for file in files)


def _outcomes_of(summary: IterationSummary) -> tuple[DatasetOutcomes, ...]:
    return tuple(
        DatasetOutcomes(
            dataset=name,
            outcomes={Outcome(outcome): count for outcome, count in figures.outcomes.items()},
            mean_reward=figures.reward.mean if figures.model_results else None,
        )
        for name, figures in summary.datasets.items()
    )
