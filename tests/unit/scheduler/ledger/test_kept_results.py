"""Whatever is accepted, ended, stopped, collected, acknowledged and discarded in whatever order: each result is handed
out once, what is kept is what is counted, and the same events make the same state again.
"""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.events import Event, ResultsCollected, StopCause, TaskDone, TasksAccepted
from py_scheduler.domain.results import AttemptState
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.scheduler.ledger.commands import (
    AcceptTasks,
    AcknowledgeResults,
    CollectResults,
    Command,
    DiscardResults,
    StopTasks,
)
from py_scheduler.scheduler.ledger.kept_results import result_size
from py_scheduler.scheduler.ledger.ledger import Ledger
from tests.support.journal.ledger_driver import end, start, task

operations = st.lists(
    st.tuples(
        st.sampled_from(["accept", "succeed", "fail", "stop", "stop and keep", "collect", "acknowledge", "discard"]),
        st.integers(0, 3),
    ),
    max_size=40,
)


class Trainer:
    """Tells a ledger what a trainer and its runners might, under one batch_id and in any order."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.events: list[Event] = []
        self._numbers = itertools.count()
        self._open: list[str] = []
        self._unacknowledged: list[str] = []

    def do(self, what: str, number: int) -> None:
        submission = self.ledger.state.submission_of_key(SubmissionKey(7))
        if what == "accept":
            name = f"r{next(self._numbers)}"
            tasks = tuple(task(2) for _ in range(number + 1))
            self.tell(AcceptTasks(name, b"d", SubmissionKey(7), tasks, f"s{name}", 1.0, is_collected=True))
        elif submission is None:
            return
        elif what in {"succeed", "fail"} and submission.open_tasks:
            open_ids = list(submission.open_tasks)
            task_id = open_ids[number % len(open_ids)]
            record = submission.open_tasks[task_id]
            subtask_no = next(no for no, part in enumerate(record.subtasks) if part.state is AttemptState.QUEUED)
            self.tell(start(task_id, subtask_no))
            state = AttemptState.SUCCEEDED if what == "succeed" else AttemptState.FAILED
            self.tell(end(task_id, state, subtask_no))
        elif what in {"stop", "stop and keep"}:
            keeps = what == "stop and keep"
            self.tell(StopTasks(submission.submission_id, (), StopCause.REQUEST, "enough", 1.0, keeps))
        elif what == "collect":
            name = f"c{next(self._numbers)}"
            if self.tell(CollectResults(submission.submission_id, name, number or None, (), (), 1.0)):
                self._unacknowledged.append(name)
        elif what == "acknowledge" and self._unacknowledged:
            self.tell(AcknowledgeResults("default", self._unacknowledged.pop(0), 1.0))
        elif what == "discard":
            self.tell(DiscardResults(submission.submission_id, 1.0))

    def tell(self, command: Command) -> list[Event]:
        events = self.ledger.decide(command)
        for event in events:
            self.ledger.apply(event)
        self.events += events
        return events


def kept_of(ledger: Ledger) -> dict[str, object]:
    return {submission_id: record.kept for submission_id, record in ledger._submissions.items()}


@given(operations)
def test_each_result_is_handed_out_once_and_what_is_kept_is_counted(steps: list[tuple[str, int]]) -> None:
    trainer = Trainer()
    for what, number in steps:
        trainer.do(what, number)
        ledger = trainer.ledger
        size = 0
        for record in ledger._submissions.values():
            kept = record.kept
            results = [
                *kept.collectable.values(),
                *(result for collected in kept.unacknowledged.values() for result in collected.results),
            ]
            assert kept.size == sum(map(result_size, results))
            assert kept.open_tasks == len(record.open_tasks)
            assert len({result.task_id for result in results}) == len(results)
            assert not {result.task_id for result in results} & set(record.open_tasks)
            size += kept.size
        assert ledger.state.results.kept_bytes == size
    accepted = [one.task_id for event in trainer.events if isinstance(event, TasksAccepted) for one in event.tasks]
    done = [event.task_id for event in trainer.events if isinstance(event, TaskDone)]
    handed_out = [
        task_id for event in trainer.events if isinstance(event, ResultsCollected) for task_id in event.task_ids
    ]
    assert len(set(accepted)) == len(accepted)
    assert len(set(handed_out)) == len(handed_out)
    assert set(handed_out) <= set(done) <= set(accepted)


@given(operations)
def test_the_same_events_make_the_same_state_again(steps: list[tuple[str, int]]) -> None:
    trainer = Trainer()
    for what, number in steps:
        trainer.do(what, number)
    again = Ledger()
    for event in trainer.events:
        again.apply(event)
    assert kept_of(again) == kept_of(trainer.ledger)
    assert again.state.results.kept_bytes == trainer.ledger.state.results.kept_bytes
    assert again.state.history == trainer.ledger.state.history
    adopted = Ledger()
    for record in trainer.ledger._submissions.values():
        adopted.state.results.adopt(record)
    assert adopted.state.results.kept_bytes == trainer.ledger.state.results.kept_bytes


@given(operations)
def test_a_batch_id_names_a_new_submission_exactly_when_the_last_one_is_drained(steps: list[tuple[str, int]]) -> None:
    trainer = Trainer()
    for what, number in steps:
        before = trainer.ledger.state.submission_of_key(SubmissionKey(7))
        was_open = before is not None and not before.is_over
        trainer.do(what, number)
        after = trainer.ledger.state.submission_of_key(SubmissionKey(7))
        if what == "accept" and before is not None:
            assert (after is before) == was_open
