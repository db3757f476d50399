"""The ledger's own records: private to it and mutable, changed by `Ledger.apply` alone."""

from __future__ import annotations

import msgspec

from py_scheduler.domain.events import StopCause
from py_scheduler.domain.iteration import IterationContext
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, TaskState
from py_scheduler.domain.task import SubmissionKey, Task, sort_batch_id

_MAX_DIGITS = 18


def task_id_of(submission_id: str, number: int) -> str:
    """The id of a submission's task; numbers count from 0 over all of its calls."""
    return f"{submission_id}-{number}"


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


class TaskRecord(msgspec.Struct, gc=False):
    """An open task. It is dropped from the ledger with its TaskDone.

    group_samples: its final samples, for the handler that scores them together; None when it scores none.
    """

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

    @property
    def awaits_group_score(self) -> bool:
        """Whether its samples are all there and their score as a group is not."""
        return self.open_subtasks == 0


def new_task(task_id: str, task: Task, submission: SubmissionRecord, unix_seconds: float) -> TaskRecord:
    """A fresh record, one SubTask to a sample."""
    subtasks = [SubTaskRecord(sample_no, 1) for sample_no in range(task.config.repeat_times)]
    return TaskRecord(task_id, task, submission, subtasks, len(subtasks), unix_seconds)


class SubmissionRecord:
    """Everything under one key, counted by state. `open_tasks` holds what has no TaskDone yet."""

    __slots__ = (
        "attempts_in",
        "batch_key",
        "client_keys",
        "done_tasks",
        "key",
        "next_task_no",
        "open_tasks",
        "request_ids",
        "submission_id",
    )

    def __init__(self, submission_id: str, key: SubmissionKey) -> None:
        self.submission_id = submission_id
        self.key = key
        self.batch_key = sort_batch_id(key.batch_id)
        self.next_task_no = 0
        self.open_tasks: dict[str, TaskRecord] = {}
        self.client_keys: set[str] = set()
        self.request_ids: list[str] = []
        self.attempts_in = dict.fromkeys(AttemptState, 0)
        self.done_tasks = dict.fromkeys(TaskState, 0)

    def has_had(self, task_id: str) -> bool:
        """Whether the id is of one of its tasks, open or done."""
        submission_id, number = submission_and_number(task_id)
        return submission_id == self.submission_id and 0 <= number < self.next_task_no


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """What one SubmitTasks call was answered, for the same call sent again."""

    digest: bytes
    submission_id: str
    task_ids: tuple[str, ...]
    before_sequence: int
