"""A submit whose records were made beforehand comes to what any other one comes to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.events import Moment, TasksAccepted, approximate_size
from py_scheduler.domain.results import AttemptState
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError
from py_scheduler.scheduler.ledger.commands import AcceptTasks, AcknowledgeResults, CollectResults
from py_scheduler.scheduler.ledger.decisions import portions
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.records import SubmissionRecord, TaskRecord
from py_scheduler.scheduler.slices import at_once
from tests.support import strategies
from tests.support.journal.ledger_driver import accept, end, start, stop, task

if TYPE_CHECKING:
    from py_scheduler.domain.task import Task


def tell(ledger: Ledger, *commands: Any) -> list[Any]:
    return [event for command in commands for event in apply(ledger, command)]


def apply(ledger: Ledger, command: Any) -> list[Any]:
    events = ledger.decide(command)
    for event in events:
        ledger.apply(event, "default")
    return list(events)


def prepared(ledger: Ledger, command: AcceptTasks) -> AcceptTasks:
    return at_once(ledger.preparing(command))


def state_of(ledger: Ledger) -> list[Any]:
    """All of it that a submit changes."""
    state = ledger.state
    counts = state.open_tasks, state.open_samples, state.open_tasks_in("default"), state.last_sequence
    return [counts, [parts_of(submission) for submission in state.submissions()]]


def parts_of(submission: SubmissionRecord) -> list[Any]:
    """Of a submission and its tasks, all but that these lead back to it."""
    plain = {name: getattr(submission, name) for name in SubmissionRecord.__slots__ if name != "open_tasks"}
    fields = [name for name in TaskRecord.__struct_fields__ if name != "submission"]
    tasks = submission.open_tasks.values()
    assert all(record.submission is submission for record in tasks)
    return [plain, [{name: getattr(record, name) for name in fields} for record in tasks]]


@given(
    calls=st.lists(st.lists(strategies.tasks, min_size=1, max_size=4), min_size=1, max_size=3),
    is_collected=st.booleans(),
    group_scored=st.booleans(),
)
def test_the_same_events_and_the_same_state(calls: list[list[Task]], is_collected: bool, group_scored: bool) -> None:
    one, other = Ledger(), Ledger()
    for number, drawn in enumerate(calls):
        tasks = [msgspec.structs.replace(task, client_key="") for task in drawn]
        types = frozenset({tasks[0].config.task_type} if group_scored else ())
        command = msgspec.structs.replace(
            accept(*tasks, request_id=str(number)),
            is_collected=is_collected,
            group_scored=types,
            moment=Moment(b"boot", 3.0),
            warnings=("mind",),
        )
        ready = prepared(other, command)
        assert ready.prepared is not None
        (event,) = apply(one, command)
        assert apply(other, ready) == [event]
        assert ready.prepared.size == approximate_size(event)
        assert ready.prepared.samples == sum(task.config.repeat_times for task in tasks)
    assert state_of(one) == state_of(other)


def test_nothing_is_there_before_it_is_decided() -> None:
    ledger = Ledger()
    prepared(ledger, accept(*[task()] * 3))
    assert state_of(ledger) == state_of(Ledger())


def test_what_came_in_between_makes_it_decide_anew() -> None:
    ledger = Ledger()
    tell(ledger, accept(task(), request_id="a"))
    ready = prepared(ledger, accept(task(), task(), request_id="b"))
    tell(ledger, accept(task(), request_id="c"))
    (event,) = tell(ledger, ready)
    assert isinstance(event, TasksAccepted)
    assert [accepted.task_id for accepted in event.tasks] == ["s-2", "s-3"]
    assert ledger.state.open_tasks == 4
    assert len(ledger.state.submission("s").open_tasks) == 4  # type: ignore[union-attr]


def test_a_submission_that_is_drained_while_it_is_prepared_begins_a_new_one() -> None:
    ledger = Ledger()
    first = msgspec.structs.replace(accept(task(), request_id="a"), is_collected=True)
    tell(ledger, first, start("s-0"), end("s-0", AttemptState.SUCCEEDED))
    command = msgspec.structs.replace(accept(*[task()] * 600, request_id="b"), fresh_submission_id="new")
    preparing = ledger.preparing(command)
    next(preparing)
    tell(ledger, CollectResults("s", "c", None, (), (), 5.0), AcknowledgeResults("default", "c", 6.0))
    ready = at_once(preparing)
    (event,) = tell(ledger, ready)
    assert event.submission_id == "new"
    assert event.tasks is ready.prepared.accepted, "it was prepared again"  # type: ignore[union-attr]
    assert [accepted.task_id for accepted in event.tasks[:2]] == ["new-0", "new-1"]
    assert tell(ledger, msgspec.structs.replace(stop("new-0"), submission_id="new"))


def test_client_keys_are_refused_as_ever() -> None:
    ledger = Ledger()
    tell(ledger, accept(task(client_key="x"), request_id="a"))
    with pytest.raises(AlreadyExistsError, match=r"tasks\[1\].client_key"):
        tell(ledger, prepared(ledger, accept(task(client_key="y"), task(client_key="x"), request_id="b")))
    with pytest.raises(InvalidArgumentError, match="stands twice"):
        tell(ledger, prepared(ledger, accept(task(client_key="y"), task(client_key="y"), request_id="b")))
    assert tell(ledger, prepared(ledger, accept(task(client_key="y"), request_id="b")))
    with pytest.raises(AlreadyExistsError, match=r"tasks\[0\].client_key"):
        tell(ledger, accept(task(client_key="y"), request_id="c"))


@given(repeats=st.lists(st.sampled_from([1, 1, 1, 500, 3_000]), min_size=1, max_size=700))
def test_portions_are_all_of_it_in_order(repeats: list[int]) -> None:
    tasks = [task(count) for count in repeats]
    some = list(portions(tasks))
    assert [begin for begin, _ in some] == [sum(len(part) for _, part in some[:number]) for number in range(len(some))]
    assert [one for _, part in some for one in part] == tasks
    assert all(part for _, part in some)
