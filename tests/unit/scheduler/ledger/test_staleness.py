"""The rule of staleness, by example and over random histories of a trainer."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.scheduler.ledger.staleness import StalenessSettings, StalenessWindow

limits = st.builds(StalenessSettings, max_staleness=st.integers(0, 4), step_size=st.integers(1, 8))
histories = st.lists(st.sampled_from(["admit", "accept", "fail", "update"]), max_size=200)


def window(max_staleness: int, step_size: int, epoch: int = 0) -> StalenessWindow:
    made = StalenessWindow(StalenessSettings(max_staleness=max_staleness, step_size=step_size))
    made.weights_changed(epoch)
    return made


def admitted(asked: StalenessWindow, running: int = 0) -> int:
    """How many samples go through now, one by one."""
    count = 0
    while asked.admits(running + count):
        count += 1
    return count


@pytest.mark.parametrize(("max_staleness", "steps"), [(0, 1), (1, 2), (4, 5)])
def test_a_resume_at_version_100_admits_no_more_than_a_start(max_staleness: int, steps: int) -> None:
    """Case 15 of the faults: (staleness + 1) steps, not a burst of 100."""
    assert admitted(window(max_staleness, 64)) == steps * 64
    assert admitted(window(max_staleness, 64, epoch=100)) == steps * 64


def test_every_update_lets_one_step_through() -> None:
    asked = window(1, 64, epoch=100)
    asked.accepted = 128
    assert admitted(asked) == 0
    for epoch in (101, 102, 103):
        asked.weights_changed(epoch)
        assert admitted(asked) == 64
        asked.accepted += 64


def test_running_samples_count_and_those_that_fail_make_room() -> None:
    asked = window(0, 8)
    assert [admitted(asked, running) for running in (0, 3, 8, 9)] == [8, 5, 0, 0]
    asked.accepted = 5
    assert [admitted(asked, running) for running in (0, 3)] == [3, 0]


def test_updates_without_samples_are_no_credit() -> None:
    asked = window(0, 8)
    asked.accepted = 8
    for epoch in range(1, 50):
        asked.weights_changed(epoch)
    assert admitted(asked) == 8


def test_a_trainer_that_starts_again_may_say_so() -> None:
    asked = window(0, 8, epoch=5)
    asked.accepted = 8
    assert not asked.admits(0)
    asked.resume()
    assert admitted(asked) == 8
    assert (asked.accepted, asked.epoch_at_resume) == (0, 5)


def test_what_waits_is_told_why() -> None:
    asked = window(1, 32, epoch=3)
    asked.accepted = 40
    assert asked.describe(running=24) == (
        "held back: 64 samples are accepted or running at weight_epoch 3 (40 and 24, counted from epoch 3), "
        "max_staleness 1 allows 64 (step_size 32): it waits for the next update of the weights"
    )


@given(limits, histories)
def test_it_is_the_rule_of_the_design_from_every_resume_on(settings: StalenessSettings, history: list[str]) -> None:
    """And what it admits is never more than the same rule gives that counts from the very first sample."""
    asked = StalenessWindow(settings)
    accepted = accepted_in_all = running = epoch = epoch_at_resume = 0
    for step in history:
        if step == "admit":
            by_rule = accepted + running < (settings.max_staleness + 1 + epoch - epoch_at_resume) * settings.step_size
            assert asked.admits(running) == by_rule
            if by_rule:
                assert accepted_in_all + running < (settings.max_staleness + 1 + epoch) * settings.step_size
                running += 1
        elif step == "update":
            epoch += 1
            asked.weights_changed(epoch)
            if accepted <= (epoch - epoch_at_resume) * settings.step_size:
                accepted, epoch_at_resume = 0, epoch
        elif running:
            running -= 1
            accepted += step == "accept"
            accepted_in_all += step == "accept"
            asked.accepted += step == "accept"
        ahead = asked.accepted + running - (asked.epoch - asked.epoch_at_resume) * settings.step_size
        assert ahead <= (settings.max_staleness + 1) * settings.step_size


@given(limits, st.lists(st.sampled_from(["admit", "end", "update"]), max_size=300))
def test_what_is_trained_on_in_order_is_never_staler_than_the_limit(
    settings: StalenessSettings, history: list[str]
) -> None:
    """A sample's tokens are of the weights that were there when it began; an update takes the first step_size."""
    asked = StalenessWindow(settings)
    running: deque[int] = deque()
    ended: deque[int] = deque()
    for step in history:
        if step == "admit" and asked.admits(len(running)):
            running.append(asked.epoch)
        elif step == "end" and running:
            ended.append(running.popleft())
            asked.accepted += 1
        elif step == "update" and len(ended) >= settings.step_size:
            for _ in range(settings.step_size):
                assert asked.epoch - ended.popleft() <= settings.max_staleness
            asked.weights_changed(asked.epoch + 1)


@given(limits, st.integers(0, 50))
def test_a_trainer_in_step_never_waits_for_ever(settings: StalenessSettings, updates: int) -> None:
    """Whoever submits a step, trains on what came of it and updates is always let through with the next step."""
    asked = StalenessWindow(settings)
    for epoch in range(1, updates + 1):
        assert admitted(asked) >= settings.step_size
        asked.accepted += settings.step_size
        asked.weights_changed(epoch)
