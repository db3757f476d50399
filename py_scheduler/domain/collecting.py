"""Collecting: a trainer pulls the results of a submission, instead of watching them come.

Results of tasks submitted with `Delivery.COLLECT` are kept until a call hands them out and that is acknowledged.
"""

from __future__ import annotations

import msgspec

from py_scheduler.domain.results import SampleDone, TaskState
from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId

DEFAULT_COLLECT_SECONDS = 3_600.0


class CollectRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Waits for results of a submission, named by its batch_id (the latest one under it) or its submission_id.

    request_id: the same id gives the same set again until it is acknowledged.
    min_num: finished tasks to wait for; None: all. What is there beyond them is handed out too, up to `max_num`.
    timeout_seconds: how long to wait at most; 0 does not wait.
    wait_after_min_seconds: how long after `min_num` more may come; None: as the server is set.
    clear_unfinished: stop what is not finished when the call returns. After the timeout, and only then, the runners
    that were at it are restarted. Without it the rest goes on, and a later call gets it.
    include_partial: of tasks that are stopped by this, those with samples that succeeded give a result of these.
    with_payloads: whether results carry samples and payloads; without, they are handed out all the same.
    """

    request_id: str
    batch_id: BatchId | None = None
    submission_id: str = ""
    namespace: str = DEFAULT_NAMESPACE
    min_num: int | None = None
    max_num: int | None = None
    timeout_seconds: float = DEFAULT_COLLECT_SECONDS
    wait_after_min_seconds: float | None = None
    clear_unfinished: bool = True
    include_partial: bool = False
    with_payloads: bool = True


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What became of one task.

    succeeded_samples: of the `planned_samples` that it was to have. metrics: see `domain.values.metrics`.
    message: why not all of them did; empty when they did. samples: every sample's record, in the order of sample_no;
    of a task that was stopped those that were final by then. payloads: one of each SubTask that made one, in the order
    they ended.
    """

    task_id: str
    client_key: str
    state: TaskState
    succeeded_samples: int
    planned_samples: int
    is_eval: bool = False
    message: str = ""
    metrics: dict[str, float] = {}
    samples: tuple[SampleDone, ...] = ()
    payloads: tuple[bytes, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every planned sample succeeded."""
        return self.succeeded_samples == self.planned_samples


class UnfinishedTask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A task that a collect did not wait for: it goes on, or was stopped without a result.

    succeeded_samples: until then.
    """

    task_id: str
    client_key: str
    succeeded_samples: int
    planned_samples: int
    is_stopped: bool
    reason: str


class CollectReply(msgspec.Struct, frozen=True, kw_only=True):
    """results: in the order in which the tasks ended. unfinished: in the order of submission.

    is_timed_out: whether the call waited in vain for what it asked for. warnings: what was not done as asked.
    """

    submission_id: str = ""
    results: tuple[TaskResult, ...] = ()
    unfinished: tuple[UnfinishedTask, ...] = ()
    is_timed_out: bool = False
    warnings: tuple[str, ...] = ()

    @property
    def payloads(self) -> list[bytes]:
        """Of all results, in order."""
        return [payload for result in self.results for payload in result.payloads]
