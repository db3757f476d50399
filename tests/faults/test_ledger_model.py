"""The ledger beside a plain model of it, under whatever commands come: live, late, repeated, and across restarts."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from py_scheduler.domain.events import (
    AbortRequested,
    AttemptEnded,
    AttemptRef,
    AttemptsLeased,
    AttemptStarted,
    StopCause,
    TaskDone,
    TasksAccepted,
)
from py_scheduler.domain.results import AttemptState, Outcome, Reward, SampleDone, TaskState
from py_scheduler.domain.task import RetryPolicy, SubmissionKey, Task, TaskConfig
from py_scheduler.errors import AlreadyExistsError
from py_scheduler.scheduler.ledger.commands import (
    AcceptTasks,
    EndAttempt,
    InterruptAttempt,
    LeaseAttempts,
    RefuseAttempt,
    ScoreGroup,
    StartAttempt,
    StopTasks,
)
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.snapshots import snapshot_of, submission_of

if TYPE_CHECKING:
    from py_scheduler.scheduler.ledger.commands import Command

GROUPED = frozenset({"group"})
ENDS = (
    AttemptState.SUCCEEDED,
    AttemptState.FAILED,
    AttemptState.TIMED_OUT,
    AttemptState.LOST,
    AttemptState.ABORTED,
)


class Sub:
    """One sample's latest attempt."""

    def __init__(self) -> None:
        self.attempt_no, self.state = 1, "queued"
        self.failures = self.losses = 0


class ModelTask:
    def __init__(self, submission_id: str, task: Task) -> None:
        self.submission_id = submission_id
        self.subs = [Sub() for _ in range(task.config.repeat_times)]
        self.retry = task.config.retry
        self.grouped = task.config.task_type in GROUPED
        self.stopped = self.was_aborted = False
        self.succeeded = 0
        self.state: TaskState | None = None

    @property
    def open_subs(self) -> int:
        return sum(sub.state != "final" for sub in self.subs)

    @property
    def awaits_score(self) -> bool:
        return self.state is None and self.open_subs == 0

    def finish(self) -> None:
        """After the last attempt that will be made; what a handler is still to score goes on."""
        if self.state is None and not self.open_subs and (not self.grouped or self.stopped or not self.succeeded):
            self.state = self.end_state

    @property
    def end_state(self) -> TaskState:
        succeeded = 0 if self.grouped and self.stopped else self.succeeded
        if succeeded == len(self.subs):
            return TaskState.SUCCEEDED
        if self.stopped or self.was_aborted:
            return TaskState.ABORTED
        return TaskState.PARTIAL if succeeded else TaskState.FAILED


class LedgerAndModel(RuleBasedStateMachine):
    """Every command goes to both. What happened is kept, as a journal keeps it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.journal: list[Any] = []
        self.tasks: dict[str, ModelTask] = {}
        self.requests: dict[str, tuple[bytes, tuple[str, ...]]] = {}
        self.made = 0

    def tell(self, command: Command) -> list[Any]:
        events = self.ledger.decide(command)
        assert self.ledger.decide(command) == events, "deciding changes nothing"
        for event in events:
            self.ledger.apply(event)
            if type(event) is not AttemptsLeased:
                self.journal.append(event)
        return events

    # Tasks in

    @rule(
        repeats=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        failures=st.integers(0, 1),
        losses=st.integers(0, 1),
        grouped=st.booleans(),
        step=st.integers(0, 1),
    )
    def accept(self, repeats: list[int], failures: int, losses: int, grouped: bool, step: int) -> None:
        retry = RetryPolicy(max_failure_retries=failures, max_loss_retries=losses)
        kind = "group" if grouped else "plain"
        tasks = tuple(Task(config=TaskConfig(task_type=kind, repeat_times=n, retry=retry)) for n in repeats)
        self.made += 1
        command = AcceptTasks(
            f"r{self.made}", b"d", SubmissionKey(step), tasks, f"s{self.made}", 1.0, group_scored=GROUPED
        )
        (event,) = self.tell(command)
        assert isinstance(event, TasksAccepted)
        for accepted in event.tasks:
            assert accepted.task_id not in self.tasks
            self.tasks[accepted.task_id] = ModelTask(event.submission_id, accepted.task)
        self.requests[command.request_id] = (b"d", tuple(accepted.task_id for accepted in event.tasks))

    @precondition(lambda self: self.requests)
    @rule(data=st.data(), same=st.booleans())
    def repeat(self, data: st.DataObject, same: bool) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.requests)))
        command = AcceptTasks(request_id, b"d" if same else b"x", SubmissionKey(0), (), "other", 1.0)
        if same:
            assert self.tell(command) == []
            known = self.ledger.state.requests.find("default", request_id)
            assert known is not None
            assert known.task_ids == self.requests[request_id][1]
        else:
            with pytest.raises(AlreadyExistsError):
                self.tell(command)

    # Attempts

    def _any_attempt(self, data: st.DataObject) -> tuple[AttemptRef, ModelTask, Sub, bool]:
        """Of any task there ever was, mostly the latest one, sometimes an earlier or later; whether it is live."""
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        task = self.tasks[task_id]
        number = data.draw(st.integers(0, len(task.subs) - 1))
        sub = task.subs[number]
        attempt_no = data.draw(st.sampled_from((sub.attempt_no,) * 4 + (sub.attempt_no - 1, sub.attempt_no + 1)))
        is_live = task.state is None and attempt_no == sub.attempt_no and sub.state != "final"
        return AttemptRef(task_id, number, attempt_no), task, sub, is_live

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), is_given_back=st.booleans())
    def lease(self, data: st.DataObject, is_given_back: bool) -> None:
        ref, _, sub, is_live = self._any_attempt(data)
        events = self.tell(LeaseAttempts((ref, ref), is_given_back))
        waits = is_live and sub.state in ("queued", "leased")
        assert events == ([AttemptsLeased(attempts=(ref,), is_given_back=is_given_back)] if waits else [])
        if waits:
            sub.state = "queued" if is_given_back else "leased"

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        ref, task, sub, is_live = self._any_attempt(data)
        events = self.tell(StartAttempt(ref, "10.0.0.1", (0,), 2.0))
        waits = is_live and sub.state in ("queued", "leased")
        assert [type(event) for event in events] == [AttemptStarted] * waits
        if waits:
            assert not task.stopped, "a task that is to be stopped never starts an attempt again"
            sub.state = "running"

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), state=st.sampled_from(ENDS), confirmed=st.booleans())
    def end(self, data: st.DataObject, state: AttemptState, confirmed: bool) -> None:
        ref, task, sub, is_live = self._any_attempt(data)
        done = SampleDone(
            task_id=ref.task_id, sample_no=ref.subtask_no, attempt_no=ref.attempt_no, outcome=Outcome.SOLVED
        )
        samples = (done,) if state is AttemptState.SUCCEEDED else ()
        events = self.tell(EndAttempt(ref, state, samples, "because", 3.0, confirmed))
        if not is_live:
            assert events == []
            return
        self._ended(task, sub, state, may_retry=confirmed)
        self._same(events, ref, task)

    @precondition(lambda self: self.tasks)
    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        """No node can hold it: only what waits is ended, whatever retries are left."""
        ref, task, sub, is_live = self._any_attempt(data)
        events = self.tell(RefuseAttempt(ref, "no node", 3.0))
        if not is_live or sub.state == "running":
            assert events == []
            return
        self._ended(task, sub, AttemptState.FAILED, may_retry=False)
        self._same(events, ref, task)

    def _ended(self, task: ModelTask, sub: Sub, state: AttemptState, *, may_retry: bool, counted: bool = True) -> None:
        lost, failed = state is AttemptState.LOST, state in (AttemptState.FAILED, AttemptState.TIMED_OUT)
        budget_left = (lost and sub.losses < task.retry.max_loss_retries) or (
            failed and sub.failures < task.retry.max_failure_retries
        )
        if may_retry and not task.stopped and (budget_left or not counted):
            sub.losses += lost and counted
            sub.failures += failed and counted
            sub.attempt_no, sub.state = sub.attempt_no + 1, "queued"
            return
        sub.state = "final"
        task.succeeded += state is AttemptState.SUCCEEDED
        task.was_aborted |= state is AttemptState.ABORTED
        task.finish()

    def _same(self, events: list[Any], ref: AttemptRef, task: ModelTask) -> None:
        ended, *done = events
        sub = task.subs[ref.subtask_no]
        assert isinstance(ended, AttemptEnded)
        assert ended.next_attempt_no == (0 if sub.state == "final" else sub.attempt_no)
        assert len(ended.samples) == (sub.state == "final"), "each planned sample is told of once, at its end"
        assert [event.state for event in done] == ([] if task.state is None else [task.state])

    @precondition(lambda self: any(task.grouped for task in self.tasks.values()))
    @rule(data=st.data(), fails=st.booleans())
    def score(self, data: st.DataObject, fails: bool) -> None:
        grouped = sorted(task_id for task_id, task in self.tasks.items() if task.grouped)
        task_id = data.draw(st.sampled_from(grouped))
        task = self.tasks[task_id]
        rewards = () if fails else tuple(Reward(score=1.0) for _ in task.subs)
        events = self.tell(ScoreGroup(task_id, rewards, "no judge" if fails else "", 1.0, 5.0))
        if not task.awaits_score:
            assert events == []
            return
        task.state = TaskState.FAILED if fails else task.end_state
        assert [event.state for event in events] == [task.state]

    @precondition(lambda self: self.tasks)
    @rule(data=st.data(), whole=st.booleans())
    def stop(self, data: st.DataObject, whole: bool) -> None:
        task_id = data.draw(st.sampled_from(sorted(self.tasks)))
        submission_id = self.tasks[task_id].submission_id
        events = self.tell(StopTasks(submission_id, () if whole else (task_id,), StopCause.REQUEST, "stop", 4.0))
        named = [
            id_ for id_, task in self.tasks.items() if task.submission_id == submission_id and (whole or id_ == task_id)
        ]
        stopped = [id_ for id_ in named if self.tasks[id_].state is None and not self.tasks[id_].stopped]
        if not stopped:
            assert events == []
            return
        assert isinstance(events[0], AbortRequested)
        assert sorted(events[0].task_ids) == sorted(stopped)
        done = {event.task_id: event.state for event in events if isinstance(event, TaskDone)}
        for id_ in stopped:
            task = self.tasks[id_]
            task.stopped = True
            for sub in task.subs:
                if sub.state in ("queued", "leased"):
                    sub.state = "final"
            task.finish()
        assert done == {id_: self.tasks[id_].state for id_ in stopped if self.tasks[id_].state is not None}

    # Restart

    @rule(by_snapshot=st.booleans())
    def restart(self, by_snapshot: bool) -> None:
        """A fresh ledger from what was journalled, or from snapshots, is the same one; what ran is interrupted."""
        before, fresh = self.ledger, Ledger()
        if by_snapshot:
            old = before.state
            fresh.adopt([submission_of(snapshot_of(submission, old)) for submission in old.submissions()])
            fresh.skip_to(old.last_sequence)
        else:
            for event in self.journal:
                fresh.apply(event)
        assert fresh.state.last_sequence == before.state.last_sequence == len(self.journal)
        self.ledger = fresh
        for task_id, task in self.tasks.items():
            for sub in task.subs:
                sub.state = "queued" if sub.state == "leased" else sub.state
            for ref in fresh.state.running_attempts(task_id):
                events = self.tell(InterruptAttempt(ref, 6.0))
                self._ended(task, task.subs[ref.subtask_no], AttemptState.LOST, may_retry=True, counted=False)
                self._same(events, ref, task)

    # At every moment

    @invariant()
    def states_are_the_same(self) -> None:
        opened = {task_id: task for task_id, task in self.tasks.items() if task.state is None}
        assert self.ledger.state.open_tasks == len(opened)
        assert self.ledger.state.open_samples == sum(len(task.subs) for task in opened.values())
        for task_id, task in self.tasks.items():
            record = self.ledger.state.task(task_id)
            assert (record is None) == (task.state is not None)
            if record is not None:
                numbers = [sub.attempt_no for sub in record.subtasks]
                assert numbers == [sub.attempt_no for sub in task.subs]
                for sub, own in zip(record.subtasks, task.subs, strict=True):
                    assert own.state in ("final", sub.state)

    @invariant()
    def everything_is_accounted_for(self) -> None:
        """submitted = succeeded + partial + failed + aborted + pending, and no attempt is counted twice."""
        by_submission: dict[str, Counter[TaskState | None]] = {}
        for task in self.tasks.values():
            by_submission.setdefault(task.submission_id, Counter())[task.state] += 1
        for submission_id, counts in by_submission.items():
            record = self.ledger.state.submission(submission_id)
            assert record is not None
            assert len(record.open_tasks) == counts[None]
            assert {state: n for state, n in record.done_tasks.items() if n} == {s: n for s, n in counts.items() if s}
            assert all(count >= 0 for count in record.attempts_in.values())
            waiting = [
                sub
                for task in self.tasks.values()
                if task.submission_id == submission_id and task.state is None
                for sub in task.subs
                if sub.state in ("queued", "leased", "running")
            ]
            live = (AttemptState.QUEUED, AttemptState.LEASED, AttemptState.RUNNING)
            assert sum(record.attempts_in[state] for state in live) == len(waiting)

    def teardown(self) -> None:
        """In all that was journalled, each sample was told of once at most, and each task ended once at most."""
        samples = Counter(
            (s.task_id, s.sample_no) for e in self.journal if isinstance(e, AttemptEnded) for s in e.samples
        )
        done = Counter(event.task_id for event in self.journal if isinstance(event, TaskDone))
        assert set(samples.values()) | set(done.values()) <= {1}
        for task_id in done:
            assert sum(key[0] == task_id for key in samples) == len(self.tasks[task_id].subs)


TestLedger = LedgerAndModel.TestCase
