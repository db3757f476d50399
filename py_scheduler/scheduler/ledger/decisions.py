"""What a command makes of the present state: command -> events. Decisions look at the state and change nothing.

`endings` says what the end of an attempt comes to, `kept_results` what becomes of results that wait to be collected.

Invariants
  1. A command about an attempt that is over, or has given way to the next, makes no event (fencing): once attempt 2 of
     a SubTask is queued, a late report of attempt 1 changes nothing.
  2. A task that is to be stopped never starts an attempt again, also while what waits of it is still to be ended.
  3. A call that is sent again under its request id accepts nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from py_scheduler.domain.events import (
    AbortRequested,
    AcceptedTask,
    AttemptsLeased,
    AttemptStarted,
    EndpointsSet,
    Event,
    TasksAccepted,
    TrainingResumed,
    WeightsChanged,
    approximate_size,
)
from py_scheduler.domain.generation import STUDENT
from py_scheduler.domain.results import AttemptState
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError
from py_scheduler.scheduler.ledger.commands import (
    AcceptTasks,
    AcknowledgeResults,
    ChangeWeights,
    CollectResults,
    DiscardResults,
    EndAttempt,
    EndStopped,
    InterruptAttempt,
    LeaseAttempts,
    RefuseAttempt,
    ResumeTraining,
    ScoreGroup,
    SetEndpoints,
    StartAttempt,
    StopTasks,
)
from py_scheduler.scheduler.ledger.endings import (
    end_for_good,
    end_waiting,
    ended,
    group_done,
    may_refill,
    may_retry,
)
from py_scheduler.scheduler.ledger.records import LIVE, WAITING, NewTasks, SubmissionRecord, task_ids_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator, Mapping, Sequence

    from py_scheduler.domain.task import Task
    from py_scheduler.scheduler.ledger.state import LedgerState

# Members by name: Python 3.11 looks them up through the metaclass, five times slower, and these are on the way of
# every sample.
_SUCCEEDED: Final = AttemptState.SUCCEEDED
_LOST: Final = AttemptState.LOST

_PORTION_TASKS = 128
_PORTION_SAMPLES = 1_024


class Decisions:
    """About one ledger's state. `by_command`: what decides, by the type of command."""

    def __init__(self, state: LedgerState) -> None:
        self._state = state
        self.prepared: NewTasks | None = None
        """Of the last submit that was decided with its records made beforehand."""
        self.by_command: Mapping[type, Callable[..., list[Event]]] = {
            AcceptTasks: self._accept,
            LeaseAttempts: self._lease,
            StartAttempt: self._start,
            EndAttempt: self._end,
            ScoreGroup: self._score,
            RefuseAttempt: self._refuse,
            InterruptAttempt: self._interrupt,
            ChangeWeights: self._change_weights,
            SetEndpoints: self._set_endpoints,
            ResumeTraining: self._resume,
            StopTasks: self._stop,
            EndStopped: self._end_stopped,
            CollectResults: state.results.decide_collect,
            AcknowledgeResults: state.results.decide_acknowledge,
            DiscardResults: state.results.decide_discard,
        }

    def _accept(self, command: AcceptTasks) -> list[Event]:
        namespace = command.key.namespace
        if self._state.requests.repeated(namespace, command.request_id, command.request_digest) is not None:
            return []
        submission = self._open_submission(command)
        made = command.prepared
        if made is not None and _is_current(made, submission):
            if not _has_fresh_keys(made, submission):
                _check_client_keys(submission, command)
            self.prepared = made
            return [_accepted_event(command, made.submission.submission_id, made.accepted)]
        _check_client_keys(submission, command)
        submission_id = submission.submission_id if submission else command.fresh_submission_id
        first_no = submission.next_task_no if submission else 0
        return [_accepted_event(command, submission_id, tuple(_named(submission_id, first_no, command.tasks)))]

    def _open_submission(self, command: AcceptTasks) -> SubmissionRecord | None:
        """The one that its tasks join; None: they begin one."""
        submission = self._state.submission_of_key(command.key)
        return None if submission is None or submission.is_drained else submission

    def preparing(self, command: AcceptTasks) -> Generator[None, None, NewTasks]:
        """Makes the records of its tasks, in slices. They are right until anything else is decided."""
        while True:
            submission = self._open_submission(command)
            if submission is None:
                made = NewTasks(SubmissionRecord(command.fresh_submission_id, command.key))
            else:
                made = NewTasks(submission, submission.next_task_no)
            submission_id = made.submission.submission_id
            event = _accepted_event(command, submission_id, ())
            accepted: list[AcceptedTask] = []
            for begin, tasks in portions(command.tasks):
                some = _named(submission_id, made.first_no + begin, tasks)
                made.add(some, event)
                made.size += approximate_size(msgspec.structs.replace(event, tasks=some))
                accepted += some
                yield
            made.accepted = tuple(accepted)
            yield
            if _is_current(made, self._open_submission(command)):
                return made

    def _lease(self, command: LeaseAttempts) -> list[Event]:
        task_at = self._state.task_at
        leasable = tuple([ref for ref in dict.fromkeys(command.attempts) if task_at(ref, WAITING) is not None])
        return [AttemptsLeased(attempts=leasable, is_given_back=command.is_given_back)] if leasable else []

    def _start(self, command: StartAttempt) -> list[Event]:
        ref = command.ref
        task = self._state.task_at(ref, WAITING)
        if task is None:
            return []
        return [
            AttemptStarted(
                submission_id=task.submission.submission_id,
                task_id=ref.task_id,
                subtask_no=ref.subtask_no,
                attempt_no=ref.attempt_no,
                node_ip=command.node_ip,
                gpu_ids=command.gpu_ids,
                unix_seconds=command.unix_seconds,
            )
        ]

    def _end(self, command: EndAttempt) -> list[Event]:
        ref, state = command.ref, command.state
        task = self._state.task_at(ref, LIVE)
        if task is None:
            return []
        subtask = task.subtasks[ref.subtask_no]
        if command.is_stop_confirmed and state is not _SUCCEEDED:
            if may_refill(task, subtask, command):
                return [ended(task, command, (), ref.attempt_no + 1, is_refill=True)]
            if may_retry(task, subtask, command):
                return [ended(task, command, (), ref.attempt_no + 1)]
        if state is _LOST and subtask.losses:
            command = _quarantined(command, subtask.losses + 1)
        return end_for_good(task, subtask, command)

    def _refuse(self, command: RefuseAttempt) -> list[Event]:
        task = self._state.task_at(command.ref, WAITING)
        if task is None:
            return []
        end = EndAttempt(command.ref, AttemptState.FAILED, (), command.reason, command.unix_seconds)
        return end_for_good(task, task.subtasks[command.ref.subtask_no], end)

    def _score(self, command: ScoreGroup) -> list[Event]:
        task = self._state.task(command.task_id)
        return [group_done(task, command)] if task is not None and task.awaits_group_score else []

    def _interrupt(self, command: InterruptAttempt) -> list[Event]:
        ref = command.ref
        end = EndAttempt(ref, AttemptState.LOST, (), "the server was restarted", command.unix_seconds)
        task = self._state.task_at(ref, LIVE)
        if task is None or task.stop_cause is not None:
            return self._end(end)
        return [ended(task, end, (), ref.attempt_no + 1, is_counted=False)]

    def _change_weights(self, command: ChangeWeights) -> list[Event]:
        version = command.weight_version
        epoch = self._state.weights_of(command.roles).next_epoch(version, is_confirmed=command.is_confirmed)
        if epoch is None:
            return []
        return [
            WeightsChanged(roles=command.roles, weight_version=version, epoch=epoch, unix_seconds=command.unix_seconds)
        ]

    def _set_endpoints(self, command: SetEndpoints) -> list[Event]:
        if all(self._state.endpoints_of((role,)) == command.endpoints for role in command.roles):
            return []
        return [EndpointsSet(roles=command.roles, endpoints=command.endpoints, unix_seconds=command.unix_seconds)]

    def _resume(self, command: ResumeTraining) -> list[Event]:
        return [TrainingResumed(epoch=self._state.weights_of((STUDENT,)).epoch, unix_seconds=command.unix_seconds)]

    def _stop(self, command: StopTasks) -> list[Event]:
        submission = self._state.submission(command.submission_id)
        if submission is None:  # All of it ended meanwhile, and so it was forgotten.
            return []
        named = dict.fromkeys(command.task_ids) or submission.open_tasks
        tasks = [task for task_id in named if (task := submission.open_tasks.get(task_id)) and task.stop_cause is None]
        if not tasks and not command.request_id:
            return []
        # A call that found nothing to stop is remembered too: sent again, it must not stop what has come since.
        events: list[Event] = [
            AbortRequested(
                submission_id=command.submission_id,
                task_ids=tuple(task.task_id for task in tasks),
                cause=command.cause,
                reason=command.reason,
                unix_seconds=command.unix_seconds,
                keeps_results=command.keeps_results,
                restarts_runners=command.restarts_runners,
                request_id=command.request_id,
                request_digest=command.request_digest,
                stopped_earlier=command.stopped_earlier,
                before_task_no=command.before_task_no,
            )
        ]
        if command.ends_waiting:
            for task in tasks:
                events.extend(end_waiting(task, command.cause, command.reason, command.unix_seconds))
        return events

    def _end_stopped(self, command: EndStopped) -> list[Event]:
        task = self._state.task(command.task_id)
        if task is None or task.stop_cause is None:
            return []
        return list(end_waiting(task, task.stop_cause, task.reason, command.unix_seconds, command.at_most))


def _named(submission_id: str, first_no: int, tasks: Sequence[Task]) -> list[AcceptedTask]:
    return list(map(AcceptedTask, task_ids_of(submission_id, range(first_no, first_no + len(tasks))), tasks))


def _accepted_event(command: AcceptTasks, submission_id: str, accepted: tuple[AcceptedTask, ...]) -> TasksAccepted:
    return TasksAccepted(
        submission_id=submission_id,
        namespace=command.key.namespace,
        batch_id=command.key.batch_id,
        request_id=command.request_id,
        request_digest=command.request_digest,
        tasks=accepted,
        unix_seconds=command.unix_seconds,
        iteration=command.iteration,
        group_scored=command.group_scored,
        is_collected=command.is_collected,
        moment=command.moment,
        warnings=command.warnings,
    )


def portions(tasks: Sequence[Task]) -> Iterator[tuple[int, Sequence[Task]]]:
    """So many of a call's tasks at a time as are a millisecond's work, each with the number of the first."""
    for begin in range(0, len(tasks), _PORTION_TASKS):
        some = tasks[begin : begin + _PORTION_TASKS]
        if sum([task.config.repeat_times for task in some]) <= _PORTION_SAMPLES:
            yield begin, some
        else:
            yield from ((begin + number, (task,)) for number, task in enumerate(some))


def _is_current(made: NewTasks, submission: SubmissionRecord | None) -> bool:
    """Whether what was made for the submission of a key still follows on what that has now."""
    if submission is None:
        return not made.submission.requests
    return made.submission is submission and made.first_no == submission.next_task_no


def _has_fresh_keys(made: NewTasks, submission: SubmissionRecord | None) -> bool:
    """Whether none of its keys stands twice or is an open task's."""
    if made.keys_said != len(made.client_keys):
        return False
    # Of two sets the shorter one is looked through.
    return submission is None or submission.client_keys.isdisjoint(made.client_keys)


def _check_client_keys(submission: SubmissionRecord | None, command: AcceptTasks) -> None:
    live = submission.client_keys if submission else frozenset[str]()
    seen: set[str] = set()
    for number, task in enumerate(command.tasks):
        key = task.client_key
        if not key:
            continue
        if key in live:
            raise AlreadyExistsError(
                f"tasks[{number}].client_key: {key!r} belongs to an open task of batch_id {command.key.batch_id!r} "
                f"in namespace {command.key.namespace!r}, perhaps another client's: take another key, batch_id or "
                "namespace, or send the same request_id again to repeat a submit"
            )
        if key in seen:
            raise InvalidArgumentError(f"{key!r} stands twice in this request", f"tasks[{number}].client_key")
        seen.add(key)


def _quarantined(command: EndAttempt, losses: int) -> EndAttempt:
    """What keeps losing its workers is not given another one."""
    message = f"quarantined, it lost its worker {losses} times: {command.message}"
    return msgspec.structs.replace(command, message=message)
