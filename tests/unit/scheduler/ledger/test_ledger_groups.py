"""The ledger where groups are scored as a whole, and where attempts are refilled."""

from __future__ import annotations

import msgspec
import pytest

from py_scheduler.domain.events import AttemptEnded, StopCause
from py_scheduler.domain.results import AttemptState, Outcome, TaskState
from py_scheduler.domain.training.iteration import IterationContext
from tests.support.journal.ledger_driver import Driver, accept, end, grouped, infra, score, start, stop, task

# Groups


def played(*states: AttemptState) -> Driver:
    """A task of a group-scoring handler, its samples ended in these states."""
    driver = Driver(accept(grouped(len(states))))
    for number, state in enumerate(states):
        driver.tell(start("s-0", number))
        driver.tell(end("s-0", state, number))
    return driver


def test_a_group_waits_for_its_score_and_then_has_it() -> None:
    driver = played(AttemptState.SUCCEEDED, AttemptState.SUCCEEDED)
    assert driver.done() == []
    record = driver.ledger.state.open_task("s-0")
    assert record.awaits_group_score
    assert [sample.sample_no for sample in record.group_samples or ()] == [0, 1]
    driver.tell(score("s-0", 0.25, 0.75))
    (done,) = driver.done()
    assert (done.state, [reward.score for reward in done.rewards]) == (TaskState.SUCCEEDED, [0.25, 0.75])
    assert driver.ledger.state.open_tasks == 0
    assert driver.tell(score("s-0", 0.0, 0.0)) == [], "the first word on a group counts"


def test_a_group_is_not_scored_before_its_last_sample_and_never_without_one_that_succeeded() -> None:
    driver = Driver(accept(grouped(), grouped()), start("s-0"), end("s-0", AttemptState.SUCCEEDED))
    assert driver.tell(score("s-0", 1.0, 1.0)) == []
    driver.tell(start("s-1"))
    driver.tell(end("s-1", AttemptState.FAILED, 0))
    driver.tell(start("s-1", 1))
    driver.tell(end("s-1", AttemptState.TIMED_OUT, 1))
    assert [(done.task_id, done.state, done.rewards) for done in driver.done()] == [("s-1", TaskState.FAILED, ())]


def test_a_group_of_which_some_failed_is_scored_whole() -> None:
    driver = played(AttemptState.SUCCEEDED, AttemptState.FAILED)
    driver.tell(score("s-0", 1.0, 0.0))
    (done,) = driver.done()
    assert (done.state, len(done.rewards), done.reason) == (TaskState.PARTIAL, 2, "because")


def test_the_groups_score_says_which_samples_are_solved() -> None:
    driver = played(AttemptState.SUCCEEDED, AttemptState.SUCCEEDED, AttemptState.FAILED, AttemptState.TIMED_OUT)
    driver.tell(score("s-0", 0.4, 0.5, 1.0, 1.0, threshold=0.5))
    (done,) = driver.done()
    assert done.group_outcomes == (Outcome.WRONG_ANSWER, Outcome.SOLVED, Outcome.INFRA_OTHER, Outcome.AGENT_TIMEOUT)
    assert done.outcomes == dict.fromkeys(done.group_outcomes, 1), "a score does not mend what broke"


@pytest.mark.parametrize(("given", "outcome"), [(0.0, Outcome.MAX_TURNS), (1.0, Outcome.SOLVED)])
def test_what_the_agent_stopped_for_counts_where_the_group_is_not_solved(given: float, outcome: Outcome) -> None:
    driver = Driver(accept(grouped(1)), start("s-0"))
    played_end = end("s-0", AttemptState.SUCCEEDED)
    sample = msgspec.structs.replace(played_end.samples[0], termination_reason="max_turns")
    driver.tell(msgspec.structs.replace(played_end, samples=(sample,)))
    driver.tell(score("s-0", given))
    assert driver.done()[0].group_outcomes == (outcome,)


def test_a_group_that_cannot_be_scored_is_a_failed_task_with_its_reason() -> None:
    driver = played(AttemptState.SUCCEEDED)
    driver.tell(score("s-0", error="eval_group: ValueError"))
    (done,) = driver.done()
    assert (done.state, done.reason, done.rewards) == (TaskState.FAILED, "eval_group: ValueError", ())
    assert done.outcomes == {Outcome.SOLVED: 1}, "its samples are what they are"


@pytest.mark.parametrize(
    ("cause", "state"),
    [
        (StopCause.REQUEST, TaskState.ABORTED),
        (StopCause.SHUTDOWN, TaskState.ABORTED),
        (StopCause.TASK_DEADLINE, TaskState.FAILED),
    ],
)
def test_a_stop_between_the_last_sample_and_the_score_ends_the_task_once(cause: StopCause, state: TaskState) -> None:
    driver = played(AttemptState.SUCCEEDED, AttemptState.SUCCEEDED)
    driver.tell(stop("s-0", cause=cause))
    driver.tell(score("s-0", 1.0, 1.0))
    assert [(done.state, done.reason, done.rewards) for done in driver.done()] == [(state, "stop it", ())]


def test_what_succeeds_after_the_stop_is_no_group_any_more() -> None:
    driver = Driver(accept(grouped(1)), start("s-0"), stop("s-0"), end("s-0", AttemptState.SUCCEEDED))
    assert [done.state for done in driver.done()] == [TaskState.ABORTED]


def test_samples_are_kept_for_groups_alone() -> None:
    driver = Driver(accept(task(2)), start("s-0"), end("s-0", AttemptState.SUCCEEDED))
    assert driver.ledger.state.open_task("s-0").group_samples is None


def test_the_iteration_stays_with_its_tasks() -> None:
    iteration = IterationContext(rollout_id=3, beta=0.5)
    driver = Driver(msgspec.structs.replace(accept(task()), iteration=iteration))
    assert driver.ledger.state.open_task("s-0").iteration == iteration


# Refills


def test_an_attempt_that_the_infrastructure_failed_is_refilled_without_a_retry() -> None:
    driver = Driver(accept(task(2, max_infra_refills=2)), start("s-0"), start("s-0", 1))
    for attempt_no in (1, 2):
        (ended,) = driver.tell(infra("s-0", attempt_no=attempt_no))
        assert isinstance(ended, AttemptEnded)
        assert (ended.samples, ended.next_attempt_no, ended.is_refill) == ((), attempt_no + 1, True)
        driver.tell(start("s-0", attempt_no=attempt_no + 1))
    subtask = driver.ledger.state.open_task("s-0").subtasks[0]
    assert (subtask.refills, subtask.failures, subtask.losses) == (2, 0, 0)
    assert driver.ledger.state.open_task("s-0").subtasks[1].attempt_no == 1, "its sibling goes on"
    driver.tell(end("s-0", AttemptState.SUCCEEDED, 1))
    assert driver.done() == []
    driver.tell(infra("s-0", attempt_no=3))
    assert [(done.state, done.outcomes) for done in driver.done()] == [
        (TaskState.PARTIAL, {Outcome.SOLVED: 1, Outcome.INFRA_CONN: 1})
    ]


@pytest.mark.parametrize("outcome", [Outcome.AGENT_TIMEOUT, Outcome.CONTEXT_OVERFLOW])
def test_what_the_agent_failed_is_not_refilled(outcome: Outcome) -> None:
    driver = Driver(accept(task(max_infra_refills=5)), start("s-0"), infra("s-0", outcome=outcome))
    assert [done.outcomes for done in driver.done()] == [{outcome: 1}]


def test_refills_come_before_retries_and_each_has_its_own_count() -> None:
    driver = Driver(accept(task(max_infra_refills=1, max_failure_retries=1)))
    kinds = []
    for attempt_no in (1, 2, 3):
        driver.tell(start("s-0", attempt_no=attempt_no))
        ended = driver.tell(infra("s-0", attempt_no=attempt_no))[0]
        assert isinstance(ended, AttemptEnded)
        kinds.append((ended.is_refill, ended.next_attempt_no))
    assert kinds == [(True, 2), (False, 3), (False, 0)]


def test_a_stranded_attempt_is_not_refilled_nor_is_one_of_a_stopped_task() -> None:
    driver = Driver(accept(task(max_infra_refills=5), task(max_infra_refills=5)), start("s-0"), start("s-1"))
    driver.tell(msgspec.structs.replace(infra("s-0"), is_stop_confirmed=False))
    driver.tell(stop("s-1"))
    driver.tell(infra("s-1"))
    assert [done.task_id for done in driver.done()] == ["s-0", "s-1"]
