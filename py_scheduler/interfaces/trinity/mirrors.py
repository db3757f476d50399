"""What the ledger says of a task, in the shapes of seed 2. Nothing is decided here, and nothing by these."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from py_scheduler.domain.collecting import TaskResult
    from py_scheduler.domain.task import BatchId
    from py_scheduler.interfaces.trinity.protocols import RunStatus
    from py_scheduler.scheduler.ledger.records import TaskRecord


@dataclass(eq=False)
class TaskWrapper:
    """A task and how it stands, as of the last look at the ledger.

    task: with its `batch_id` and `task_id`. total_runs: planned, of all sub-tasks. first_error: of the first sub-task
    that ended without success. emitted: whether its result was handed out.
    """

    task: Any
    batch_id: BatchId
    sub_task_num: int = 1
    finished_sub_task_num: int = 0
    completed_runs: int = 0
    total_runs: int = 0
    metrics: list[dict[str, float]] = field(default_factory=list)
    experience_payloads: list[bytes] = field(default_factory=list)
    first_error: str | None = None
    emitted: bool = False
    client_key: str = field(default="", init=False, repr=False)
    """What the ledger calls it by."""

    def show(self, record: TaskRecord) -> None:
        """Takes over how an open task stands."""
        self.sub_task_num = len(record.subtasks)
        self.finished_sub_task_num = len(record.subtasks) - record.open_subtasks
        self.completed_runs = record.succeeded_samples
        self.first_error = record.reason or None
        if record.staged is not None:
            self.metrics = [dict(sample.metrics) for sample in record.staged.samples if sample.is_scored]
            self.experience_payloads = list(record.staged.payloads)

    def show_result(self, result: TaskResult) -> None:
        """Takes over how the task ended."""
        self.finished_sub_task_num = self.sub_task_num
        self.completed_runs = result.succeeded_samples
        self.metrics = [result.metrics]
        self.experience_payloads = list(result.payloads)
        self.first_error = result.message or None
        self.emitted = True


@dataclass(frozen=True)
class CompletedTaskResult:
    """What a task came to, until it is handed out."""

    batch_id: BatchId
    task_id: BatchId
    status: RunStatus
    experience_payloads: list[bytes] = field(default_factory=list)


@dataclass(eq=False)
class RunningTaskState:
    """A sub-task that a runner is at. restart_runner_on_cancel: whether a stop takes the runner with it."""

    task: TaskWrapper
    runner_id: int
    restart_runner_on_cancel: bool = True
