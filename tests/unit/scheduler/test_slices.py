"""Work in slices: the scheduler's clock says when a turn of the loop is over."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from py_scheduler.scheduler.slices import SLICE_SECONDS, Backlog, in_slices
from tests.support.fake_clock import FakeClock, settle

if TYPE_CHECKING:
    from collections.abc import Generator


def steps(clock: FakeClock, seconds: float, done: list[float]) -> Generator[None, None, str]:
    """Ten steps, each of which takes so long."""
    for _ in range(10):
        clock.now += seconds
        done.append(clock.now)
        yield
    return "over"


@pytest.mark.parametrize(("seconds", "at_once"), [(0.0, 10), (SLICE_SECONDS / 2, 2), (SLICE_SECONDS, 1)])
async def test_the_first_slice_of_a_backlog_is_as_long_as_the_clock_says(seconds: float, at_once: int) -> None:
    clock, done = FakeClock(), list[float]()
    result = Backlog(clock).add(steps(clock, seconds, done))
    assert len(done) == at_once
    await settle()
    assert await result == "over"
    assert len(done) == 10


async def test_what_somebody_waits_for_goes_by_the_same_clock() -> None:
    clock, done = FakeClock(), list[float]()
    work = in_slices(steps(clock, 0.0, done), clock)
    with pytest.raises(StopIteration, match="over"):
        work.send(None)  # No turn was over, so the loop was not given back.
    assert len(done) == 10
