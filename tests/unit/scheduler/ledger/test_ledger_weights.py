"""Changes of weights as the ledger decides and folds them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.events import TrainingResumed, WeightsChanged
from py_scheduler.scheduler.ledger.commands import ChangeWeights, ResumeTraining
from py_scheduler.scheduler.ledger.ledger import Ledger
from tests.support.journal.ledger_driver import Driver

ALONE = [("student",), ("teacher",)]
TOGETHER = [("student", "teacher")]


def change(version: str, *roles: str, is_confirmed: bool = False) -> ChangeWeights:
    return ChangeWeights(roles or ("student",), version, is_confirmed, 1.0)


def epochs(driver: Driver) -> list[tuple[str, int]]:
    return [(event.weight_version, event.epoch) for event in driver.events if isinstance(event, WeightsChanged)]


def test_first_seen_is_epoch_0_and_every_change_after_it_one_more() -> None:
    driver = Driver(*map(change, ("a", "a", "b", "a", "c", "")), change("a", is_confirmed=True))
    assert epochs(driver) == [("a", 0), ("b", 1), ("c", 2), ("a", 3)]


def test_an_update_of_an_engine_that_never_said_what_it_has_is_a_change() -> None:
    assert epochs(Driver(change("a", is_confirmed=True))) == [("a", 1)]


def test_roles_that_come_to_rest_on_one_engine_go_on_from_the_longer_history() -> None:
    driver = Driver(*map(change, "abc"), change("x", "teacher"), change("y", "teacher"))
    driver.tell(change("d", "teacher", "student"))
    assert driver.ledger.state.weights_of(("teacher",)).epoch == driver.ledger.state.weights_of(("student",)).epoch == 3


def test_a_resume_of_training_tells_the_students_epoch() -> None:
    driver = Driver(change("a"), change("b"), change("x", "teacher"), ResumeTraining(2.0))
    assert driver.events[-1] == TrainingResumed(epoch=1, unix_seconds=2.0)
    assert driver.ledger.state.last_sequence == 4


@given(
    st.sampled_from([ALONE, TOGETHER]),
    st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["", "a", "b", "c"]), st.booleans()), max_size=40),
)
def test_any_history_counts_by_one_and_folds_to_the_same(
    engines: list[tuple[str, ...]], history: list[tuple[int, str, bool]]
) -> None:
    driver = Driver()
    for which, version, is_confirmed in history:
        roles = engines[which % len(engines)]
        before = driver.ledger.state.weights_of(roles)
        version_before, epoch_before = before.version, before.epoch
        events = driver.tell(ChangeWeights(roles, version, is_confirmed, 1.0))
        after = driver.ledger.state.weights_of(roles)
        if events:
            assert after.version == version != version_before
            assert after.epoch - epoch_before == (1 if version_before or is_confirmed else 0)
        else:
            assert (after.version, after.epoch) == (version_before, epoch_before)
            assert not (is_confirmed and version and version != version_before), "a confirmed change always counts"
    again = Ledger()
    for event in driver.events:
        again.apply(event)  # type: ignore[arg-type]
    for roles in engines:
        folded, known = again.state.weights_of(roles), driver.ledger.state.weights_of(roles)
        assert (folded.version, folded.epoch) == (known.version, known.epoch)
        assert [folded.epoch_of(version) for version in "abc"] == [known.epoch_of(version) for version in "abc"]
