"""One dict of metrics for a task."""

from __future__ import annotations

import itertools
import statistics

import pytest

from py_scheduler.domain.values.metrics import expected_best, task_metrics


def test_training_takes_the_mean_of_each_name_unless_its_suffix_says_otherwise() -> None:
    runs = [
        {"reward": 1.0, "tokens:sum": 10, "peak:max": 3, "low:min": 3, "version:last": 7, "b:mean": 2, "odd:thing": 4},
        {"reward": 0.0, "tokens:sum": 5, "peak:max": 9, "low:min": 1, "version:last": 8, "b:mean": 4},
    ]
    assert task_metrics(runs, is_eval=False) == {
        "reward": 0.5,
        "tokens:sum": 15.0,
        "peak:max": 9.0,
        "low:min": 1.0,
        "version:last": 8.0,
        "b": 3.0,
        "odd:thing": 4.0,
    }


def test_an_eval_spreads_a_mean_and_leaves_times_alone() -> None:
    runs = [{"accuracy": value, "time/run_execution": 2.0} for value in (1.0, 0.0, 0.0, 1.0, 1.0)]
    metrics = task_metrics([*runs, {"time/task_execution": 11.0}], is_eval=True)
    assert set(metrics) == {
        "accuracy/mean@5",
        "accuracy/std@5",
        *(f"accuracy/{which}@{k}" for which in ("best", "worst") for k in (2, 4, 5)),
        "time/run_execution",
        "time/task_execution",
    }
    assert metrics["accuracy/mean@5"] == pytest.approx(0.6)
    assert metrics["accuracy/std@5"] == pytest.approx(statistics.pstdev([1, 0, 0, 1, 1]))
    assert metrics["accuracy/best@2"] == pytest.approx(1 - 0.4**2)
    assert metrics["accuracy/worst@4"] == pytest.approx(0.6**4)
    assert (metrics["time/run_execution"], metrics["time/task_execution"]) == (2.0, 11.0)


def test_of_one_run_there_is_no_best_of_several() -> None:
    assert task_metrics([{"a": 2.0}], is_eval=True) == {"a/mean@1": 2.0, "a/std@1": 0.0}


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_expected_best_is_the_mean_over_all_draws(size: int) -> None:
    values = [0.5, 1.0, 1.0, 4.0]
    draws = itertools.product(values, repeat=size)
    assert expected_best(values, size) == pytest.approx(statistics.fmean(max(draw) for draw in draws))


def test_what_is_no_number_is_left_out() -> None:
    runs: list[dict[str, float]] = [{"a": 1.0, "b": "text"}]  # type: ignore[dict-item]
    assert task_metrics(runs, is_eval=False) == {"a": 1.0}
