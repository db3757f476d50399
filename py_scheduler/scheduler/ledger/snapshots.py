"""The ledger's state <-> what a journal keeps of it, so that a restart need not apply all events again.

    SERVICE                  `ServiceFacts`: what is of no submission
    a submission's id        the submission with its open tasks; of the results that it keeps, only whose they are
    a task's id              its kept result, which never changes and may be large: written once, until it is let go

Invariants
  1. A state can be made from snapshots of different moments, with the events after each, or from all events. The
     ledger behaves alike with both, but for two things: what was leased waits again, and more finished submissions may
     be remembered.
  2. Whoever reads a submission's snapshot finds all results that it names.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import msgspec

from py_scheduler.domain.collecting import TaskResult, UnfinishedTask
from py_scheduler.domain.events import (
    AbortRequested,
    AttemptEnded,
    AttemptsLeased,
    AttemptStarted,
    Moment,
    StopCause,
    TaskDone,
    TasksAccepted,
)
from py_scheduler.domain.ports import SERVICE, Snapshot
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, TaskState
from py_scheduler.domain.task import BatchId, SubmissionKey, Task
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.errors import JournalError
from py_scheduler.scheduler.ledger.records import (
    CollectedSet,
    KeptState,
    RequestRecord,
    StagedResult,
    SubmissionRecord,
    SubTaskRecord,
    TaskRecord,
    submission_and_number,
    task_id_of,
)
from py_scheduler.scheduler.ledger.service_facts import ServiceFacts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from py_scheduler.domain.events import Event
    from py_scheduler.scheduler.ledger.state import LedgerState

_VERSION = 2
_READABLE = (1, _VERSION)
"""In 1 a submission kept no results."""
_STEP = 150
"""Tasks that are written down before the loop may be given back."""
_BLOCK = 15
"""Tasks that are written down together. Of one each there would be 100 000 pieces to put together at the end; of 1 000
each, every task that goes on would cost 1 000.
"""


class _TaskImage(msgspec.Struct, array_like=True, gc=False):
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
    staged: StagedResult | None = None
    accepted_at: Moment | None = None


class _SetImage(msgspec.Struct, array_like=True, gc=False):
    """A `CollectedSet`."""

    task_ids: list[str]
    unfinished: tuple[UnfinishedTask, ...]
    warnings: tuple[str, ...]
    is_timed_out: bool


class _KeptImage(msgspec.Struct, array_like=True, gc=False):
    """A `KeptState`, with results by their tasks' ids."""

    is_collected: bool
    is_eval: bool
    open_tasks: int
    scheduled_tasks: int
    returned_tasks: int
    collectable: list[str]
    unacknowledged: dict[str, _SetImage]


class _SubmissionImage(msgspec.Struct, array_like=True, gc=False):
    version: int
    batch_id: BatchId
    namespace: str
    next_task_no: int
    last_sequence: int
    requests: dict[str, RequestRecord]
    attempts_in: dict[AttemptState, int]
    done_tasks: dict[TaskState, int]
    tasks: list[_TaskImage]
    kept: _KeptImage | None = None


class _ResultImage(msgspec.Struct, array_like=True, gc=False):
    version: int
    result: TaskResult


class _ServiceImage(msgspec.Struct, array_like=True, gc=False):
    version: int
    facts: ServiceFacts


_Image = TypeVar("_Image", _SubmissionImage, _ResultImage, _ServiceImage)
_encode = msgspec.msgpack.Encoder().encode


def service_snapshot(ledger: LedgerState) -> Snapshot:
    return Snapshot(SERVICE, ledger.last_sequence, _encode(_ServiceImage(_VERSION, ledger.service)))


def service_of(snapshot: Snapshot) -> ServiceFacts:
    """Raises JournalError when another version of py-scheduler wrote it."""
    return _decoded(snapshot, _ServiceImage).facts


def result_snapshot(result: TaskResult, ledger: LedgerState) -> Snapshot:
    return Snapshot(result.task_id, ledger.last_sequence, _encode(_ResultImage(_VERSION, result)), is_final=True)


def is_of_result(snapshot: Snapshot) -> bool:
    return submission_and_number(snapshot.name)[1] >= 0


def result_of(snapshot: Snapshot) -> TaskResult:
    """Raises JournalError when another version of py-scheduler wrote it."""
    return _decoded(snapshot, _ResultImage).result


class SubmissionDraft:
    """A submission's snapshot that is made while the submission goes on: its open tasks are written down in blocks,
    each once, and again if a task of it has changed before the end. It has to be told of every event behind the ledger
    from its beginning on.
    """

    def __init__(self, submission: SubmissionRecord) -> None:
        self._submission = submission
        self._blocks: dict[int, bytes] = {}
        """The open tasks of consecutive numbers, one after another; those that have none are left out."""
        self._left: dict[int, None] = {}
        """The blocks that are to be written down, perhaps anew."""
        self._unsorted: Iterable[str] = iter(list(submission.open_tasks))
        """Tasks whose blocks are not among these yet."""

    @property
    def tasks_left(self) -> int:
        """How many tasks, at most, have changed since they were written down."""
        return _BLOCK * len(self._left)

    def apply(self, event: Event) -> None:
        if type(event) is AttemptsLeased or event.submission_id != self._submission.submission_id:
            return  # What is leased waits again after a restart.
        if type(event) is TaskDone or type(event) is AttemptStarted or type(event) is AttemptEnded:
            self._left[_block_of(event.task_id)] = None
        elif type(event) is AbortRequested:
            self._left |= dict.fromkeys(map(_block_of, event.task_ids))
        elif type(event) is TasksAccepted:
            self._left |= dict.fromkeys([_block_of(accepted.task_id) for accepted in event.tasks])

    def write(self) -> Iterator[None]:
        """Writes down what is to be now; in slices."""
        for number, task_id in enumerate(self._unsorted):
            self._left[_block_of(task_id)] = None
            if number % _STEP == 0:
                yield
        for number, block in enumerate(list(self._left)):
            del self._left[block]
            self._write(block)
            if _BLOCK * number % _STEP == 0:
                yield

    def _write(self, block: int) -> None:
        submission = self._submission
        ids = [task_id_of(submission.submission_id, block * _BLOCK + number) for number in range(_BLOCK)]
        images = [_task_image(task) for task_id in ids if (task := submission.open_tasks.get(task_id)) is not None]
        if images:
            self._blocks[block] = _encode(images)[1:]  # Without its length, which takes one byte of so few.
        else:
            self._blocks.pop(block, None)

    def finish(self, ledger: LedgerState) -> Snapshot:
        """The submission as it is now, after the ledger's last event; the results that it keeps have their own."""
        submission = self._submission
        for _ in self.write():
            pass
        # The parts of a `_SubmissionImage`: an array of msgpack is its length and then its elements.
        before = (
            _VERSION,
            submission.key.batch_id,
            submission.key.namespace,
            submission.next_task_no,
            submission.last_sequence,
            submission.requests,
            submission.attempts_in,
            submission.done_tasks,
        )
        parts = [_begin_array(len(before) + 2), *map(_encode, before), _begin_array(len(submission.open_tasks))]
        content = b"".join([*parts, *self._blocks.values(), _encode(_kept_image(submission.kept))])
        return Snapshot(submission.submission_id, ledger.last_sequence, content)


def _block_of(task_id: str) -> int:
    return int(task_id.rpartition("-")[2]) // _BLOCK


def _begin_array(length: int) -> bytes:
    """What stands before the elements of an array of msgpack."""
    return b"\xdd" + length.to_bytes(4, "big")


def snapshot_of(submission: SubmissionRecord, ledger: LedgerState) -> Snapshot:
    """See `SubmissionDraft.finish`."""
    return SubmissionDraft(submission).finish(ledger)


def _task_image(task: TaskRecord) -> _TaskImage:
    return _TaskImage(
        int(task.task_id.rpartition("-")[2]),
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
        task.staged,
        task.accepted_at,
    )


def _kept_image(kept: KeptState) -> _KeptImage:
    return _KeptImage(
        kept.is_collected,
        kept.is_eval,
        kept.open_tasks,
        kept.scheduled_tasks,
        kept.returned_tasks,
        list(kept.collectable),
        {
            request_id: _SetImage(
                [result.task_id for result in collected.results],
                collected.unfinished,
                collected.warnings,
                collected.is_timed_out,
            )
            for request_id, collected in kept.unacknowledged.items()
        },
    )


def _decoded(snapshot: Snapshot, kind: type[_Image]) -> _Image:
    try:
        image = msgspec.msgpack.decode(snapshot.content, type=kind)
    except msgspec.DecodeError as error:
        raise JournalError(f"the snapshot {snapshot.name!r} cannot be read: {error}") from error
    if image.version not in _READABLE:
        raise JournalError(
            f"the snapshot {snapshot.name!r} has format {image.version}, this version reads {_VERSION}: serve with "
            "the version that wrote it"
        )
    return image


def submission_of(snapshot: Snapshot, results: Mapping[str, TaskResult] | None = None) -> SubmissionRecord:
    """results: by task, those that were found. Raises JournalError when one is missing that it keeps, or when another
    version of py-scheduler wrote it.
    """
    image = _decoded(snapshot, _SubmissionImage)
    submission = SubmissionRecord(snapshot.name, SubmissionKey(image.batch_id, image.namespace))
    submission.next_task_no = image.next_task_no
    submission.last_sequence = image.last_sequence
    submission.requests = image.requests
    submission.attempts_in |= image.attempts_in
    submission.done_tasks |= image.done_tasks
    for task_image in image.tasks:
        task = _task_record(task_image, submission)
        submission.open_tasks[task.task_id] = task
        if task.task.client_key:
            submission.client_keys.add(task.task.client_key)
    if image.kept is not None:
        try:
            submission.kept = _kept_of(image.kept, snapshot.name, results or {})
        except KeyError as error:
            raise JournalError(f"the journal has lost the result of task {error} that was kept") from error
    leased = submission.attempts_in[AttemptState.LEASED]
    submission.attempts_in[AttemptState.LEASED] = 0
    submission.attempts_in[AttemptState.QUEUED] += leased
    return submission


def _kept_of(image: _KeptImage, submission_id: str, results: Mapping[str, TaskResult]) -> KeptState:
    """Raises KeyError."""
    return KeptState(
        is_collected=image.is_collected,
        is_eval=image.is_eval,
        open_tasks=image.open_tasks,
        scheduled_tasks=image.scheduled_tasks,
        returned_tasks=image.returned_tasks,
        collectable={task_id: results[task_id] for task_id in image.collectable},
        unacknowledged={
            request_id: CollectedSet(
                submission_id,
                tuple([results[task_id] for task_id in collected.task_ids]),
                collected.unfinished,
                collected.warnings,
                collected.is_timed_out,
            )
            for request_id, collected in image.unacknowledged.items()
        },
    )


def _task_record(image: _TaskImage, submission: SubmissionRecord) -> TaskRecord:
    for subtask in image.subtasks:
        if subtask.state is AttemptState.LEASED:
            subtask.state = AttemptState.QUEUED
    return TaskRecord(
        task_id_of(submission.submission_id, image.number),
        image.task,
        submission,
        image.subtasks,
        image.open_subtasks,
        image.accepted_unix_seconds,
        image.succeeded_samples,
        image.outcomes,
        image.stop_cause,
        image.reason,
        image.iteration,
        image.group_samples,
        image.staged,
        image.accepted_at,
    )
