"""The gate before the queue, told of events as a ledger makes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.events import AttemptRef, TasksAccepted
from py_scheduler.domain.results import AttemptState, Outcome
from py_scheduler.domain.task import DEFAULT_NAMESPACE, SubmissionKey
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.ledger.commands import (
    AcceptTasks,
    ChangeWeights,
    EndAttempt,
    InterruptAttempt,
    StartAttempt,
    StopTasks,
)
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.staleness import StalenessSettings, StalenessWindow
from py_scheduler.scheduler.queue.entries import ReadyBatch
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from py_scheduler.scheduler.queue.staleness_gate import StalenessGate
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.journal.ledger_driver import stop, task
from tests.support.rooms import OneKindOfRoom
from tests.support.steps.samples import done_sample

if TYPE_CHECKING:
    from py_scheduler.domain.events import Event
    from py_scheduler.domain.task import BatchId
    from py_scheduler.scheduler.ledger.commands import Command
    from py_scheduler.scheduler.ledger.records import TaskRecord

SPEC = spec_of(SolvingAgent())
LIMIT = StalenessSettings(max_staleness=1, step_size=2)


class Gated:
    """A ledger with its gate, and what went through. A task is one sample with one retry, and a batch of its own."""

    def __init__(self) -> None:
        self.ledger = Ledger(limits={DEFAULT_NAMESPACE: LIMIT})
        self.gate = StalenessGate(self.ledger.state, [DEFAULT_NAMESPACE])
        self.gate.opened = self.let_go
        self.events: list[Event] = []
        self.through: dict[str, int] = {}
        """The attempt's number by task, of what went through and has not ended."""

    @property
    def window(self) -> StalenessWindow:
        return self.ledger.state.service.windows[DEFAULT_NAMESPACE]

    @property
    def held_places(self) -> int:
        return len(self.gate._trainings[DEFAULT_NAMESPACE].held)

    @property
    def held_order(self) -> list[str]:
        """The first task of each batch that is held, in the order of service."""
        held = sorted(self.gate.held(DEFAULT_NAMESPACE), key=lambda place: place[0])
        return [batch.attempts[0].ref.task_id for _, batch in held]

    def tell(self, command: Command) -> list[Event]:
        events = self.ledger.decide(command)
        for event in events:
            self.take(event)
        self.events += events
        return events

    def take(self, event: Event) -> None:
        self.ledger.apply(event, DEFAULT_NAMESPACE)
        self.gate.apply(event, DEFAULT_NAMESPACE)

    def let_go(self) -> None:
        for batch in self.gate.let_go():
            for attempt in batch.attempts if batch is not None else ():
                assert attempt.ref.task_id not in self.through
                self.through[attempt.ref.task_id] = attempt.ref.attempt_no

    def submit(self, number: BatchId, count: int) -> None:
        tasks = (task(max_failure_retries=1),) * count
        accept = AcceptTasks(f"r{len(self.events)}", b"", SubmissionKey(number), tasks, f"s{number}", 0.0)
        for event in self.tell(accept):
            assert isinstance(event, TasksAccepted)
            for accepted in event.tasks:
                self.hold(self.ledger.state.open_task(accepted.task_id))
        self.let_go()

    def hold(self, *records: TaskRecord) -> None:
        """As one batch."""
        attempts = [
            PlannedAttempt(
                ref=AttemptRef(record.task_id, 0, record.subtasks[0].attempt_no),
                task=record.task,
                first_sample_no=0,
                sample_count=1,
                submission_id=record.submission.submission_id,
                namespace=DEFAULT_NAMESPACE,
                batch_key=record.submission.batch_key,
                queued_at=0.0,
            )
            for record in records
        ]
        for attempt in self.gate.hold(SPEC, attempts, 0.0):
            assert attempt.ref.attempt_no > 1
            self.through[attempt.ref.task_id] = attempt.ref.attempt_no

    def end(self, state: AttemptState) -> None:
        """Of the first that went through."""
        task_id = next(iter(self.through))
        ref = AttemptRef(task_id, 0, self.through.pop(task_id))
        sample = done_sample(
            task_id=task_id, outcome=Outcome.SOLVED if state is AttemptState.SUCCEEDED else Outcome.ABORTED
        )
        self.tell(StartAttempt(ref, "", (), 0.0))
        self.tell(EndAttempt(ref, state, (sample,), "", 0.0))
        record = self.ledger.state.task(task_id)
        if record is not None:
            self.through[task_id] = record.subtasks[0].attempt_no

    def update(self, version: str) -> None:
        self.tell(ChangeWeights(("student",), version, is_confirmed=True, unix_seconds=0.0))


def test_aborted_batches_do_not_pile_up_behind_a_closed_gate() -> None:
    gated = Gated()
    gated.submit(0, 4)
    for number in range(1, 200):
        gated.submit(number, 2)
        gated.tell(StopTasks(f"s{number}", (), stop().cause, "", 0.0))
    assert len(gated.through) == 4
    assert gated.held_places < 150
    held = [attempt.ref for _, batch in gated.gate.held(DEFAULT_NAMESPACE) for attempt in batch.attempts]
    assert not any(map(gated.ledger.state.is_waiting, held))


def test_what_is_held_goes_by_batch_id_and_then_as_it_came() -> None:
    gated = Gated()
    gated.submit(0, 4)
    gated.submit(7, 1)
    gated.submit("other", 1)
    gated.submit(3, 2)
    gated.submit("3/eval", 1)
    gated.submit(5, 1)
    order = ["s3", "s3", "s3/eval", "s5", "s7", "sother"]
    held = [batch for _, batch in sorted(gated.gate.held(DEFAULT_NAMESPACE), key=lambda place: place[0])]
    assert [batch.submission_id for batch in held] == order
    task_ids = [batch.attempts[0].ref.task_id for batch in held]
    assert task_ids[:2] == sorted(task_ids[:2]), "of one batch id, as they came"
    for number in range(1, 4):
        before = set(gated.through)
        for _ in range(2):
            gated.end(AttemptState.SUCCEEDED)
        gated.update(f"v{number}")
        assert set(gated.through) - before == set(task_ids[2 * number - 2 : 2 * number])


batch_ids: st.SearchStrategy[list[BatchId]] = st.lists(
    st.sampled_from([1, "1/a", "1/b", "1/eval", 2, 10, "x", "y"]), max_size=12
)


@given(batch_ids)
def test_the_same_batches_stand_in_one_order_before_the_gate_and_in_the_queue(coming: list[BatchId]) -> None:
    gated, queue = Gated(), ReadyQueue(OneKindOfRoom(), max_bypass=8)
    gated.submit(0, 4)
    came = []
    for batch_id in coming:
        known = set(gated.held_order)
        gated.submit(batch_id, 1)
        came += [held for held in gated.held_order if held not in known]
    batches = {batch.attempts[0].ref.task_id: batch for _, batch in gated.gate.held(DEFAULT_NAMESPACE)}
    for task_id in came:
        queue.push(SPEC, batches[task_id].attempts, 0.0)
    served = []
    while isinstance(entry := queue.offer(0.0), ReadyBatch):
        queue.admit(entry, 0.0)
        served.append(entry.attempts[0].ref.task_id)
    assert gated.held_order == served
    assert len(served) == len(coming)


def test_what_comes_when_nothing_of_its_batch_is_held_any_more_stands_behind_what_is() -> None:
    gated = Gated()
    gated.submit(0, 4)
    gated.submit("1/a", 1)
    gated.submit("1/b", 1)
    gated.end(AttemptState.SUCCEEDED)
    gated.end(AttemptState.SUCCEEDED)
    gated.update("v1")
    assert gated.held_order == []
    gated.submit("1/b", 1)
    gated.submit("1/a", 1)
    assert gated.held_order == ["s1/b-1", "s1/a-1"]


def test_it_has_no_say_in_evals_and_other_namespaces() -> None:
    gated = Gated()
    assert gated.gate.held("other") == []
    assert gated.gate.reason("other") == ""


def test_what_was_begun_before_a_restart_goes_on_although_more_is_accepted_than_the_rule_admits() -> None:
    """A batch goes through whole, so the last of it may end beyond the limit; the step may be waiting for just that."""
    gated = Gated()
    accept = AcceptTasks("r", b"", SubmissionKey(0), (task(max_failure_retries=1),) * 6, "s", 0.0)
    (accepted,) = gated.tell(accept)
    assert isinstance(accepted, TasksAccepted)
    records = [gated.ledger.state.open_task(each.task_id) for each in accepted.tasks]
    gated.hold(*records[:5])
    gated.hold(records[5])
    gated.let_go()
    assert len(gated.through) == 5, "one more than the limit of four, and then no other"
    for _ in range(4):
        gated.end(AttemptState.SUCCEEDED)
    gated.tell(StartAttempt(AttemptRef(records[4].task_id, 0, 1), "", (), 0.0))
    gated.tell(InterruptAttempt(AttemptRef(records[4].task_id, 0, 1), 0.0))

    again = Gated()
    for event in gated.events:
        again.take(event)
    again.hold(*(again.ledger.state.open_task(record.task_id) for record in records[4:]))
    again.let_go()
    assert again.through == {records[4].task_id: 2}
    again.end(AttemptState.SUCCEEDED)
    assert (again.window.accepted, again.gate._trainings[DEFAULT_NAMESPACE].running) == (5, 0)


actions = st.one_of(
    st.tuples(st.just("submit"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["succeed", "fail", "abort", "update", "abort_submission"]), st.integers(0, 5)),
)


@given(st.lists(actions, max_size=60))
def test_over_any_history_what_goes_through_is_what_the_rule_admits_and_a_restart_knows_as_much(
    history: list[tuple[str, int]],
) -> None:
    gated = Gated()
    for number, (action, argument) in enumerate(history):
        if action == "submit":
            gated.submit(number, argument)
        elif action == "update":
            gated.update(f"v{number}")
        elif action == "abort_submission":
            open_submissions = gated.ledger.state.open_submissions()
            if open_submissions:
                chosen = open_submissions[argument % len(open_submissions)]
                waiting = [task_id for task_id in chosen.open_tasks if task_id not in gated.through]
                if waiting:
                    gated.tell(StopTasks(chosen.submission_id, tuple(waiting), stop().cause, "", 0.0))
        elif gated.through:
            states = {"succeed": AttemptState.SUCCEEDED, "fail": AttemptState.FAILED, "abort": AttemptState.ABORTED}
            gated.end(states[action])
        running = len(gated.through)
        held = gated.ledger.state.open_tasks - running
        assert not (held and gated.window.admits(running)), "nothing waits that the rule admits"
        assert running + gated.window.accepted <= gated.window.limit

    again = Gated()
    for event in gated.events:
        again.take(event)
    for name in ("accepted", "epoch", "epoch_at_resume"):
        assert getattr(again.window, name) == getattr(gated.window, name)
    for submission in again.ledger.state.open_submissions():
        for record in submission.open_tasks.values():
            again.hold(record)
    again.let_go()
    room = gated.window.limit - gated.window.accepted
    assert len(again.through) == min(room, gated.ledger.state.open_tasks)
