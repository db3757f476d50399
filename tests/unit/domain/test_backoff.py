"""The wait before what failed is tried again."""

from __future__ import annotations

import pytest

from py_scheduler.domain.values.backoff import backoff_seconds


@pytest.mark.parametrize(("failures", "whole"), [(1, 0.5), (2, 1.0), (3, 2.0), (5, 8.0), (6, 10.0), (10**6, 10.0)])
def test_waits_double_to_the_longest_and_never_fall_below_half(failures: int, whole: float) -> None:
    waits = [backoff_seconds(failures, 0.5, 10.0) for _ in range(200)]
    assert whole / 2 <= min(waits) <= max(waits) <= whole


def test_what_failed_together_does_not_come_back_together() -> None:
    assert len({backoff_seconds(1, 1.0, 10.0) for _ in range(100)}) > 90


def test_no_first_wait_is_no_wait() -> None:
    assert backoff_seconds(7, 0.0, 10.0) == 0.0
