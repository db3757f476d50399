"""How long an attempt may take, from the history of training."""

from __future__ import annotations

from py_scheduler.scheduler.ledger.dynamic_timeout import DynamicTimeoutSettings, TrainingHistory, dynamic_timeout

ON = DynamicTimeoutSettings(ratio=3.0, warmup_min_steps=1)
SOME = TrainingHistory(finished_subtasks=4, running_seconds=8.0, completed_steps=1)


def test_switched_off_or_without_a_history_it_is_the_cap() -> None:
    assert dynamic_timeout(None, SOME, 60.0) == 60.0
    assert dynamic_timeout(ON, TrainingHistory(), 60.0) == 60.0
    assert dynamic_timeout(ON, TrainingHistory(finished_subtasks=4, running_seconds=8.0), 60.0) == 60.0
    assert dynamic_timeout(ON, TrainingHistory(completed_steps=3), 60.0) == 60.0
    assert dynamic_timeout(ON, TrainingHistory(), None) is None


def test_after_the_warm_up_it_is_a_multiple_of_the_mean_and_never_above_the_cap() -> None:
    assert dynamic_timeout(ON, SOME, 60.0) == 6.0
    assert dynamic_timeout(ON, SOME, None) == 6.0
    assert dynamic_timeout(ON, SOME, 5.0) == 5.0
    patient = DynamicTimeoutSettings(ratio=3.0, warmup_min_steps=2)
    assert dynamic_timeout(patient, SOME, 60.0) == 60.0
