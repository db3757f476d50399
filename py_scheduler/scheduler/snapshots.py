"""Submissions <-> what a journal keeps of them, so that a restart need not apply all their events again.

Invariant: a submission that is restored from its snapshot and the same submission after the same events cannot be told
apart by anything that the ledger does, except that what was leased waits again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import StopCause
from py_scheduler.domain.iteration import IterationContext
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, TaskState
from py_scheduler.domain.snapshots import Snapshot
from py_scheduler.domain.task import BatchId, SubmissionKey, Task
from py_scheduler.errors import JournalError
from py_scheduler.scheduler.records import (
    RequestRecord,
    SubmissionRecord,
    SubTaskRecord,
    TaskRecord,
    submission_and_number,
    task_id_of,
)

if TYPE_CHECKING:
    from py_scheduler.scheduler.ledger import Ledger

_VERSION = 1


class _TaskState(msgspec.Struct, array_like=True, gc=False):
    number: int
    task: Task
    accepted_unix_seconds: float
    subtasks: list[SubTaskRecord]
    open_subtasks: int
    succeeded_samples: int
    outcomes: dict[Outcome, int]
    stop_cause: StopCause | None
    reason: str
    iteration: IterationContext | None
    group_samples: list[SampleDone] | None


class _SubmissionState(msgspec.Struct, array_like=True, gc=False):
    version: int
    batch_id: BatchId
    namespace: str
    next_task_no: int
    last_sequence: int
    requests: dict[str, RequestRecord]
    attempts_in: dict[AttemptState, int]
    done_tasks: dict[TaskState, int]
    tasks: list[_TaskState]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_SubmissionState).decode


def snapshot_of(submission: SubmissionRecord, ledger: Ledger) -> Snapshot:
    """The submission as it is now, after the ledger's last event."""
    state = _SubmissionState(
        version=_VERSION,
        batch_id=submission.key.batch_id,
        namespace=submission.key.namespace,
        next_task_no=submission.next_task_no,
        last_sequence=submission.last_sequence,
        requests=submission.requests,
        attempts_in=submission.attempts_in,
        done_tasks=submission.done_tasks,
        tasks=[_task_state(task) for task in submission.open_tasks.values()],
    )
    return Snapshot(submission.submission_id, ledger.last_sequence, _encode(state))


def _task_state(task: TaskRecord) -> _TaskState:
    return _TaskState(
        submission_and_number(task.task_id)[1],
        task.task,
        task.accepted_unix_seconds,
        task.subtasks,
        task.open_subtasks,
        task.succeeded_samples,
        task.outcomes,
        task.stop_cause,
        task.reason,
        task.iteration,
        task.group_samples,
    )


def submission_of(snapshot: Snapshot) -> SubmissionRecord:
    """Raises JournalError when another version of py-scheduler wrote it."""
    try:
        state = _decode(snapshot.content)
    except msgspec.DecodeError as error:
        raise JournalError(f"the snapshot of submission {snapshot.submission_id!r} cannot be read: {error}") from error
    if state.version != _VERSION:
        raise JournalError(
            f"the snapshot of submission {snapshot.submission_id!r} has format {state.version}, this version reads "
            f"{_VERSION}: serve with the version that wrote it"
        )
    submission = SubmissionRecord(snapshot.submission_id, SubmissionKey(state.batch_id, state.namespace))
    submission.next_task_no = state.next_task_no
    submission.last_sequence = state.last_sequence
    submission.requests = state.requests
    submission.attempts_in |= state.attempts_in
    submission.done_tasks |= state.done_tasks
    for task_state in state.tasks:
        task = _task_record(task_state, submission)
        submission.open_tasks[task.task_id] = task
        if task.task.client_key:
            submission.client_keys.add(task.task.client_key)
    leased = submission.attempts_in[AttemptState.LEASED]
    submission.attempts_in[AttemptState.LEASED] = 0
    submission.attempts_in[AttemptState.QUEUED] += leased
    return submission


def _task_record(state: _TaskState, submission: SubmissionRecord) -> TaskRecord:
    for subtask in state.subtasks:
        if subtask.state is AttemptState.LEASED:
            subtask.state = AttemptState.QUEUED
    return TaskRecord(
        task_id_of(submission.submission_id, state.number),
        state.task,
        submission,
        state.subtasks,
        state.open_subtasks,
        state.accepted_unix_seconds,
        state.succeeded_samples,
        state.outcomes,
        state.stop_cause,
        state.reason,
        state.iteration,
        state.group_samples,
    )
