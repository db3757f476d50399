"""The loop of virtual time: when it moves, when it waits for the world, and when it says that nothing is left."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from py_scheduler.simulation.virtual_time import run_in_virtual_time

if TYPE_CHECKING:
    from py_scheduler.simulation.virtual_time import VirtualClock


class IdleError(Exception):
    pass


def run(main: Any) -> Any:
    return run_in_virtual_time(main, IdleError)


def test_days_pass_in_no_time() -> None:
    async def main(clock: VirtualClock) -> float:
        await asyncio.sleep(30 * 86_400.0)
        return clock.monotonic()

    began = time.monotonic()
    assert run(main) == 30 * 86_400.0
    assert time.monotonic() - began < 5.0


@given(st.lists(st.floats(0.0, 1e8), min_size=1, max_size=20), st.floats(0.0, 1e8))
@example([0.0, 1e-116], 0.0)
@example([1.0, 1.0 + 2e-16], 1e8)
def test_each_timer_is_called_at_its_own_moment_and_in_order(delays: list[float], start: float) -> None:
    """Also where a second is less than a step of the float beside the time that has passed."""

    async def main(clock: VirtualClock) -> list[tuple[float, float]]:
        await asyncio.sleep(start)
        called: list[tuple[float, float]] = []
        over = asyncio.Event()

        def note(when: float) -> None:
            called.append((when, clock.monotonic()))
            if len(called) == len(delays):
                over.set()

        for delay in delays:
            clock.call_at(start + delay, partial(note, start + delay))
        await over.wait()
        return called

    called = run(main)
    assert [when for when, _ in called] == sorted(start + delay for delay in delays)
    assert all(when <= now <= when + 2 * math.ulp(when) for when, now in called)


def test_time_stands_still_while_a_thread_works() -> None:
    async def main(clock: VirtualClock) -> tuple[float, bool]:
        late = clock.call_at(10.0, lambda: None)
        await asyncio.to_thread(time.sleep, 0.05)
        late.cancel()
        return clock.monotonic(), threading.current_thread() is threading.main_thread()

    assert run(main) == (0.0, True)


def test_what_waits_for_nothing_that_could_come_is_cancelled_and_told() -> None:
    ended: list[str] = []

    async def main(_: VirtualClock) -> None:
        try:
            await asyncio.sleep(5.0)
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(1.0)  # The way out may take virtual time.
            ended.append("cleanly")

    with pytest.raises(IdleError):
        run(main)
    assert ended == ["cleanly"]


def test_what_does_not_end_although_it_was_cancelled_is_told_too() -> None:
    async def main(_: VirtualClock) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.Event().wait()

    with pytest.raises(RuntimeError, match="nothing is left that could happen"):
        run(main)


def test_its_fault_is_its_own() -> None:
    async def main(_: VirtualClock) -> None:
        await asyncio.sleep(1.0)
        raise ValueError("its own")

    with pytest.raises(ValueError, match="its own"):
        run(main)


def test_the_wall_clock_moves_with_it_and_never_says_never() -> None:
    async def main(clock: VirtualClock) -> tuple[float, float]:
        before = clock.unix_time()
        await asyncio.sleep(7.0)
        return before, clock.unix_time() - before

    before, passed = run(main)
    assert before > 0
    assert passed == 7.0
