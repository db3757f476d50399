"""What callers ask of the scheduler and what it answers; the same values in-process and behind gRPC."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from py_scheduler.domain.events import (
    AbortRequested,
    AttemptEnded,
    AttemptStarted,
    EndpointsSet,
    EventRecord,
    ResultsAcknowledged,
    ResultsCollected,
    ResultsDiscarded,
    TaskDone,
    TrainingResumed,
    WeightsChanged,
)
from py_scheduler.domain.resources import NODE_AMOUNTS, Resource
from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId, SubmissionKey, Task
from py_scheduler.domain.training.iteration import IterationContext


class Delivery(StrEnum):
    """How results reach the trainer: in the events it watches alone, or kept besides until it collects them."""

    WATCH = "watch"
    COLLECT = "collect"


class SubmitRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Tasks to take in, all or none. The same request_id with the same content runs once, however often it is sent."""

    request_id: str
    key: SubmissionKey
    tasks: tuple[Task, ...]
    iteration: IterationContext | None = None
    """What the training loop says about the step; each episode of these tasks sees it."""
    delivery: Delivery = Delivery.WATCH
    """How their results reach the trainer."""
    is_checked: bool = False
    """Whether its values were judged by `limits` when it was read from a message. What is made in process was not, and
    is judged when it is handed in: 100 000 tasks are looked through once either way."""


class SubmitReply(msgspec.Struct, frozen=True, kw_only=True):
    """What a submit is told, and told again when it is sent again."""

    submission_id: str
    task_ids: tuple[str, ...]
    """In the order of the request's tasks."""
    warnings: tuple[str, ...]
    before_sequence: int
    """A watch after it sees all events of these tasks."""


class SubmissionSelector(msgspec.Struct, frozen=True, kw_only=True):
    """Names a submission by its server-made id, or by the trainer's label (the latest one under it)."""

    submission_id: str = ""
    batch_id: BatchId | None = None
    namespace: str = DEFAULT_NAMESPACE


class AbortRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Stops a submission, or those of its tasks that are named."""

    selector: SubmissionSelector
    request_id: str = ""
    """The same id with the same content stops nothing that came after the first call. Empty: it stops what it finds."""
    task_ids: tuple[str, ...] = ()
    """Empty: the whole submission."""
    reason: str = ""
    wait: bool = False
    """Answer when the work has stopped."""
    timeout_seconds: float | None = None
    """How long to wait for that at most; None: as long as it takes."""
    keep_partial: bool = False
    """Tasks whose results are collected leave one of the samples that had succeeded, if any had."""
    restart_runners: bool = False
    """Replace the runners that were at these tasks before they take other work."""


class AbortReply(msgspec.Struct, frozen=True, kw_only=True):
    """What an abort came to."""

    aborted_tasks: int
    """How many tasks this call, or the first under its request_id, asked to stop."""
    still_stopping: tuple[str, ...]
    """Tasks whose work has not been seen to stop."""


class WaitingBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch that is not admitted yet, and why."""

    task_ids: tuple[str, ...]
    reason: str
    waiting_seconds: float
    bypassed: int


class SubmissionView(msgspec.Struct, frozen=True, kw_only=True):
    """How a submission stands: attempts now in each live state, tasks by how they ended, and what waits."""

    submission_id: str
    key: SubmissionKey
    queued_attempts: int
    leased_attempts: int
    running_attempts: int
    open_tasks: int
    succeeded_tasks: int
    partial_tasks: int
    failed_tasks: int
    aborted_tasks: int
    waiting: tuple[WaitingBatch, ...]
    """The foremost batches that wait, 100 at most. There are fewer, or none, where the first 20 000 attempts that lie
    in the queue were mostly aborted: `queued_attempts` counts all that wait.
    """
    scheduled_tasks: int = 0
    """All that were submitted since its results were last discarded."""
    collectable_tasks: int = 0
    """Results that wait to be collected."""
    unacknowledged_tasks: int = 0
    """Results that were handed out and not acknowledged."""
    kept_bytes: int = 0
    """Of both, about."""

    @property
    def has_step(self) -> bool:
        """Whether anything waits, runs or is to be collected."""
        return self.open_tasks > 0 or self.collectable_tasks > 0


class EventKind(StrEnum):
    """The journalled events, as a filter names them."""

    TASKS_ACCEPTED = "tasks_accepted"
    ATTEMPT_STARTED = "attempt_started"
    ATTEMPT_ENDED = "attempt_ended"
    ABORT_REQUESTED = "abort_requested"
    TASK_DONE = "task_done"
    WEIGHTS_CHANGED = "weights_changed"
    TRAINING_RESUMED = "training_resumed"
    RESULTS_COLLECTED = "results_collected"
    RESULTS_ACKNOWLEDGED = "results_acknowledged"
    RESULTS_DISCARDED = "results_discarded"
    ENDPOINTS_SET = "endpoints_set"


class EventFilter(msgspec.Struct, frozen=True, kw_only=True):
    """Which events a stream gives: of one submission or of a whole namespace, of some kinds or (empty) of all.

    A change of weights or of endpoints and a resume of training are of no submission: only streams of a whole namespace
    give them.
    """

    submission_id: str = ""
    kinds: frozenset[EventKind] = frozenset()
    namespace: str = DEFAULT_NAMESPACE


class EventFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The events of (after_sequence, through_sequence] that pass a filter, in order."""

    after_sequence: int
    through_sequence: int
    records: tuple[EventRecord, ...]


class EvaluatorSpecView(msgspec.Struct, frozen=True, kw_only=True):
    """An evaluator as it is configured."""

    evaluator_id: str
    handler: str
    resource: Resource
    sample_resource: Resource
    batch_size: int | None


class GenerationBackendView(msgspec.Struct, frozen=True, kw_only=True):
    """The language model in one role. error: why nothing is known of it; empty when something is. streaming: how tokens
    come from its server (`increments`, `cumulative` or `plain` from SGLang); empty where there is only one way.
    """

    role: str
    model_name: str
    weight_version: str
    vocab_size: int
    context_length: int
    error: str = ""
    streaming: str = ""


class NodeView(msgspec.Struct, frozen=True, kw_only=True):
    """Supply of one node and what is free of it."""

    node_ip: str
    gpu_ids: tuple[int, ...]
    cpu: float
    memory_gb: float
    free_gpus: tuple[float, ...]
    """In the order of `gpu_ids`."""
    free_cpu: float
    free_memory_gb: float
    named: dict[str, int] = {}
    """Of each named resource."""
    free_named: dict[str, int] = {}
    labels: dict[str, str] = {}

    @property
    def words(self) -> str:
        """What is free, for messages; `node_ip` and GPUs left out."""
        return "  ".join(
            [
                *(f"{kind} {getattr(self, f'free_{kind}'):g} of {getattr(self, kind):g} free" for kind in NODE_AMOUNTS),
                *(f"{name} {self.free_named.get(name, 0):,} of {count:,} free" for name, count in self.named.items()),
                *(f"{key}={value}" for key, value in self.labels.items()),
            ]
        )


class ServerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What a server is: its evaluators, its generation backends (`engines`) and its nodes."""

    version: str
    evaluators: tuple[EvaluatorSpecView, ...]
    engines: tuple[GenerationBackendView, ...]
    nodes: tuple[NodeView, ...]


class TasksAcceptedNotice(msgspec.Struct, frozen=True, kw_only=True):
    """`TasksAccepted` as a watcher hears of it: the ids without the contents, which the submitter has."""

    submission_id: str
    batch_id: BatchId
    task_ids: tuple[str, ...]
    unix_seconds: float


WatchedEvent = (
    TasksAcceptedNotice
    | AttemptStarted
    | AttemptEnded
    | AbortRequested
    | TaskDone
    | ResultsCollected
    | ResultsAcknowledged
    | ResultsDiscarded
    | WeightsChanged
    | TrainingResumed
    | EndpointsSet
)


class WatchedRecord(msgspec.Struct, frozen=True):
    """An event with its place in the server's store."""

    sequence: int
    event: WatchedEvent


class WatchedFrame(msgspec.Struct, frozen=True, kw_only=True):
    """The events of (after_sequence, through_sequence] that pass a filter, in order; `cursor` resumes after them."""

    after_sequence: int
    through_sequence: int
    records: tuple[WatchedRecord, ...]
    cursor: bytes
