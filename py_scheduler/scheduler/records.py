"""The ledger's own records: private to it and mutable, changed by `Ledger.apply` alone."""

from __future__ import annotations

import msgspec

from py_scheduler.domain.events import StopCause
from py_scheduler.domain.results import AttemptState, Outcome, TaskState
from py_scheduler.domain.task import SubmissionKey, Task


class SubTaskRecord(msgspec.Struct, gc=False):
    """Samples [first_sample_no, first_sample_no + sample_count) of a task, and the latest try at them."""

    first_sample_no: int
    sample_count: int
    attempt_no: int = 1
    state: AttemptState = AttemptState.QUEUED
    failures: int = 0
    losses: int = 0


class TaskRecord(msgspec.Struct, gc=False):
    """An open task. It is dropped from the ledger with its TaskDone."""

    task_id: str
    task: Task
    submission: SubmissionRecord
    subtasks: list[SubTaskRecord]
    open_subtasks: int
    succeeded_samples: int = 0
    outcomes: dict[Outcome, int] = {}
    stop_cause: StopCause | None = None
    reason: str = ""


def open_task(task_id: str, task: Task, submission: SubmissionRecord) -> TaskRecord:
    """A fresh record, one SubTask to a sample."""
    subtasks = [SubTaskRecord(sample_no, 1) for sample_no in range(task.config.repeat_times)]
    return TaskRecord(task_id, task, submission, subtasks, len(subtasks))


class SubmissionRecord:
    """Everything under one key, counted by state. `open_tasks` holds what has no TaskDone yet."""

    __slots__ = (
        "attempts_in",
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
        self.next_task_no = 0
        self.open_tasks: dict[str, TaskRecord] = {}
        self.client_keys: set[str] = set()
        self.request_ids: list[str] = []
        self.attempts_in = dict.fromkeys(AttemptState, 0)
        self.done_tasks = dict.fromkeys(TaskState, 0)


class RequestRecord(msgspec.Struct, frozen=True, gc=False):
    """What one SubmitTasks call was answered, for the same call sent again."""

    digest: bytes
    submission_id: str
    task_ids: tuple[str, ...]
    before_sequence: int
