"""What the ledger can be told. A command is a wish: the ledger answers with the events that it makes of the wish, and
these may be none.
"""

from __future__ import annotations

import msgspec

from py_scheduler.domain.collecting import UnfinishedTask
from py_scheduler.domain.events import AttemptRef, Moment, StopCause
from py_scheduler.domain.generation import Endpoints
from py_scheduler.domain.results import AttemptState, Reward, SampleDone
from py_scheduler.domain.task import SubmissionKey, Task
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.scheduler.ledger.records import NewTasks


class AcceptTasks(msgspec.Struct, frozen=True, gc=False):
    """Takes tasks in. `fresh_submission_id` is used when the key has no submission yet.

    group_scored: the task types whose handler scores groups. is_collected: whether their results are kept until they
    are collected. warnings: what the call is told beside the ids. prepared: the records of its tasks, if
    `Ledger.preparing` made them beforehand.
    """

    request_id: str
    request_digest: bytes
    key: SubmissionKey
    tasks: tuple[Task, ...]
    fresh_submission_id: str
    unix_seconds: float
    iteration: IterationContext | None = None
    group_scored: frozenset[str] = frozenset()
    is_collected: bool = False
    moment: Moment | None = None
    warnings: tuple[str, ...] = ()
    prepared: NewTasks | None = None


class LeaseAttempts(msgspec.Struct, frozen=True, gc=False):
    """A batch got its lease; is_given_back: what has not begun of it waits for another one."""

    attempts: tuple[AttemptRef, ...]
    is_given_back: bool = False


class StartAttempt(msgspec.Struct, frozen=True, gc=False):
    """A worker is about to run an attempt."""

    ref: AttemptRef
    node_ip: str
    gpu_ids: tuple[int, ...]
    unix_seconds: float


class EndAttempt(msgspec.Struct, frozen=True, gc=False):
    """An attempt is over. `samples` may be fewer than the SubTask has: the ledger fills in the rest.

    is_stop_confirmed: False when its handler may still be at work; no other attempt is started beside it then.
    """

    ref: AttemptRef
    state: AttemptState
    samples: tuple[SampleDone, ...]
    message: str
    unix_seconds: float
    is_stop_confirmed: bool = True
    payload: bytes = b""
    running_seconds: float = 0.0


class ScoreGroup(msgspec.Struct, frozen=True, gc=False):
    """The handler's word on all samples of a task: a reward to each, in the order of sample_no, or why there is none.

    Without both the samples keep their own rewards. solve_threshold: what a score must reach for its sample to be
    `solved`.
    """

    task_id: str
    rewards: tuple[Reward, ...]
    error: str
    solve_threshold: float
    unix_seconds: float


class RefuseAttempt(msgspec.Struct, frozen=True, gc=False):
    """An attempt that waits can never start: it ends FAILED, whatever retries its task has left."""

    ref: AttemptRef
    reason: str
    unix_seconds: float


class InterruptAttempt(msgspec.Struct, frozen=True, gc=False):
    """The server ended while an attempt was under way; found at its next start. Uses up no retry."""

    ref: AttemptRef
    unix_seconds: float


class ChangeWeights(msgspec.Struct, frozen=True, gc=False):
    """An engine has these weights. roles: those that rest on it.

    is_confirmed: whether an update is known to have loaded them; else something was generated with them.
    """

    roles: tuple[str, ...]
    weight_version: str
    is_confirmed: bool
    unix_seconds: float


class SetEndpoints(msgspec.Struct, frozen=True, gc=False):
    """An engine has these servers; None: those of its configuration. roles: those that rest on it."""

    roles: tuple[str, ...]
    endpoints: Endpoints | None
    unix_seconds: float


class ResumeTraining(msgspec.Struct, frozen=True, gc=False):
    """A namespace's trainer starts, or starts again from a checkpoint."""

    unix_seconds: float


class StopTasks(msgspec.Struct, frozen=True, gc=False):
    """Stops the open tasks of a submission, or those that are named.

    keeps_results, restarts_runners, request_id, request_digest, stopped_earlier, before_task_no: see
    `AbortRequested`.
    ends_waiting: whether what waits of them ends with it; else an `EndStopped` for each of them is to follow.
    """

    submission_id: str
    task_ids: tuple[str, ...]
    cause: StopCause
    reason: str
    unix_seconds: float
    keeps_results: bool = False
    restarts_runners: bool = False
    request_id: str = ""
    request_digest: bytes = b""
    stopped_earlier: int = 0
    before_task_no: int | None = None
    ends_waiting: bool = True


class EndStopped(msgspec.Struct, frozen=True, gc=False):
    """Ends what waits of a task that was stopped. What runs of it ends by the report of its stop.

    at_most: so many of its SubTasks; None: all that wait.
    """

    task_id: str
    unix_seconds: float
    at_most: int | None = None


class CollectResults(msgspec.Struct, frozen=True, gc=False):
    """Hands out what a submission keeps: its oldest results, at most `max_num` of them (None: all).

    unfinished, warnings, is_timed_out: what the call is told beside them.
    """

    submission_id: str
    request_id: str
    max_num: int | None
    unfinished: tuple[UnfinishedTask, ...]
    warnings: tuple[str, ...]
    unix_seconds: float
    is_timed_out: bool = False


class AcknowledgeResults(msgspec.Struct, frozen=True, gc=False):
    """What was handed out under this request id has arrived."""

    namespace: str
    request_id: str
    unix_seconds: float


class DiscardResults(msgspec.Struct, frozen=True, gc=False):
    """Forgets what a submission keeps."""

    submission_id: str
    unix_seconds: float
    request_id: str = ""
    request_digest: bytes = b""


Command = (
    AcceptTasks
    | LeaseAttempts
    | StartAttempt
    | EndAttempt
    | ScoreGroup
    | RefuseAttempt
    | InterruptAttempt
    | StopTasks
    | EndStopped
    | CollectResults
    | AcknowledgeResults
    | DiscardResults
    | ChangeWeights
    | SetEndpoints
    | ResumeTraining
)
