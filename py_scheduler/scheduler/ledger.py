"""The one writer of every fact about tasks and attempts.

`decide(command)` says which events a command makes of the present state, and changes nothing; `apply(event)` changes
the state, and decides nothing. Synchronous, no I/O, no clock: folding the same events gives the same state, which is
what restart is.

Invariants
  1. Every accepted task gets exactly one TaskDone, and every planned sample exactly one SampleDone.
  2. A SubTask has one live attempt at most; attempt numbers rise by one; a command about another attempt makes no
     event (fencing).
  3. A task that is to be stopped never starts an attempt again.
  4. Journalled events are numbered without holes from 1.
  5. An engine's weight_epoch rises by one with each of its WeightsChanged.
  6. A task whose handler scores groups keeps its final samples until its TaskDone, which waits for that score if there
     is a sample to score. So does one whose result will be collected. No other task keeps any.
  7. What the samples of a SubTask come to is published once, when it ends for good; the samples and payloads of its
     other attempts are nowhere.

      QUEUED -> LEASED -> RUNNING -> SUCCEEDED | FAILED | TIMED_OUT | ABORTED | LOST
                 FAILED, TIMED_OUT, LOST with budget left: the next attempt is QUEUED
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from py_scheduler.domain.evaluator import STUDENT
from py_scheduler.domain.events import (
    EVERY_NAMESPACE,
    AbortRequested,
    AcceptedTask,
    AttemptEnded,
    AttemptRef,
    AttemptsLeased,
    AttemptStarted,
    Event,
    ResultsAcknowledged,
    ResultsCollected,
    ResultsDiscarded,
    StopCause,
    TaskDone,
    TasksAccepted,
    TrainingResumed,
    WeightsChanged,
)
from py_scheduler.domain.results import AttemptState
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError
from py_scheduler.scheduler.commands import (
    AcceptTasks,
    AcknowledgeResults,
    ChangeWeights,
    CollectResults,
    Command,
    DiscardResults,
    EndAttempt,
    InterruptAttempt,
    LeaseAttempts,
    ResumeTraining,
    ScoreGroup,
    StartAttempt,
    StopTasks,
)
from py_scheduler.scheduler.endings import (
    WAITING,
    end_waiting,
    ended,
    final_samples,
    group_done,
    may_refill,
    may_retry,
    succeeded_among,
    task_done,
)
from py_scheduler.scheduler.kept_results import KeptResults, stage, with_tokens
from py_scheduler.scheduler.records import (
    RequestRecord,
    StagedResult,
    SubmissionRecord,
    SubTaskRecord,
    TaskRecord,
    new_task,
    submission_and_number,
    task_id_of,
)
from py_scheduler.scheduler.service_facts import ServiceFacts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from py_scheduler.domain.trajectory import Trajectory
    from py_scheduler.domain.weight_history import WeightHistory
    from py_scheduler.scheduler.dynamic_timeout import TrainingHistory
    from py_scheduler.scheduler.staleness import StalenessSettings

# Members by name: Python 3.11 looks them up through the metaclass, five times slower, and these are on the way of
# every sample.
_QUEUED: Final = AttemptState.QUEUED
_LEASED: Final = AttemptState.LEASED
_RUNNING: Final = AttemptState.RUNNING
_SUCCEEDED: Final = AttemptState.SUCCEEDED
_LOST: Final = AttemptState.LOST
_LIVE = (AttemptState.RUNNING, *WAITING)


class Ledger:
    """All open tasks, and the finished submissions that are still remembered."""

    def __init__(
        self, retained_submissions: int = 10_000, limits: Mapping[str, StalenessSettings] | None = None
    ) -> None:
        """limits: by namespace, how far its training may run ahead; None: whatever was so before."""
        self.last_sequence = 0
        self.open_samples = 0
        """Planned samples of open tasks."""
        self._open_tasks_in: Counter[str] = Counter()
        """Open tasks by namespace; those that have none are left out."""
        self.stale_commands = 0
        self.is_folding = False
        """While events of before are applied nothing is forgotten: of some, later ones are still to come."""
        self._retained_submissions = retained_submissions
        self._tasks: dict[str, TaskRecord] = {}
        self._submissions: dict[str, SubmissionRecord] = {}
        self._by_key: dict[SubmissionKey, SubmissionRecord] = {}
        self._finished: OrderedDict[str, None] = OrderedDict()
        self.results = KeptResults(self._submissions)
        self._limits = limits
        self.service = ServiceFacts()
        self.service.limit(limits or {})
        self._requests: dict[tuple[str, str], RequestRecord] = {}
        self._decide: dict[type, Callable[..., list[Event]]] = {
            AcceptTasks: self._decide_accept,
            LeaseAttempts: self._decide_lease,
            StartAttempt: self._decide_start,
            EndAttempt: self._decide_end,
            ScoreGroup: self._decide_score,
            InterruptAttempt: self._decide_interrupt,
            ChangeWeights: self._decide_weights,
            ResumeTraining: self._decide_resume,
            StopTasks: self._decide_stop,
            CollectResults: self.results.decide_collect,
            AcknowledgeResults: self.results.decide_acknowledge,
            DiscardResults: self.results.decide_discard,
        }
        self._apply: dict[type, Callable[..., None]] = {
            TasksAccepted: self._apply_accepted,
            AttemptsLeased: self._apply_leased,
            AttemptStarted: self._apply_started,
            AttemptEnded: self._apply_ended,
            AbortRequested: self._apply_abort,
            TaskDone: self._apply_done,
            ResultsCollected: self._apply_collected,
            ResultsAcknowledged: self._apply_acknowledged,
            ResultsDiscarded: self._apply_discarded,
        }

    # Questions

    @property
    def open_tasks(self) -> int:
        return len(self._tasks)

    def open_tasks_in(self, namespace: str) -> int:
        return self._open_tasks_in[namespace]

    def request(self, namespace: str, request_id: str) -> RequestRecord | None:
        return self._requests.get((namespace, request_id))

    def repeated(self, namespace: str, request_id: str, digest: bytes) -> RequestRecord | None:
        """What this very call did, if it is not the first; one without an id always is. Raises AlreadyExistsError when
        the id is another call's.
        """
        known = self.request(namespace, request_id) if request_id else None
        if known is not None and known.digest != digest:
            raise AlreadyExistsError(
                f"request_id {request_id!r} was used for other tasks, or for another call: send a fresh request_id"
            )
        return known

    def submission(self, submission_id: str) -> SubmissionRecord | None:
        return self._submissions.get(submission_id)

    def submission_of_key(self, key: SubmissionKey) -> SubmissionRecord | None:
        return self._by_key.get(key)

    def task(self, task_id: str) -> TaskRecord | None:
        """The record of an open task; None once it is done."""
        return self._tasks.get(task_id)

    def open_task(self, task_id: str) -> TaskRecord:
        """The record of a task that is known to be open."""
        return self._tasks[task_id]

    def weights_of(self, roles: Iterable[str]) -> WeightHistory:
        """The history of the engine that these roles rest on. Where each had one of its own before, the longer one."""
        return self.service.weights_of(roles)

    @property
    def history(self) -> TrainingHistory:
        """What training came to so far."""
        return self.service.history

    def is_waiting(self, ref: AttemptRef) -> bool:
        """Whether this attempt is still to be started."""
        return self._live(ref, WAITING)

    def running_attempts(self, task_id: str) -> list[AttemptRef]:
        task = self._tasks.get(task_id)
        if task is None:
            return []
        return [
            AttemptRef(task_id, subtask_no, subtask.attempt_no)
            for subtask_no, subtask in enumerate(task.subtasks)
            if subtask.state is AttemptState.RUNNING
        ]

    def submissions(self) -> list[SubmissionRecord]:
        """The open ones, and the finished ones that are still remembered."""
        return list(self._submissions.values())

    def open_submissions(self) -> list[SubmissionRecord]:
        return [submission for submission in self._submissions.values() if submission.open_tasks]

    # Decisions

    def decide(self, command: Command) -> list[Event]:
        """The events that this command makes, in order. They count only when all of them are applied."""
        return self._decide[type(command)](command)

    def _decide_accept(self, command: AcceptTasks) -> list[Event]:
        if self.repeated(command.key.namespace, command.request_id, command.request_digest) is not None:
            return []
        submission = self._by_key.get(command.key)
        if submission is not None and submission.is_drained:
            submission = None
        self._check_client_keys(submission, command)
        submission_id = submission.submission_id if submission else command.fresh_submission_id
        first_no = submission.next_task_no if submission else 0
        accepted = tuple(
            AcceptedTask(task_id_of(submission_id, number), task) for number, task in enumerate(command.tasks, first_no)
        )
        return [
            TasksAccepted(
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
            )
        ]

    def _check_client_keys(self, submission: SubmissionRecord | None, command: AcceptTasks) -> None:
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

    def _decide_lease(self, command: LeaseAttempts) -> list[Event]:
        leasable = tuple([ref for ref in dict.fromkeys(command.attempts) if self._live(ref, WAITING)])
        return [AttemptsLeased(attempts=leasable)] if leasable else []

    def _decide_start(self, command: StartAttempt) -> list[Event]:
        ref = command.ref
        task = self._tasks.get(ref.task_id)
        if task is None or not self._live(ref, WAITING):
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

    def _decide_end(self, command: EndAttempt) -> list[Event]:
        ref, state = command.ref, command.state
        task = self._tasks.get(ref.task_id)
        subtask = None if task is None else task.subtasks[ref.subtask_no]
        if task is None or subtask is None or subtask.attempt_no != ref.attempt_no or subtask.state not in _LIVE:
            self.stale_commands += 1
            return []
        if command.is_stop_confirmed and state is not _SUCCEEDED:
            if may_refill(task, subtask, command):
                return [ended(task, command, (), ref.attempt_no + 1, is_refill=True)]
            if may_retry(task, subtask, command):
                return [ended(task, command, (), ref.attempt_no + 1)]
        if state is _LOST and subtask.losses:
            command = _quarantined(command, subtask.losses + 1)
        samples = final_samples(task, subtask, command)
        events: list[Event] = [ended(task, command, samples, 0)]
        if task.open_subtasks == 1:
            succeeded = succeeded_among(task, state, samples)
            if task.group_samples is None or task.stop_cause is not None or not task.succeeded_samples + succeeded:
                events.append(task_done(task, samples, succeeded, command.message, command.unix_seconds))
        return events

    def _decide_score(self, command: ScoreGroup) -> list[Event]:
        task = self._tasks.get(command.task_id)
        if task is None or not task.awaits_group_score:
            self.stale_commands += 1
            return []
        return [group_done(task, command)]

    def _decide_interrupt(self, command: InterruptAttempt) -> list[Event]:
        ref = command.ref
        end = EndAttempt(ref, AttemptState.LOST, (), "the server was restarted", command.unix_seconds)
        task = self._tasks.get(ref.task_id)
        if task is None or task.stop_cause is not None or not self._live(ref, _LIVE):
            return self._decide_end(end)
        return [ended(task, end, (), ref.attempt_no + 1, is_counted=False)]

    def _decide_weights(self, command: ChangeWeights) -> list[Event]:
        version = command.weight_version
        epoch = self.weights_of(command.roles).next_epoch(version, is_confirmed=command.is_confirmed)
        if epoch is None:
            return []
        return [
            WeightsChanged(roles=command.roles, weight_version=version, epoch=epoch, unix_seconds=command.unix_seconds)
        ]

    def _decide_resume(self, command: ResumeTraining) -> list[Event]:
        return [TrainingResumed(epoch=self.weights_of((STUDENT,)).epoch, unix_seconds=command.unix_seconds)]

    def _decide_stop(self, command: StopTasks) -> list[Event]:
        submission = self._submissions[command.submission_id]
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
            )
        ]
        for task in tasks:
            events.extend(end_waiting(task, command))
        return events

    def _live(self, ref: AttemptRef, states: tuple[AttemptState, ...]) -> bool:
        task = self._tasks.get(ref.task_id)
        if task is None:
            return False
        subtask = task.subtasks[ref.subtask_no]
        return subtask.attempt_no == ref.attempt_no and subtask.state in states

    # Facts

    def apply(self, event: Event, namespace: str = EVERY_NAMESPACE) -> None:
        """Takes one event into the state. Journalled events get the next sequence. namespace: of its record."""
        self.apply_to_submission(event)
        self.service.apply(event, namespace)

    def apply_to_submission(self, event: Event) -> None:
        """All but what it means to the service as a whole, which `service.apply` counts."""
        apply = self._apply.get(type(event))
        if apply is not None:
            apply(event)
        if type(event) is not AttemptsLeased:
            self.last_sequence += 1

    def _apply_accepted(self, event: TasksAccepted) -> None:
        submission = self._submissions.get(event.submission_id)
        if submission is None:
            submission = SubmissionRecord(event.submission_id, SubmissionKey(event.batch_id, event.namespace))
            self._submissions[event.submission_id] = self._by_key[submission.key] = submission
        self._finished.pop(event.submission_id, None)
        self._open_tasks_in[event.namespace] += len(event.tasks)
        for accepted in event.tasks:
            task = new_task(accepted.task_id, accepted.task, submission, event.unix_seconds)
            self._tasks[accepted.task_id] = submission.open_tasks[accepted.task_id] = task
            task.iteration = event.iteration
            if accepted.task.config.task_deadline_seconds is not None:
                task.accepted_at = event.moment
            if accepted.task.config.task_type in event.group_scored:
                task.group_samples = []
            if event.is_collected:
                task.staged = StagedResult()
            submission.attempts_in[_QUEUED] += len(task.subtasks)
            self.open_samples += accepted.task.config.repeat_times
            if accepted.task.client_key:
                submission.client_keys.add(accepted.task.client_key)
        self.results.apply_accepted(submission, event)
        request = RequestRecord(
            event.request_digest,
            event.submission_id,
            submission.next_task_no,
            len(event.tasks),
            self.last_sequence,
        )
        self._requests[event.namespace, event.request_id] = submission.requests[event.request_id] = request
        submission.next_task_no += len(event.tasks)
        submission.last_sequence = self.last_sequence + 1

    def _apply_leased(self, event: AttemptsLeased) -> None:
        for ref in event.attempts:
            task = self._tasks[ref.task_id]
            _move(task, task.subtasks[ref.subtask_no], _LEASED)

    def _apply_started(self, event: AttemptStarted) -> None:
        task = self._tasks[event.task_id]
        task.submission.last_sequence = self.last_sequence + 1
        _move(task, task.subtasks[event.subtask_no], _RUNNING)

    def _apply_ended(self, event: AttemptEnded) -> None:
        task = self._tasks[event.task_id]
        subtask = task.subtasks[event.subtask_no]
        task.submission.last_sequence = self.last_sequence + 1
        _move(task, subtask, event.state)
        subtask.running_seconds += event.running_seconds
        if event.next_attempt_no:
            if event.is_counted and event.state is _LOST:
                subtask.losses += 1
            elif event.is_refill:
                subtask.refills += 1
            elif event.is_counted:
                subtask.failures += 1
            subtask.attempt_no = event.next_attempt_no
            _move(task, subtask, _QUEUED)
            return
        task.open_subtasks -= 1
        outcomes = task.outcomes
        for sample in event.samples:
            outcomes[sample.outcome] = outcomes.get(sample.outcome, 0) + 1
        if task.group_samples is not None:
            task.group_samples.extend(event.samples)
        if task.staged is not None:
            stage(task.staged, subtask, event)
        if event.state is _SUCCEEDED:
            task.succeeded_samples += len(event.samples)
            return
        task.succeeded_samples += succeeded_among(task, event.state, event.samples)
        task.reason = task.reason or event.message

    def _apply_abort(self, event: AbortRequested) -> None:
        submission = self._submissions[event.submission_id]
        self._remember_call(submission, event, stopped_tasks=len(event.task_ids))
        self._settle_after(submission)
        for task_id in event.task_ids:
            task = self._tasks[task_id]
            task.stop_cause = event.cause
            task.reason = event.reason
            if task.staged is not None and event.cause is StopCause.REQUEST:
                task.staged.keeps_result = event.keeps_results

    def _apply_done(self, event: TaskDone) -> None:
        task = self._tasks.pop(event.task_id)
        self.open_samples -= event.planned_samples
        submission = task.submission
        del submission.open_tasks[event.task_id]
        self._open_tasks_in[submission.key.namespace] -= 1
        if not self._open_tasks_in[submission.key.namespace]:
            del self._open_tasks_in[submission.key.namespace]
        submission.client_keys.discard(event.client_key)
        submission.done_tasks[event.state] += 1
        submission.last_sequence = self.last_sequence + 1
        if task.staged is not None:
            self.results.apply_done(task, event)
        if not submission.open_tasks:
            self._settle(submission)

    def _apply_collected(self, event: ResultsCollected) -> None:
        self.results.apply_collected(event)
        self._submissions[event.submission_id].last_sequence = self.last_sequence + 1

    def _apply_acknowledged(self, event: ResultsAcknowledged) -> None:
        self.results.apply_acknowledged(event)
        self._settle_after(self._submissions[event.submission_id])

    def _apply_discarded(self, event: ResultsDiscarded) -> None:
        submission = self._submissions[event.submission_id]
        self.results.apply_discarded(event)
        self._remember_call(submission, event)
        self._settle_after(submission)

    def _remember_call(
        self, submission: SubmissionRecord, event: AbortRequested | ResultsDiscarded, stopped_tasks: int = 0
    ) -> None:
        if event.request_id:
            request = RequestRecord(
                event.request_digest,
                submission.submission_id,
                0,
                submission.next_task_no,
                self.last_sequence,
                stopped_tasks,
            )
            self._requests[submission.key.namespace, event.request_id] = request
            submission.requests[event.request_id] = request

    def _settle_after(self, submission: SubmissionRecord) -> None:
        submission.last_sequence = self.last_sequence + 1
        self._settle(submission)

    def _settle(self, submission: SubmissionRecord) -> None:
        """A submission that nothing is left of is remembered for a while."""
        if not submission.is_forgettable:
            return
        self._finished[submission.submission_id] = None
        self._finished.move_to_end(submission.submission_id)
        if not self.is_folding:
            self.forget_oldest()

    def end_fold(self) -> None:
        """Forgets what would have been forgotten meanwhile: snapshots are of different moments, so order comes last.

        What was counted was counted by the rules of its time; from now on the present ones hold.
        """
        self.is_folding = False
        if self._limits is not None:
            self.service.limit(self._limits)
        finished = [self._submissions[submission_id] for submission_id in self._finished]
        finished.sort(key=lambda submission: submission.last_sequence)
        self._finished = OrderedDict.fromkeys([submission.submission_id for submission in finished])
        self.forget_oldest()

    def forget_oldest(self) -> None:
        """Finished submissions beyond `retained_submissions` go, those first that were finished first."""
        while len(self._finished) > self._retained_submissions:
            self._forget(self._finished.popitem(last=False)[0])

    def _forget(self, submission_id: str) -> None:
        submission = self._submissions.pop(submission_id)
        if self._by_key.get(submission.key) is submission:
            del self._by_key[submission.key]
        for request_id, request in submission.requests.items():
            # A fold forgets late, when another submission may have taken the same request id.
            if self._requests.get(key := (submission.key.namespace, request_id)) is request:
                del self._requests[key]

    def complete(self, trajectories: Mapping[str, Mapping[int, Trajectory]]) -> None:
        """Gives samples that a journal told of without their tokens these tokens: by task, by sample_no."""
        for task_id, of_samples in trajectories.items():
            task = self._tasks.get(task_id)
            if task is not None and task.group_samples is not None:
                task.group_samples = with_tokens(task.group_samples, of_samples)
            if task is not None and task.staged is not None:
                task.staged.samples = with_tokens(task.staged.samples, of_samples)
        for submission_id in {submission_and_number(task_id)[0] for task_id in trajectories}:
            self.results.complete(self._submissions[submission_id], trajectories)

    # From snapshots

    def adopt(self, submissions: Iterable[SubmissionRecord]) -> None:
        """Takes submissions as snapshots had them, before any event is applied on top."""
        # As they were made, so that of those under one key the newest has it.
        for submission in sorted(submissions, key=_made_after):
            self._submissions[submission.submission_id] = self._by_key[submission.key] = submission
            self._tasks |= submission.open_tasks
            if submission.open_tasks:
                self._open_tasks_in[submission.key.namespace] += len(submission.open_tasks)
            for request_id, request in submission.requests.items():
                self._requests[submission.key.namespace, request_id] = request
            self.open_samples += sum([task.task.config.repeat_times for task in submission.open_tasks.values()])
            self.results.adopt(submission)
            if submission.is_forgettable:
                self._finished[submission.submission_id] = None


def _made_after(submission: SubmissionRecord) -> int:
    return min([request.before_sequence for request in submission.requests.values()], default=0)


def _quarantined(command: EndAttempt, losses: int) -> EndAttempt:
    """What keeps losing its workers is not given another one."""
    message = f"quarantined, it lost its worker {losses} times: {command.message}"
    return msgspec.structs.replace(command, message=message)


def _move(task: TaskRecord, subtask: SubTaskRecord, state: AttemptState) -> None:
    counts = task.submission.attempts_in
    counts[subtask.state] -= 1
    counts[state] += 1
    subtask.state = state
