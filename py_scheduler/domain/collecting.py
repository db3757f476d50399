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

    An example: of 64 tasks, min_num 48 with wait_after_min_seconds 10 waits until 48 are finished and 10 s more. If 55
    are finished by then, these are handed out and the other 9 stopped.
    """

    request_id: str
    """The same id gives the same set again until it is acknowledged."""
    batch_id: BatchId | None = None
    submission_id: str = ""
    namespace: str = DEFAULT_NAMESPACE
    min_num: int | None = None
    """Finished tasks to wait for; None: all."""
    max_num: int | None = None
    """Results to hand out at most; None: all that are there."""
    timeout_seconds: float = DEFAULT_COLLECT_SECONDS
    """How long to wait at most; 0 does not wait."""
    wait_after_min_seconds: float | None = None
    """How long more may come once `min_num` are there; None: as the server is set."""
    clear_unfinished: bool = True
    """Stop what is not finished when the call returns. After the timeout, and only then, the runners that were at it
    are restarted. Without it the rest goes on, and a later call gets it.
    """
    include_partial: bool = False
    """Tasks that this call stops leave a result of the samples that had succeeded, if any had."""
    with_payloads: bool = True
    """Whether results carry samples and payloads; without them they are handed out all the same."""


class TaskResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """What became of one task."""

    task_id: str
    client_key: str
    state: TaskState
    succeeded_samples: int
    """Of the planned ones."""
    planned_samples: int
    is_eval: bool = False
    message: str = ""
    """Why not all samples succeeded; empty when they did."""
    metrics: dict[str, float] = {}
    """See `domain.values.metrics`."""
    samples: tuple[SampleDone, ...] = ()
    """Every sample's record, in the order of sample_no; of a task that was stopped those that were final by then."""
    payloads: tuple[bytes, ...] = ()
    """One of each SubTask that made one, in the order in which they ended."""

    @property
    def ok(self) -> bool:
        """Whether every planned sample succeeded."""
        return self.succeeded_samples == self.planned_samples


class UnfinishedTask(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """A task that a collect did not wait for: it goes on, or was stopped without a result."""

    task_id: str
    client_key: str
    succeeded_samples: int
    """Until then."""
    planned_samples: int
    is_stopped: bool
    reason: str


class CollectReply(msgspec.Struct, frozen=True, kw_only=True):
    """What one collect was handed."""

    submission_id: str = ""
    results: tuple[TaskResult, ...] = ()
    """In the order in which the tasks ended."""
    unfinished: tuple[UnfinishedTask, ...] = ()
    """In the order of submission."""
    is_timed_out: bool = False
    """Whether the call waited in vain for what it asked for."""
    warnings: tuple[str, ...] = ()
    """What was not done as asked."""

    @property
    def payloads(self) -> list[bytes]:
        """Of all results, in order."""
        return [payload for result in self.results for payload in result.payloads]
