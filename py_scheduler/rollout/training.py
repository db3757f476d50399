"""Samples as a trainer's loss takes them. Source: seed 1, section 4 (abort, dummies).

Invariants

- Every planned sample of a group gives exactly one TrainingSample, so batch shapes do not depend on how samples ended.
- A sample that ended by an exception, a stop or the infrastructure is a dummy: two tokens with loss mask 0, score 0.0
  and `remove_sample`. Dummies are made here, at the interface: they never travel and are never journalled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.generation import FinishReason
from py_scheduler.domain.training.samples import SampleStatus as SampleStatus
from py_scheduler.domain.training.samples import TrainingSample as TrainingSample
from py_scheduler.domain.trajectory import Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task
    from py_scheduler.rollout.groups import Group

TERMINATION_REASON = "_termination_reason"
TERMINATION_REASON_AGENT = "_termination_reason_agent"
WEIGHT_EPOCH = "_weight_epoch"
STALENESS = "_staleness"
ABORT = "_abort"
MISSING = "missing"
"""The termination reason of a dummy whose sample is not in the group (any more): a filter took it out."""

DUMMY_TOKENS = 2
DUMMY_TRAJECTORY = Trajectory(
    token_id_bytes=bytes(4 * DUMMY_TOKENS),
    log_prob_bytes=bytes(4 * DUMMY_TOKENS),
    loss_mask_bytes=bytes(DUMMY_TOKENS),
)


def is_trainable(sample: SampleDone) -> bool:
    """Whether it ran and was scored to the end and has tokens; else it becomes a dummy."""
    return sample.is_trainable


def training_sample(task: Task, sample: SampleDone) -> TrainingSample:
    """The sample, or the dummy in its place."""
    metadata = {**task.metadata, TERMINATION_REASON: sample.outcome.value}
    if sample.termination_reason:
        metadata[TERMINATION_REASON_AGENT] = sample.termination_reason
    if sample.weight_epoch is not None:
        metadata |= {WEIGHT_EPOCH: sample.weight_epoch, STALENESS: sample.staleness}
    if not is_trainable(sample):
        metadata[ABORT] = _abort_annotation(sample)
        return _dummy(task, sample.task_id, sample.sample_no, metadata)
    return TrainingSample(
        task_id=sample.task_id,
        sample_no=sample.sample_no,
        dataset=task.config.dataset,
        prompt=task.prompt,
        reward={**sample.reward.details, "score": sample.reward.score},
        status=SampleStatus.TRUNCATED if is_cut(sample) else SampleStatus.COMPLETED,
        metadata=metadata,
        trajectory=sample.trajectory,
    )


def missing_sample(task: Task, task_id: str, sample_no: int) -> TrainingSample:
    """The dummy in the place of a sample that is not there."""
    return _dummy(task, task_id, sample_no, {**task.metadata, TERMINATION_REASON: MISSING})


def training_group(group: Group) -> list[TrainingSample]:
    """`planned_samples` of them, in the order of sample_no: what the group lacks is a dummy."""
    given = {sample.sample_no: training_sample(group.task, sample) for sample in group.judged}
    return [
        given.get(sample_no) or missing_sample(group.task, group.task_id, sample_no)
        for sample_no in range(group.planned_samples)
    ]


def pad_groups(groups: Sequence[Sequence[TrainingSample]], group_count: int) -> list[list[TrainingSample]]:
    """At least `group_count` groups of equal size: dummies, modelled on what is there, fill what is not.

    Raises ValueError when there is no group at all: a step of dummies alone would teach nothing, silently.
    """
    if not any(groups):
        raise ValueError("there is no sample to pad: a step of dummies alone is an empty step")
    size = max(len(group) for group in groups)
    like = next(group[0] for group in groups if group)
    padded = [[*group, *(_like(group[0] if group else like, no) for no in range(len(group), size))] for group in groups]
    padded += [[_like(like, no, task_id="") for no in range(size)] for _ in range(group_count - len(groups))]
    return padded


def is_cut(sample: SampleDone) -> bool:
    """Whether the last generation ended by its length instead of by itself."""
    generated = sample.trajectory.generated_turns
    return bool(generated) and generated[-1].finish_reason is FinishReason.LENGTH


def _dummy(task: Task, task_id: str, sample_no: int, metadata: dict[str, Any]) -> TrainingSample:
    return TrainingSample(
        task_id=task_id,
        sample_no=sample_no,
        dataset=task.config.dataset,
        prompt=task.prompt,
        reward={"score": 0.0},
        status=SampleStatus.ABORTED,
        remove_sample=True,
        metadata=metadata,
        trajectory=DUMMY_TRAJECTORY,
    )


def _like(sample: TrainingSample, sample_no: int, task_id: str | None = None) -> TrainingSample:
    return msgspec.structs.replace(
        sample,
        task_id=sample.task_id if task_id is None else task_id,
        sample_no=sample_no,
        reward={"score": 0.0},
        status=SampleStatus.ABORTED,
        remove_sample=True,
        metadata={TERMINATION_REASON: MISSING},
        trajectory=DUMMY_TRAJECTORY,
    )


def _abort_annotation(sample: SampleDone) -> dict[str, Any]:
    """Where and when a sample was broken off; the window is None for one that never ran."""
    seconds = sample.timings.held_seconds
    start = sample.started_unix_seconds or None
    return {
        "phase": sample.phase,
        "start_unix_seconds": start,
        "end_unix_seconds": None if start is None else start + seconds,
        "seconds": seconds,
        "node_ip": sample.node_ip,
        "gpu_ids": list(sample.gpu_ids),
        "turns": len(sample.trajectory.generated_turns),
        "error": sample.error,
    }
