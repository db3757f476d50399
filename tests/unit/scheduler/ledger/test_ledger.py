"""The ledger's invariants: by example for each rule, and over random sequences of commands for all of them at once."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.domain.events import AbortRequested, AttemptEnded, AttemptRef, AttemptStarted, StopCause, TaskDone
from py_scheduler.domain.results import AttemptState, Outcome, TaskState
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError
from py_scheduler.scheduler.ledger.commands import (
    AcceptTasks,
    Command,
    EndAttempt,
    InterruptAttempt,
    LeaseAttempts,
    StartAttempt,
    StopTasks,
)
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.snapshots import snapshot_of, submission_of
from tests.support.journal.ledger_driver import Driver, accept, end, grouped, infra, score, start, stop, task


def test_a_task_ends_once_after_its_last_sample() -> None:
    driver = Driver(accept(task(repeat_times=2)), start("s-0", 0), start("s-0", 1))
    assert driver.done() == []
    driver.tell(end("s-0", AttemptState.SUCCEEDED, 1))
    assert driver.done() == []
    driver.tell(end("s-0", AttemptState.SUCCEEDED, 0))
    (done,) = driver.done()
    assert (done.state, done.planned_samples, done.outcomes) == (TaskState.SUCCEEDED, 2, {Outcome.SOLVED: 2})
    assert driver.ledger.state.open_tasks == 0


def test_a_failure_without_budget_gives_the_sample_an_outcome_and_the_task_a_reason() -> None:
    driver = Driver(accept(task()), start("s-0"), end("s-0", AttemptState.FAILED))
    ended, done = driver.events[-2:]
    assert isinstance(ended, AttemptEnded)
    assert [sample.outcome for sample in ended.samples] == [Outcome.INFRA_OTHER]
    assert isinstance(done, TaskDone)
    assert (done.state, done.reason) == (TaskState.FAILED, "because")


def test_some_samples_make_a_partial_task() -> None:
    driver = Driver(
        accept(task(repeat_times=2)),
        start("s-0", 0),
        start("s-0", 1),
        end("s-0", AttemptState.SUCCEEDED, 0),
        end("s-0", AttemptState.TIMED_OUT, 1),
    )
    (done,) = driver.done()
    assert done.state is TaskState.PARTIAL
    assert done.outcomes == {Outcome.SOLVED: 1, Outcome.AGENT_TIMEOUT: 1}


@pytest.mark.parametrize(
    ("state", "retry", "attempts"),
    [
        (AttemptState.FAILED, {"max_failure_retries": 2}, 3),
        (AttemptState.TIMED_OUT, {"max_failure_retries": 1}, 2),
        (AttemptState.LOST, {"max_loss_retries": 2}, 3),
        (AttemptState.LOST, {"max_loss_retries": 0}, 1),
        (AttemptState.FAILED, {}, 1),
        (AttemptState.ABORTED, {"max_failure_retries": 5, "max_loss_retries": 5}, 1),
    ],
)
def test_retry_budgets(state: AttemptState, retry: dict[str, Any], attempts: int) -> None:
    driver = Driver(accept(task(**retry)))
    for attempt_no in range(1, attempts + 1):
        assert driver.done() == []
        assert driver.tell(start("s-0", attempt_no=attempt_no))
        driver.tell(end("s-0", state, attempt_no=attempt_no))
    assert len(driver.done()) == 1
    ended = [event for event in driver.events if isinstance(event, AttemptEnded)]
    assert [event.next_attempt_no for event in ended] == [*range(2, attempts + 1), 0]
    assert [len(event.samples) for event in ended] == [0] * (attempts - 1) + [1]


def test_a_late_report_of_an_earlier_attempt_changes_nothing() -> None:
    driver = Driver(
        accept(task(max_failure_retries=1)),
        start("s-0"),
        end("s-0", AttemptState.FAILED),
        start("s-0", attempt_no=2),
    )
    assert driver.tell(end("s-0", AttemptState.SUCCEEDED, attempt_no=1)) == []
    driver.tell(end("s-0", AttemptState.SUCCEEDED, attempt_no=2))
    assert [done.state for done in driver.done()] == [TaskState.SUCCEEDED]
    assert driver.tell(end("s-0", AttemptState.SUCCEEDED, attempt_no=2)) == []


def test_an_attempt_starts_once() -> None:
    driver = Driver(accept(task()))
    assert len(driver.tell(start("s-0"))) == 1
    assert driver.tell(start("s-0")) == []
    assert driver.tell(start("s-0", attempt_no=2)) == []
    assert driver.tell(start("unknown")) == []


def test_a_stop_ends_what_waits_now_and_what_runs_with_its_report() -> None:
    driver = Driver(accept(task(), task(repeat_times=2)), start("s-1", 0))
    events = driver.tell(stop())
    assert isinstance(events[0], AbortRequested)
    assert events[0].task_ids == ("s-0", "s-1")
    assert [done.task_id for done in driver.done()] == ["s-0"]
    assert driver.tell(start("s-1", 1)) == [], "a stopped task starts nothing"
    driver.tell(end("s-1", AttemptState.ABORTED, 0))
    assert [(done.task_id, done.state, done.reason) for done in driver.done()] == [
        ("s-0", TaskState.ABORTED, "stop it"),
        ("s-1", TaskState.ABORTED, "stop it"),
    ]
    assert driver.done()[1].outcomes == {Outcome.ABORTED: 2}
    assert driver.tell(stop()) == []


def test_a_task_named_twice_is_stopped_once() -> None:
    driver = Driver(accept(task(), task()))
    driver.tell(stop("s-0", "s-0", "s-1"))
    assert [done.task_id for done in driver.done()] == ["s-0", "s-1"]
    assert driver.ledger.state.last_sequence == len(driver.events)


def test_no_attempt_follows_one_whose_handler_may_still_be_at_work() -> None:
    driver = Driver(accept(task(max_failure_retries=3)), start("s-0"))
    driver.tell(EndAttempt(AttemptRef("s-0", 0, 1), AttemptState.TIMED_OUT, (), "stuck", 3.0, is_stop_confirmed=False))
    assert [done.reason for done in driver.done()] == ["stuck"]


def test_a_restart_takes_no_retry() -> None:
    driver = Driver(accept(task(max_loss_retries=0)), start("s-0"))
    for attempt_no in (1, 2, 3):
        (ended,) = driver.tell(InterruptAttempt(AttemptRef("s-0", 0, attempt_no), 5.0))
        assert isinstance(ended, AttemptEnded)
        assert ended.next_attempt_no == attempt_no + 1
        driver.tell(start("s-0", attempt_no=attempt_no + 1))
    driver.tell(stop("s-0"))
    driver.tell(InterruptAttempt(AttemptRef("s-0", 0, 4), 6.0))
    assert [done.state for done in driver.done()] == [TaskState.ABORTED]


def test_a_stopped_task_is_not_retried() -> None:
    driver = Driver(accept(task(max_failure_retries=3)), start("s-0"), stop("s-0"))
    driver.tell(end("s-0", AttemptState.FAILED))
    assert len(driver.done()) == 1


def test_what_succeeded_before_the_stop_arrived_counts_as_succeeded() -> None:
    driver = Driver(accept(task()), start("s-0"), stop("s-0"), end("s-0", AttemptState.SUCCEEDED))
    assert [done.state for done in driver.done()] == [TaskState.SUCCEEDED]


def test_a_task_deadline_is_a_failure_not_an_abort() -> None:
    driver = Driver(accept(task()), stop("s-0", cause=StopCause.TASK_DEADLINE))
    (done,) = driver.done()
    assert (done.state, done.outcomes) == (TaskState.FAILED, {Outcome.AGENT_TIMEOUT: 1})


def test_a_request_id_runs_once_and_only_with_the_same_content() -> None:
    driver = Driver(accept(task()))
    assert driver.tell(accept(task())) == []
    with pytest.raises(AlreadyExistsError, match="request_id 'r'"):
        driver.tell(accept(task(), digest=b"other"))
    request = driver.ledger.state.requests.find("default", "r")
    assert request is not None
    assert (request.submission_id, request.task_ids, request.before_sequence) == ("s", ("s-0",), 0)


def test_calls_under_one_key_make_one_submission_with_unique_task_ids() -> None:
    driver = Driver(accept(task(), task()), accept(task(), request_id="r2"))
    request = driver.ledger.state.requests.find("default", "r2")
    assert request is not None
    assert request.task_ids == ("s-2",)


def test_client_keys_are_unique_among_live_tasks() -> None:
    driver = Driver(accept(task(client_key="a")))
    with pytest.raises(
        AlreadyExistsError, match=r"tasks\[0\].client_key: 'a' belongs .* in namespace .* take another key"
    ):
        driver.tell(accept(task(client_key="a"), request_id="r2"))
    with pytest.raises(InvalidArgumentError, match="stands twice"):
        driver.tell(accept(task(client_key="b"), task(client_key="b"), request_id="r2"))
    assert driver.ledger.state.open_tasks == 1, "a refused call leaves nothing behind"
    driver.tell(stop())
    assert driver.tell(accept(task(client_key="a"), request_id="r3"))


def test_finished_submissions_are_forgotten_beyond_the_limit() -> None:
    ledger = Ledger(retained_submissions=2)
    for step in range(5):
        command = AcceptTasks(f"r{step}", b"d", SubmissionKey(step), (task(),), f"s{step}", 1.0)
        for event in ledger.decide(command):
            ledger.apply(event)
        for event in ledger.decide(StopTasks(f"s{step}", (), StopCause.REQUEST, "", 1.0)):
            ledger.apply(event)
    assert [ledger.state.submission(f"s{step}") is None for step in range(5)] == [True, True, True, False, False]
    assert ledger.state.requests.find("default", "r0") is None
    assert ledger.state.requests.find("default", "r4") is not None
    assert ledger.decide(StopTasks("s0", (), StopCause.REQUEST, "", 1.0, request_id="a")) == [], "too late"


refs = st.builds(AttemptRef, st.sampled_from(["s-0", "s-1", "s-2"]), st.integers(0, 1), st.integers(1, 3))
ended_states = st.sampled_from(
    [AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.TIMED_OUT, AttemptState.ABORTED, AttemptState.LOST]
)
commands = st.lists(
    st.one_of(
        st.builds(lambda some, back: LeaseAttempts(tuple(some), back), st.lists(refs, max_size=3), st.booleans()),
        refs.map(lambda ref: InterruptAttempt(ref, 2.0)),
        refs.map(lambda ref: StartAttempt(ref, "n", (), 2.0)),
        st.builds(lambda ref, state: end(ref.task_id, state, ref.subtask_no, ref.attempt_no), refs, ended_states),
        refs.map(lambda ref: infra(ref.task_id, ref.subtask_no, ref.attempt_no)),
        st.builds(
            lambda task_id, error: score(task_id, 0.5, 0.5, error=error),
            st.sampled_from(["s-0", "s-1", "s-2"]),
            st.sampled_from(["", "eval_group: broken"]),
        ),
        st.lists(st.sampled_from(["s-0", "s-1", "s-2"]), min_size=1, max_size=3).map(lambda some: stop(*some)),
    ),
    max_size=60,
)


@settings(max_examples=300, deadline=None)
@given(commands)
def test_any_sequence_of_commands_keeps_the_invariants(sequence: list[Command]) -> None:
    tasks = (
        task(2, max_failure_retries=1, max_loss_retries=1, max_infra_refills=1),
        grouped(2, max_infra_refills=2),
        task(2, max_failure_retries=2),
    )
    driver = Driver(accept(*tasks))
    for command in sequence:
        driver.tell(command)
    _assert_groups_keep_their_samples(driver)
    running: set[tuple[str, int]] = set()
    for event in driver.events:
        if isinstance(event, AttemptStarted):
            assert (event.task_id, event.subtask_no) not in running
            running.add((event.task_id, event.subtask_no))
        elif isinstance(event, AttemptEnded):
            running.discard((event.task_id, event.subtask_no))
    driver.tell(stop())
    for task_id, subtask_no in running:
        attempts = [e for e in driver.events if isinstance(e, AttemptStarted) and e.task_id == task_id]
        last = max(e.attempt_no for e in attempts if e.subtask_no == subtask_no)
        driver.tell(end(task_id, AttemptState.ABORTED, subtask_no, last))
    assert Counter(done.task_id for done in driver.done()) == {"s-0": 1, "s-1": 1, "s-2": 1}
    samples = Counter(
        (sample.task_id, sample.sample_no)
        for event in driver.events
        if isinstance(event, AttemptEnded)
        for sample in event.samples
    )
    assert samples == {(f"s-{number}", sample_no): 1 for number in range(3) for sample_no in range(2)}
    submission = driver.ledger.state.submission("s")
    assert submission is not None
    assert not any(
        submission.attempts_in[state] for state in (AttemptState.QUEUED, AttemptState.LEASED, AttemptState.RUNNING)
    )
    assert all(done.task_id == "s-1" or not done.rewards for done in driver.done())
    _assert_folding_gives_the_same_state(driver)


def _assert_groups_keep_their_samples(driver: Driver) -> None:
    final = [
        sample
        for event in driver.events
        if isinstance(event, AttemptEnded) and event.task_id == "s-1"
        for sample in event.samples
    ]
    record = driver.ledger.state.task("s-1")
    if record is not None:
        assert record.group_samples == final
        assert not record.awaits_group_score or any(sample.outcome is Outcome.SOLVED for sample in final)
    for task_id in ("s-0", "s-2"):
        other = driver.ledger.state.task(task_id)
        assert other is None or (other.group_samples is None and not other.awaits_group_score)
    _assert_folding_gives_the_same_state(driver)


def _assert_folding_gives_the_same_state(driver: Driver) -> None:
    """From the first event on, and from a snapshot of anywhere in between."""
    again = Ledger()
    for event in driver.events:
        again.apply(event)  # type: ignore[arg-type]
    _assert_same_state(again, driver)
    cut = 1 + len(driver.events) // 2
    first = Ledger()
    for event in driver.events[:cut]:
        first.apply(event)  # type: ignore[arg-type]
    (submission,) = first.state.submissions()
    restored = Ledger()
    restored.adopt([submission_of(snapshot_of(submission, first.state))])
    restored.skip_to(first.state.last_sequence)
    for event in driver.events[cut:]:
        restored.apply(event)  # type: ignore[arg-type]
    _assert_same_state(restored, driver)
    assert restored.state.open_samples == driver.ledger.state.open_samples


_WAITS = {AttemptState.LEASED: AttemptState.QUEUED}
"""A snapshot knows no lease: what was leased waits again."""


def _unleased(attempts_in: dict[AttemptState, int]) -> Counter[AttemptState]:
    counts: Counter[AttemptState] = Counter()
    for state, count in attempts_in.items():
        counts[_WAITS.get(state, state)] += count
    return counts


def _assert_same_state(again: Ledger, driver: Driver) -> None:
    assert again.state.last_sequence == driver.ledger.state.last_sequence
    assert again.state.open_tasks == driver.ledger.state.open_tasks
    left, right = again.state.submission("s"), driver.ledger.state.submission("s")
    assert left is not None
    assert right is not None
    for field in ("done_tasks", "client_keys", "requests", "next_task_no", "key", "last_sequence"):
        assert getattr(left, field) == getattr(right, field)
    assert _unleased(left.attempts_in) == _unleased(right.attempts_in)
    assert again.state.requests.find("default", "r") == driver.ledger.state.requests.find("default", "r")
    for task_id in ("s-0", "s-1", "s-2"):
        record, other = again.state.task(task_id), driver.ledger.state.task(task_id)
        assert (record is None) == (other is None)
        if record is not None and other is not None:
            for one, same in zip(record.subtasks, other.subtasks, strict=True):
                assert _WAITS.get(one.state, one.state) is _WAITS.get(same.state, same.state)
                assert msgspec.structs.replace(one, state=same.state) == same
            for field in ("group_samples", "outcomes", "succeeded_samples", "stop_cause", "iteration"):
                assert getattr(record, field) == getattr(other, field)
