"""The one writer of every fact about tasks and attempts.

`decide(command)` says which events a command makes of the present state, and changes nothing; `apply(event)` changes
the state, and decides nothing. Synchronous, no I/O, no clock: folding the same events gives the same state, which is
what restart is.

    state.py        what is known, and what can be asked of it
    decisions.py    command -> events
    this file       event -> state

Invariants
  1. Every accepted task gets exactly one TaskDone, and every planned sample exactly one SampleDone.
  2. A SubTask has one live attempt at most; attempt numbers rise by one.
  3. Journalled events are numbered without holes from 1.
  4. An engine's weight_epoch rises by one with each of its WeightsChanged.
  5. A task whose handler scores groups keeps its final samples until its TaskDone, which waits for that score if there
     is a sample to score. So does one whose result will be collected. No other task keeps any.
  6. What the samples of a SubTask come to is published once, when it ends for good; the samples and payloads of its
     other attempts are nowhere.

      QUEUED -> LEASED -> RUNNING -> SUCCEEDED | FAILED | TIMED_OUT | ABORTED | LOST
                 FAILED, TIMED_OUT, LOST with budget left: the next attempt is QUEUED
"""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING, Final

import msgspec

from py_scheduler.domain.events import (
    EVERY_NAMESPACE,
    AbortRequested,
    AttemptEnded,
    AttemptsLeased,
    AttemptStarted,
    Event,
    ResultsAcknowledged,
    ResultsCollected,
    ResultsDiscarded,
    StopCause,
    TaskDone,
    TasksAccepted,
)
from py_scheduler.domain.results import AttemptState
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.scheduler.ledger.decisions import Decisions
from py_scheduler.scheduler.ledger.endings import succeeded_among
from py_scheduler.scheduler.ledger.kept_results import stage, with_tokens
from py_scheduler.scheduler.ledger.records import (
    NewTasks,
    RequestRecord,
    SubmissionRecord,
    SubTaskRecord,
    TaskRecord,
    submission_and_number,
)
from py_scheduler.scheduler.ledger.state import LedgerState, Records

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping

    from py_scheduler.domain.trajectory import Trajectory
    from py_scheduler.scheduler.ledger.commands import AcceptTasks, Command
    from py_scheduler.scheduler.ledger.service_facts import ServiceFacts
    from py_scheduler.scheduler.ledger.staleness import StalenessSettings

# Members by name: Python 3.11 looks them up through the metaclass, five times slower, and these are on the way of
# every sample.
_QUEUED: Final = AttemptState.QUEUED
_LEASED: Final = AttemptState.LEASED
_RUNNING: Final = AttemptState.RUNNING
_SUCCEEDED: Final = AttemptState.SUCCEEDED
_LOST: Final = AttemptState.LOST


class Ledger:
    """Has the state, and is all that ever changes it. `state` is for whoever asks."""

    def __init__(
        self, retained_submissions: int = 10_000, limits: Mapping[str, StalenessSettings] | None = None
    ) -> None:
        """limits: by namespace, how far its training may run ahead; None: whatever was so before."""
        records = Records()
        self.state = LedgerState(records)
        # The state's own: on the way of every event, so looked up here.
        self._tasks = records.tasks
        self._open_tasks_in = records.open_tasks_in
        self._submissions = records.submissions
        self._by_key = records.by_key
        self._results = self.state.results
        self._requests = self.state.requests
        self.is_folding = False
        """While events of before are applied nothing is forgotten: of some, later ones are still to come."""
        self._retained_submissions = retained_submissions
        self._finished: OrderedDict[str, None] = OrderedDict()
        self._limits = limits
        self.state.service.limit(limits or {})
        self._decisions = Decisions(self.state)
        self._decide = self._decisions.by_command
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

    def decide(self, command: Command) -> list[Event]:
        """The events that this command makes, in order. They count only when all of them are applied."""
        return self._decide[type(command)](command)

    def preparing(self, command: AcceptTasks) -> Generator[None, None, AcceptTasks]:
        """Makes in slices what the command will need, so that to decide and apply it takes a moment however many its
        tasks are. Nothing is changed before that. It is decided as well, and slower, if anything came in between.
        """
        made = yield from self._decisions.preparing(command)
        return msgspec.structs.replace(command, prepared=made)

    def apply(self, event: Event, namespace: str = EVERY_NAMESPACE) -> None:
        """Takes one event into the state. Journalled events get the next sequence. namespace: of its record."""
        self.apply_to_submission(event)
        self.state.service.apply(event, namespace)

    def apply_to_submission(self, event: Event) -> None:
        """All but what it means to the service as a whole, which `apply_to_service` counts."""
        apply = self._apply.get(type(event))
        if apply is not None:
            apply(event)
        if type(event) is not AttemptsLeased:
            self.state.last_sequence += 1

    def apply_to_service(self, event: Event, namespace: str) -> None:
        """What `apply` does besides."""
        self.state.service.apply(event, namespace)

    def _apply_accepted(self, event: TasksAccepted) -> None:
        made, self._decisions.prepared = self._decisions.prepared, None
        if made is None or made.accepted is not event.tasks:
            known = self._submissions.get(event.submission_id)
            key = SubmissionKey(event.batch_id, event.namespace)
            made = NewTasks(known or SubmissionRecord(event.submission_id, key))
            made.add(event.tasks, event)
        submission = made.submission
        if event.submission_id not in self._submissions:
            self._submissions[event.submission_id] = self._by_key[submission.key] = submission
        self._finished.pop(event.submission_id, None)
        self._open_tasks_in[event.namespace] += len(event.tasks)
        self._tasks.update(made.records)
        if submission.open_tasks:
            submission.open_tasks.update(made.records)
        else:
            submission.open_tasks = made.records  # A copy of a hundred thousand is a good part of what a turn may take.
        submission.attempts_in[_QUEUED] += made.subtasks
        self.state.open_samples += made.samples
        submission.client_keys.update(made.client_keys)
        kept = submission.kept
        kept.scheduled_tasks += len(event.tasks)
        kept.is_eval = kept.is_eval or event.tasks[0].task.config.is_eval
        if event.is_collected:
            kept.is_collected = True
            kept.open_tasks += len(event.tasks)
        request = RequestRecord(
            event.request_digest,
            event.submission_id,
            submission.next_task_no,
            len(event.tasks),
            self.state.last_sequence,
            warnings=event.warnings,
        )
        self._requests.remember(submission, event.request_id, request)
        submission.next_task_no += len(event.tasks)
        submission.last_sequence = self.state.last_sequence + 1

    def _apply_leased(self, event: AttemptsLeased) -> None:
        state = _QUEUED if event.is_given_back else _LEASED
        for ref in event.attempts:
            task = self._tasks[ref.task_id]
            _move(task, task.subtasks[ref.subtask_no], state)

    def _apply_started(self, event: AttemptStarted) -> None:
        task = self._tasks[event.task_id]
        task.submission.last_sequence = self.state.last_sequence + 1
        _move(task, task.subtasks[event.subtask_no], _RUNNING)

    def _apply_ended(self, event: AttemptEnded) -> None:
        task = self._tasks[event.task_id]
        subtask = task.subtasks[event.subtask_no]
        task.submission.last_sequence = self.state.last_sequence + 1
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
        self._remember_call(submission, event, event.stopped_earlier + len(event.task_ids), event.before_task_no)
        self._settle_after(submission)
        for task_id in event.task_ids:
            task = self._tasks[task_id]
            task.stop_cause = event.cause
            task.reason = event.reason
            if task.staged is not None and event.cause is StopCause.REQUEST:
                task.staged.keeps_result = event.keeps_results

    def _apply_done(self, event: TaskDone) -> None:
        task = self._tasks.pop(event.task_id)
        self.state.open_samples -= event.planned_samples
        submission = task.submission
        del submission.open_tasks[event.task_id]
        self._open_tasks_in[submission.key.namespace] -= 1
        if not self._open_tasks_in[submission.key.namespace]:
            del self._open_tasks_in[submission.key.namespace]
        submission.client_keys.discard(event.client_key)
        submission.done_tasks[event.state] += 1
        submission.last_sequence = self.state.last_sequence + 1
        if task.staged is not None:
            self._results.apply_done(task, event)
        if not submission.open_tasks:
            self._settle(submission)

    def _apply_collected(self, event: ResultsCollected) -> None:
        self._results.apply_collected(event)
        self._submissions[event.submission_id].last_sequence = self.state.last_sequence + 1

    def _apply_acknowledged(self, event: ResultsAcknowledged) -> None:
        self._results.apply_acknowledged(event)
        self._settle_after(self._submissions[event.submission_id])

    def _apply_discarded(self, event: ResultsDiscarded) -> None:
        submission = self._submissions[event.submission_id]
        self._results.apply_discarded(event)
        self._remember_call(submission, event)
        self._settle_after(submission)

    def _remember_call(
        self,
        submission: SubmissionRecord,
        event: AbortRequested | ResultsDiscarded,
        stopped_tasks: int = 0,
        before_task_no: int | None = None,
    ) -> None:
        if event.request_id:
            request = RequestRecord(
                event.request_digest,
                submission.submission_id,
                0,
                submission.next_task_no if before_task_no is None else before_task_no,
                self.state.last_sequence,
                stopped_tasks,
            )
            self._requests.remember(submission, event.request_id, request)

    # What is over

    def _settle_after(self, submission: SubmissionRecord) -> None:
        submission.last_sequence = self.state.last_sequence + 1
        self._settle(submission)

    def _settle(self, submission: SubmissionRecord) -> None:
        """A submission that nothing is left of is remembered for a while."""
        if not submission.is_forgettable:
            return
        self._finished[submission.submission_id] = None
        self._finished.move_to_end(submission.submission_id)
        if not self.is_folding:
            self._forget_oldest()

    def end_fold(self) -> None:
        """Forgets what would have been forgotten meanwhile: snapshots are of different moments, so order comes last.

        What was counted was counted by the rules of its time; from now on the present ones hold.
        """
        self.is_folding = False
        if self._limits is not None:
            self.state.service.limit(self._limits)
        finished = [self._submissions[submission_id] for submission_id in self._finished]
        finished.sort(key=lambda submission: submission.last_sequence)
        self._finished = OrderedDict.fromkeys([submission.submission_id for submission in finished])
        self._forget_oldest()

    def _forget_oldest(self) -> None:
        """Finished submissions beyond `retained_submissions` go, those first that were finished first."""
        while len(self._finished) > self._retained_submissions:
            self._forget(self._finished.popitem(last=False)[0])

    def _forget(self, submission_id: str) -> None:
        submission = self._submissions.pop(submission_id)
        if self._by_key.get(submission.key) is submission:
            del self._by_key[submission.key]
        self._requests.forget(submission)

    # From a journal

    def adopt(self, submissions: Iterable[SubmissionRecord], service: ServiceFacts | None = None) -> None:
        """Takes what snapshots had, before any event is applied on top. service: what is of no submission; None: that
        has no snapshot yet.
        """
        if service is not None:
            self.state.service = service
        # As they were made, so that of those under one key the newest has it.
        for submission in sorted(submissions, key=_made_after):
            self._submissions[submission.submission_id] = self._by_key[submission.key] = submission
            self._tasks |= submission.open_tasks
            if submission.open_tasks:
                self._open_tasks_in[submission.key.namespace] += len(submission.open_tasks)
            self._requests.adopt(submission)
            self.state.open_samples += sum([task.task.config.repeat_times for task in submission.open_tasks.values()])
            self._results.adopt(submission)
            if submission.is_forgettable:
                self._finished[submission.submission_id] = None

    def skip_to(self, sequence: int) -> None:
        """The event after this one comes next: those before it are counted in already, by snapshots."""
        self.state.last_sequence = sequence

    def complete(self, trajectories: Mapping[str, Mapping[int, Trajectory]]) -> None:
        """Gives samples that a journal told of without their tokens these tokens: by task, by sample_no."""
        for task_id, of_samples in trajectories.items():
            task = self._tasks.get(task_id)
            if task is not None and task.group_samples is not None:
                task.group_samples = with_tokens(task.group_samples, of_samples)
            if task is not None and task.staged is not None:
                task.staged.samples = with_tokens(task.staged.samples, of_samples)
        for submission_id in {submission_and_number(task_id)[0] for task_id in trajectories}:
            self._results.complete(self._submissions[submission_id], trajectories)


def _made_after(submission: SubmissionRecord) -> int:
    return min([request.before_sequence for request in submission.requests.values()], default=0)


def _move(task: TaskRecord, subtask: SubTaskRecord, state: AttemptState) -> None:
    counts = task.submission.attempts_in
    counts[subtask.state] -= 1
    counts[state] += 1
    subtask.state = state
