"""SubTasks of several samples: their commit unit, retry budgets, quarantine, fencing."""

from __future__ import annotations

import msgspec
import pytest

from py_scheduler.domain.events import AttemptEnded, AttemptRef
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, TaskState
from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from py_scheduler.scheduler.ledger.commands import EndAttempt
from tests.support.journal.ledger_driver import Driver, accept, start, stop


def subtasks(repeat_times: int, size: int | None, *, keeps_partial: bool = False, **retry: int) -> Task:
    config = TaskConfig(
        task_type="agent",
        repeat_times=repeat_times,
        max_samples_per_subtask=size,
        keeps_partial=keeps_partial,
        retry=RetryPolicy(**retry),
    )
    return Task(config=config)


def sample(number: int, attempt_no: int = 1, *, error: str = "") -> SampleDone:
    outcome = Outcome.INFRA_OTHER if error else Outcome.SOLVED
    return SampleDone(task_id="s-0", sample_no=number, attempt_no=attempt_no, outcome=outcome, error=error)


def end(
    state: AttemptState,
    *samples: SampleDone,
    subtask_no: int = 0,
    attempt_no: int = 1,
    payload: bytes = b"",
) -> EndAttempt:
    message = "" if state is AttemptState.SUCCEEDED else "because"
    return EndAttempt(AttemptRef("s-0", subtask_no, attempt_no), state, samples, message, 3.0, True, payload, 2.0)


def ended_of(events: list[object]) -> AttemptEnded:
    (event,) = [event for event in events if isinstance(event, AttemptEnded)]
    return event


@pytest.mark.parametrize(
    ("repeat_times", "size", "ranges"),
    [
        (3, 1, [(0, 1), (1, 1), (2, 1)]),
        (5, 2, [(0, 2), (2, 2), (4, 1)]),
        (4, None, [(0, 4)]),
        (2, 8, [(0, 2)]),
    ],
)
def test_a_task_is_split_as_its_config_says(repeat_times: int, size: int | None, ranges: list[tuple[int, int]]) -> None:
    task = subtasks(repeat_times, size)
    driver = Driver(accept(task))
    record = driver.ledger.state.open_task("s-0")
    assert [(subtask.first_sample_no, subtask.sample_count) for subtask in record.subtasks] == ranges
    assert task.config.subtask_count == len(ranges)


def test_what_a_failed_attempt_made_is_nowhere_and_what_the_next_made_is_published() -> None:
    driver = Driver(accept(subtasks(2, 2, max_failure_retries=1)), start("s-0"))
    first = ended_of(
        driver.tell(end(AttemptState.FAILED, sample(0), sample(1, error="x"), payload=b"experiences of attempt 1"))
    )
    assert (first.samples, first.payload, first.next_attempt_no) == ((), b"", 2)
    driver.tell(start("s-0", attempt_no=2))
    second = ended_of(
        driver.tell(end(AttemptState.SUCCEEDED, sample(0, 2), sample(1, 2), attempt_no=2, payload=b"of attempt 2"))
    )
    assert [done.attempt_no for done in second.samples] == [2, 2]
    assert second.payload == b"of attempt 2"
    assert driver.done()[0].state is TaskState.SUCCEEDED


def test_a_subtask_that_fails_for_good_publishes_no_success_and_no_payload() -> None:
    driver = Driver(accept(subtasks(2, 2)), start("s-0"))
    event = ended_of(driver.tell(end(AttemptState.FAILED, sample(0), sample(1, error="x"), payload=b"half")))
    assert event.payload == b""
    assert [done.is_scored for done in event.samples] == [False, False]
    assert event.samples[1].error == "x"
    (done,) = driver.done()
    assert (done.state, sum(done.outcomes.values())) == (TaskState.FAILED, 2)


def test_partial_collection_keeps_what_succeeded_and_does_not_try_again() -> None:
    driver = Driver(accept(subtasks(3, 3, keeps_partial=True, max_failure_retries=5)), start("s-0"))
    event = ended_of(
        driver.tell(end(AttemptState.FAILED, sample(0), sample(1, error="x"), sample(2), payload=b"two of three"))
    )
    assert (event.next_attempt_no, event.payload) == (0, b"two of three")
    assert [done.is_scored for done in event.samples] == [True, False, True]
    (done,) = driver.done()
    assert (done.state, done.outcomes) == (TaskState.PARTIAL, {Outcome.SOLVED: 2, Outcome.INFRA_OTHER: 1})


def test_partial_collection_tries_again_what_has_no_success() -> None:
    driver = Driver(accept(subtasks(2, 2, keeps_partial=True, max_failure_retries=1)), start("s-0"))
    assert ended_of(driver.tell(end(AttemptState.FAILED, sample(0, error="x")))).next_attempt_no == 2


def test_one_budget_counts_failures_timeouts_and_losses_together() -> None:
    driver = Driver(accept(subtasks(2, 2, max_retries=3, max_failure_retries=0, max_loss_retries=0)))
    states = [AttemptState.FAILED, AttemptState.LOST, AttemptState.TIMED_OUT, AttemptState.FAILED]
    following = []
    for attempt_no, state in enumerate(states, 1):
        driver.tell(start("s-0", attempt_no=attempt_no))
        following.append(ended_of(driver.tell(end(state, attempt_no=attempt_no))).next_attempt_no)
    assert following == [2, 3, 4, 0]
    assert driver.done()[0].state is TaskState.FAILED


def test_a_task_that_kills_its_worker_three_times_is_quarantined_and_says_so() -> None:
    driver = Driver(accept(subtasks(1, 1)))
    following = []
    for attempt_no in (1, 2, 3):
        driver.tell(start("s-0", attempt_no=attempt_no))
        following.append(ended_of(driver.tell(end(AttemptState.LOST, attempt_no=attempt_no))).next_attempt_no)
    assert following == [2, 3, 0]
    assert driver.done()[0].reason == "quarantined, it lost its worker 3 times: because"


def test_a_late_report_of_attempt_1_after_attempt_2_began_changes_nothing() -> None:
    driver = Driver(accept(subtasks(2, 2, max_retries=1)), start("s-0"))
    driver.tell(end(AttemptState.TIMED_OUT))
    driver.tell(start("s-0", attempt_no=2))
    before = msgspec.structs.asdict(driver.ledger.state.open_task("s-0").subtasks[0])
    assert driver.tell(end(AttemptState.SUCCEEDED, sample(0), sample(1), payload=b"late")) == []
    assert msgspec.structs.asdict(driver.ledger.state.open_task("s-0").subtasks[0]) == before
    event = ended_of(driver.tell(end(AttemptState.SUCCEEDED, sample(0, 2), sample(1, 2), attempt_no=2)))
    assert [done.attempt_no for done in event.samples] == [2, 2]


def test_of_a_stopped_task_the_whole_subtasks_stay_and_the_cut_one_does_not() -> None:
    driver = Driver(accept(subtasks(4, 2)), start("s-0"), start("s-0", 1))
    driver.tell(end(AttemptState.SUCCEEDED, sample(0), sample(1)))
    driver.tell(stop())
    event = ended_of(driver.tell(end(AttemptState.ABORTED, sample(2), subtask_no=1)))
    assert [done.is_scored for done in event.samples] == [False, False]
    (done,) = driver.done()
    assert (done.state, done.outcomes[Outcome.SOLVED]) == (TaskState.ABORTED, 2)
