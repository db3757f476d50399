"""The ledger's own records: private to it and mutable, changed by `Ledger.apply` alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.results import AttemptState, Outcome, TaskState

if TYPE_CHECKING:
    from py_scheduler.domain.events import StopCause
    from py_scheduler.domain.task import SubmissionKey, Task


class SubTaskRecord:
    """Samples [first_sample_no, first_sample_no + sample_count) of a task, and the latest try at them."""

    __slots__ = ("attempt_no", "failures", "first_sample_no", "losses", "sample_count", "state")

    def __init__(self, first_sample_no: int, sample_count: int) -> None:
        self.first_sample_no = first_sample_no
        self.sample_count = sample_count
        self.attempt_no = 1
        self.state = AttemptState.QUEUED
        self.failures = 0
        self.losses = 0


class TaskRecord:
    """An open task. It is dropped from the ledger with its TaskDone."""

    __slots__ = (
        "open_subtasks",
        "outcomes",
        "reason",
        "stop_cause",
        "submission",
        "subtasks",
        "succeeded_samples",
        "task",
        "task_id",
    )

    def __init__(self, task_id: str, task: Task, submission: SubmissionRecord) -> None:
        self.task_id = task_id
        self.task = task
        self.submission = submission
        self.subtasks = [SubTaskRecord(sample_no, 1) for sample_no in range(task.config.repeat_times)]
        self.open_subtasks = len(self.subtasks)
        self.succeeded_samples = 0
        self.outcomes: dict[Outcome, int] = {}
        self.stop_cause: StopCause | None = None
        self.reason = ""


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
        self.attempts_in = {AttemptState.QUEUED: 0, AttemptState.LEASED: 0, AttemptState.RUNNING: 0}
        self.done_tasks = dict.fromkeys(TaskState, 0)


class RequestRecord:
    """What one SubmitTasks call was answered, for the same call sent again."""

    __slots__ = ("before_sequence", "digest", "submission_id", "task_ids")

    def __init__(self, digest: bytes, submission_id: str, task_ids: tuple[str, ...], before_sequence: int) -> None:
        self.digest = digest
        self.submission_id = submission_id
        self.task_ids = task_ids
        self.before_sequence = before_sequence
