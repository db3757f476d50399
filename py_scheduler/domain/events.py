"""What happened, in the order it happened: the one list that journal, streams, callbacks and restart all consume.

Events are facts made by the ledger alone (`scheduler/ledger/ledger.py`). All but `AttemptsLeased` are journalled and
numbered; leases are derived again after a restart.

They are stored as arrays, a third smaller than with names: a new field goes to the end and has a default.
"""

from __future__ import annotations

from enum import StrEnum
from typing import final

import msgspec

from py_scheduler.domain.collecting import UnfinishedTask
from py_scheduler.domain.generation import Endpoints
from py_scheduler.domain.results import AttemptState, Outcome, Reward, SampleDone, TaskState
from py_scheduler.domain.task import BatchId, Task
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY


class AcceptedTask(msgspec.Struct, frozen=True, array_like=True, gc=False):
    task_id: str
    task: Task


class Moment(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A time that a later process can compare with its own, as long as its `Clock.boot_id` is the same."""

    boot_id: bytes
    monotonic_seconds: float


class AttemptRef(msgspec.Struct, frozen=True, gc=False):
    """Names one try: attempt `attempt_no` (from 1) at SubTask `subtask_no` (from 0) of a task."""

    task_id: str
    subtask_no: int
    attempt_no: int


class TasksAccepted(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """One SubmitTasks call was taken in. Tasks of one call are accepted together or not at all."""

    submission_id: str
    namespace: str
    batch_id: BatchId
    request_id: str
    request_digest: bytes
    tasks: tuple[AcceptedTask, ...]
    unix_seconds: float
    iteration: IterationContext | None = None
    group_scored: frozenset[str] = frozenset()
    """The task types among them whose handler scores all samples of a task together before its TaskDone."""
    is_collected: bool = False
    """Whether their results are kept until they are collected."""
    moment: Moment | None = None
    """From which their deadlines count."""
    warnings: tuple[str, ...] = ()
    """What the call was told beside the ids, for the same call sent again."""


@final
class AttemptsLeased(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """A batch was admitted; is_given_back: these wait again, with no room. Not journalled: after a restart there is no
    lease.
    """

    attempts: tuple[AttemptRef, ...]
    is_given_back: bool = False


class AttemptStarted(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """A handler began to work on an attempt."""

    submission_id: str
    task_id: str
    subtask_no: int
    attempt_no: int
    node_ip: str
    gpu_ids: tuple[int, ...]
    unix_seconds: float


class AttemptEnded(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """An attempt is over."""

    submission_id: str
    task_id: str
    subtask_no: int
    attempt_no: int
    state: AttemptState
    samples: tuple[SampleDone, ...]
    """Final ones; none when another attempt follows."""
    message: str
    next_attempt_no: int
    """0: none follows."""
    unix_seconds: float
    is_counted: bool = True
    """Whether it used up a retry; the end of the server's own process does not."""
    is_refill: bool = False
    """Whether the next attempt takes the place of one that the infrastructure failed, which no retry of the agent pays
    for.
    """
    payload: bytes = b""
    """What the runner made for the trainer in this attempt, never decoded here; like samples, only when final."""
    running_seconds: float = 0.0
    """From the handler's start to its end, or until it was given up."""
    is_eval: bool = False
    """Of the task. This and what follows the service as a whole learns from a final attempt, without the task's record
    (`ledger/service_facts.py`).
    """
    subtask_seconds: float = 0.0
    """`running_seconds` of all attempts at the SubTask."""
    trainable_samples: int = 0
    """How many of its samples can be trained on."""


class StopCause(StrEnum):
    """Why work is stopped before its end."""

    REQUEST = "request"
    PHASE_TIMEOUT = "phase_timeout"
    ATTEMPT_TIMEOUT = "attempt_timeout"
    TASK_DEADLINE = "task_deadline"
    SHUTDOWN = "shutdown"

    @property
    def attempt_state(self) -> AttemptState:
        """How an attempt ends that was stopped for this cause."""
        if self in _TIMEOUTS:
            return AttemptState.TIMED_OUT
        return AttemptState.ABORTED

    @property
    def outcome(self) -> Outcome:
        """The outcome of a sample that was stopped for this cause."""
        return Outcome.AGENT_TIMEOUT if self.attempt_state is AttemptState.TIMED_OUT else Outcome.ABORTED


_TIMEOUTS = frozenset({StopCause.PHASE_TIMEOUT, StopCause.ATTEMPT_TIMEOUT, StopCause.TASK_DEADLINE})


class AbortRequested(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """These tasks are to stop; each still ends with its own TaskDone."""

    submission_id: str
    task_ids: tuple[str, ...]
    cause: StopCause
    """REQUEST or TASK_DEADLINE."""
    reason: str
    unix_seconds: float
    keeps_results: bool = False
    """Whether those that wait to be collected leave a result of the samples that had succeeded."""
    restarts_runners: bool = False
    """Whether the runners that were at them are replaced before they take other work."""
    request_id: str = ""
    """Of the call that asked; empty: nobody will ask again by an id."""
    request_digest: bytes = b""
    """Of that call. A call that stops many says so in several events: the last one bears its id."""
    stopped_earlier: int = 0
    """How many tasks that call had stopped by then, in events of their own."""
    before_task_no: int | None = None
    """It was about tasks of lower numbers, those that there were when it came; None: those that there are now."""


class TaskDone(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """The one terminal event of a task. The payloads are in its SampleDone records."""

    submission_id: str
    task_id: str
    client_key: str
    state: TaskState
    planned_samples: int
    outcomes: dict[Outcome, int]
    """How many samples ended in each class."""
    reason: str
    """Why it is not SUCCEEDED."""
    unix_seconds: float
    rewards: tuple[Reward, ...] = ()
    """What the handler's `eval_group` gave, one to a sample in the order of sample_no, in place of the samples' own;
    empty when the handler scores no groups.
    """
    group_outcomes: tuple[Outcome, ...] = ()
    """What these make of the samples, in the same order; `outcomes` counts them."""
    is_eval: bool = False
    """Of the task, whose record is gone."""


class WeightsChanged(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """A language model has other weights. Of no submission and no namespace: every watcher of a namespace sees it."""

    roles: tuple[str, ...]
    """Those that rest on its engine."""
    weight_version: str
    epoch: int
    """Its weight_epoch from now on; 0 for the first weights that were seen."""
    unix_seconds: float

    @property
    def submission_id(self) -> str:
        return ""


class EndpointsSet(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """A language model has other servers. Of no submission and of no namespace, as WeightsChanged is.

    roles: those that rest on it. endpoints: None from a watch, since addresses are no namespace's business, and where
    the configuration's own count again.
    """

    roles: tuple[str, ...]
    endpoints: Endpoints | None
    unix_seconds: float

    @property
    def submission_id(self) -> str:
        return ""


class TrainingResumed(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """A namespace's trainer starts, or starts again from a checkpoint: it trains on nothing that ended before."""

    epoch: int
    """The student's weight_epoch."""
    unix_seconds: float

    @property
    def submission_id(self) -> str:
        return ""


EVERY_NAMESPACE = ""
"""The namespace of a record that is of none."""


class ResultsCollected(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """These tasks' results were handed out under a request id; they are kept until that is acknowledged."""

    submission_id: str
    request_id: str
    task_ids: tuple[str, ...]
    unix_seconds: float
    unfinished: tuple[UnfinishedTask, ...] = ()
    """What that call was told beside them, as the next two."""
    warnings: tuple[str, ...] = ()
    is_timed_out: bool = False
    completes_step: bool = False
    """Whether with these the whole submission was handed out, and is no eval."""


class ResultsAcknowledged(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """What was handed out under this request id has arrived: it is forgotten."""

    submission_id: str
    request_id: str
    unix_seconds: float


class ResultsDiscarded(msgspec.Struct, frozen=True, kw_only=True, tag=True, array_like=True, gc=False):
    """All results of a submission that were kept are forgotten, those handed out and not acknowledged too.

    Its open tasks go on; what they come to is kept again.
    """

    submission_id: str
    unix_seconds: float
    request_id: str = ""
    """As of an AbortRequested."""
    request_digest: bytes = b""
    """Likewise."""


JournalledEvent = (
    TasksAccepted
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
Event = AttemptsLeased | JournalledEvent


EVENT_BYTES = 600
"""What an event costs in memory beside its payload: within a factor of two, which is all that a limit needs."""
_REWARD_BYTES = 100
_ID_BYTES = 100


class EventRecord(msgspec.Struct, gc=False):
    """A journalled event with its place in the store."""

    sequence: int
    namespace: str
    """EVERY_NAMESPACE for what is of none."""
    event: JournalledEvent
    size: int = EVENT_BYTES
    """Bytes in memory, approximate."""
    encoded: bytes | None = None
    """A cache of its wire form, shared by all watchers."""
    tasks_as_decided: list[bytes] | None = None
    """Of a TasksAccepted that a journal writes in slices: each task in msgpack, as it was when it was decided. Whoever
    has a task's metadata may change them meanwhile. None: they are written as they are; the journal sets it then.
    """


def approximate_size(event: Event) -> int:
    """Bytes in memory of an event with its payload."""
    if type(event) is AttemptEnded:
        size = EVENT_BYTES + len(event.payload)
        for sample in event.samples:
            size += sample_size(sample)
        return size
    if type(event) is TaskDone:
        return EVENT_BYTES + _REWARD_BYTES * len(event.rewards)
    if type(event) is TasksAccepted:
        return sum([EVENT_BYTES + len(accepted.task.prompt) + len(accepted.task.data) for accepted in event.tasks])
    if type(event) is ResultsCollected:
        return EVENT_BYTES + _ID_BYTES * (len(event.task_ids) + len(event.unfinished))
    return EVENT_BYTES


def sample_size(sample: SampleDone) -> int:
    """Bytes in memory of what a sample carries beside its fixed fields."""
    trajectory = sample.trajectory
    if trajectory is EMPTY_TRAJECTORY:
        return len(sample.error)
    texts = sum([len(turn.text) for turn in trajectory.turns]) if trajectory.turns else 0
    return 10 * len(trajectory) + texts + len(sample.error)
