"""The ledger's own records. They are mutable, and `Ledger.apply` alone changes them."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Final

import msgspec

from py_scheduler.domain.collecting import TaskResult, UnfinishedTask
from py_scheduler.domain.events import AcceptedTask, Moment, StopCause, TasksAccepted
from py_scheduler.domain.requests import SubmitReply
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, TaskState
from py_scheduler.domain.task import BatchId, SubmissionKey, Task
from py_scheduler.domain.training.iteration import IterationContext

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

WAITING: Final = (AttemptState.QUEUED, AttemptState.LEASED)
"""The states of an attempt that is still to be started."""
LIVE: Final = (AttemptState.RUNNING, *WAITING)
_MAX_DIGITS = 18
_LEADING_DIGITS = re.compile(r"\d+")


def sort_batch_id(batch_id: BatchId) -> tuple[float, int]:
    """Order of service: step n before `"n/eval"` before step n + 1; other labels last (seed 2, Order)."""
    if isinstance(batch_id, int):
        return (batch_id, 0)
    digits = _LEADING_DIGITS.match(batch_id)
    return (int(digits.group()), 1) if digits else (math.inf, 1)


def task_id_of(submission_id: str, number: int) -> str:
    """The id of a submission's task; numbers count from 0 over all of its calls."""
    return f"{submission_id}-{number}"


def task_ids_of(submission_id: str, numbers: Iterable[int]) -> list[str]:
    """`task_id_of` each."""
    return [f"{submission_id}-{number}" for number in numbers]


def submission_and_number(task_id: str) -> tuple[str, int]:
    """What `task_id_of` made the id of; the number is -1 for what is no id of a task."""
    submission_id, _, number = task_id.rpartition("-")
    is_number = number.isascii() and number.isdecimal() and len(number) <= _MAX_DIGITS and str(int(number)) == number
    return submission_id, int(number) if is_number else -1


class SubTaskRecord(msgspec.Struct, gc=False):
    """Samples [first_sample_no, first_sample_no + sample_count) of a task, and the latest try at them."""

    first_sample_no: int
    sample_count: int
    attempt_no: int = 1
    state: AttemptState = AttemptState.QUEUED
    failures: int = 0
    losses: int = 0
    refills: int = 0
    running_seconds: float = 0.0


class TaskRecord(msgspec.Struct, gc=False):
    """An open task. It is dropped from the ledger with its TaskDone."""

    task_id: str
    task: Task
    submission: SubmissionRecord
    subtasks: list[SubTaskRecord]
    open_subtasks: int
    accepted_unix_seconds: float
    succeeded_samples: int = 0
    outcomes: dict[Outcome, int] = {}
    stop_cause: StopCause | None = None
    reason: str = ""
    iteration: IterationContext | None = None
    group_samples: list[SampleDone] | None = None
    """Its final samples, for the handler that scores them together; None when it scores none."""
    staged: StagedResult | None = None
    """What its result is to be made of; None when nobody will collect it."""
    accepted_at: Moment | None = None
    """From when its deadline counts; None when it has none."""

    @property
    def awaits_group_score(self) -> bool:
        """Whether its samples are all there and their score as a group is not."""
        return self.open_subtasks == 0


def new_task(task_id: str, task: Task, submission: SubmissionRecord, unix_seconds: float) -> TaskRecord:
    """A fresh record, its samples split into SubTasks as its config says."""
    samples = task.config.repeat_times
    size = task.config.max_samples_per_subtask or samples
    if size >= samples:
        subtasks = [SubTaskRecord(0, samples)]  # Not by a loop: its list would have room for more.
    elif size == 1:
        subtasks = [SubTaskRecord(sample_no, 1) for sample_no in range(samples)]
    else:
        subtasks = [SubTaskRecord(first, min(size, samples - first)) for first in range(0, samples, size)]
    return TaskRecord(task_id, task, submission, subtasks, len(subtasks), unix_seconds)


class NewTasks(msgspec.Struct, gc=False):
    """The records of the tasks of one submit, numbered on from `first_no`, and what they come to in all. They are the
    submission's once the ledger applies the event that has `accepted`.
    """

    submission: SubmissionRecord
    first_no: int = 0
    accepted: tuple[AcceptedTask, ...] = ()
    """Filled in when all of them are there."""
    records: dict[str, TaskRecord] = {}
    """By id; those of a submission that is new become its own."""
    subtasks: int = 0
    samples: int = 0
    client_keys: set[str] = set()
    keys_said: int = 0
    """More than there are `client_keys` if one stands twice."""
    size: int = 0
    """Of the event, bytes in memory."""
    encoded: list[bytes] | None = None
    """Each task in msgpack, as it was digested; None: nobody writes them down."""

    def add(self, accepted: Iterable[AcceptedTask], event: TasksAccepted) -> None:
        """Makes records of some more tasks. event: what it says of all of them; its own tasks are not looked at."""
        records, client_keys = self.records, self.client_keys
        subtasks, samples, keys_said = self.subtasks, self.samples, self.keys_said
        submission, is_collected, group_scored = self.submission, event.is_collected, event.group_scored
        for named in accepted:
            task = named.task
            config = task.config
            record = records[named.task_id] = new_task(named.task_id, task, submission, event.unix_seconds)
            record.iteration = event.iteration
            if config.task_deadline_seconds is not None:
                record.accepted_at = event.moment
            if config.task_type in group_scored:
                record.group_samples = []
            if is_collected:
                record.staged = StagedResult()
            subtasks += record.open_subtasks
            samples += config.repeat_times
            if task.client_key:
                client_keys.add(task.client_key)
                keys_said += 1
        self.subtasks, self.samples, self.keys_said = subtasks, samples, keys_said


class StagedResult(msgspec.Struct, gc=False):
    """What the ended SubTasks of an open task leave for its result, in the order in which they ended."""

    samples: list[SampleDone] = []
    payloads: list[bytes] = []
    subtask_seconds: list[float] = []
    keeps_result: bool = True
    """Whether the task leaves a result although it is stopped on request."""


class CollectedSet(msgspec.Struct, frozen=True, gc=False):
    """What one call was handed out, until it is acknowledged."""

    submission_id: str
    results: tuple[TaskResult, ...]
    unfinished: tuple[UnfinishedTask, ...]
    warnings: tuple[str, ...]
    is_timed_out: bool


class KeptState(msgspec.Struct, gc=False):
    """What a submission keeps for whoever collects it. Changed by `KeptResults`, and by the ledger for a submit."""

    is_collected: bool = False
    is_eval: bool = False
    open_tasks: int = 0
    """How many of its open tasks will be collected."""
    scheduled_tasks: int = 0
    """Submitted since its results were last discarded."""
    returned_tasks: int = 0
    """Of these, how many were handed out."""
    collectable: dict[str, TaskResult] = {}
    """Results that are kept until they are handed out, in the order in which their tasks ended."""
    unacknowledged: dict[str, CollectedSet] = {}
    """What was handed out, by request id."""
    size: int = 0
    """Bytes of both, about."""
    sizes: dict[str, int] = {}
    """The same of each, by task: to count 100 000 results anew takes as long as to make them."""

    @property
    def count(self) -> int:
        """How many results are kept."""
        return len(self.sizes)

    def results(self) -> Iterator[TaskResult]:
        """All that are kept."""
        yield from self.collectable.values()
        for collected in self.unacknowledged.values():
            yield from collected.results


class SubmissionRecord:
    """Everything under one key, counted by state. `open_tasks` holds what has no TaskDone yet, `requests` what was
    answered, by request id; `last_sequence` is that of the last event that changed it.
    """

    __slots__ = (
        "attempts_in",
        "batch_key",
        "client_keys",
        "done_tasks",
        "kept",
        "key",
        "last_sequence",
        "next_task_no",
        "open_tasks",
        "requests",
        "submission_id",
    )

    def __init__(self, submission_id: str, key: SubmissionKey) -> None:
        self.submission_id = submission_id
        self.key = key
        self.batch_key = sort_batch_id(key.batch_id)
        self.next_task_no = 0
        self.open_tasks: dict[str, TaskRecord] = {}
        self.client_keys: set[str] = set()
        self.requests: dict[str, RequestRecord] = {}
        self.last_sequence = 0
        self.attempts_in = dict.fromkeys(AttemptState, 0)
        self.done_tasks = dict.fromkeys(TaskState, 0)
        self.kept = KeptState()

    @property
    def is_over(self) -> bool:
        """Whether nothing of it waits, runs or is to be collected."""
        return not self.open_tasks and not self.kept.collectable

    @property
    def is_drained(self) -> bool:
        """Whether it was to be collected, and all of it was: its batch_id may be used again."""
        return self.kept.is_collected and self.is_over

    @property
    def is_forgettable(self) -> bool:
        """Whether nobody will ask for anything of it any more, but perhaps how it went."""
        return self.is_over and not self.kept.unacknowledged

    def has_had(self, task_id: str) -> bool:
        """Whether the id is of one of its tasks, open or done."""
        submission_id, number = submission_and_number(task_id)
        return submission_id == self.submission_id and 0 <= number < self.next_task_no


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """What one call under a request id did, for the same call sent again."""

    digest: bytes
    submission_id: str
    first_task_no: int
    """Its tasks are numbered on from one: those that it took in, or, of a call that stops tasks or forgets results,
    those that were there then.
    """
    task_count: int
    before_sequence: int
    stopped_tasks: int = 0
    """How many of these it stopped."""
    warnings: tuple[str, ...] = ()

    @property
    def task_ids(self) -> tuple[str, ...]:
        numbers = range(self.first_task_no, self.first_task_no + self.task_count)
        return tuple(task_ids_of(self.submission_id, numbers))

    def reply(self, task_ids: tuple[str, ...]) -> SubmitReply:
        """What a submit was answered, with these `task_ids`."""
        return SubmitReply(
            submission_id=self.submission_id,
            task_ids=task_ids,
            warnings=self.warnings,
            before_sequence=self.before_sequence,
        )
