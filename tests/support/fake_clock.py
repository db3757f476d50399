"""A clock that stands still until a test moves it. Implements `domain.ports.Clock`."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import TYPE_CHECKING

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.scheduler.slices import SLICE_SECONDS

if TYPE_CHECKING:
    from collections.abc import Callable

_UNIX_START = 1_700_000_000.0


class FakeTimer:
    def __init__(self, callback: Callable[[], None]) -> None:
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        self.callback = None


class FakeClock:
    """Timers fire in the order of their times, while `advance` passes them."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.boot_id = b"this boot"
        self.jumped_seconds = 0.0
        """How far the wall clock was set forward, or back."""
        self._timers: list[tuple[float, int, FakeTimer]] = []
        self._ties = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def unix_time(self) -> float:
        return _UNIX_START + self.now + self.jumped_seconds

    def call_at(self, when: float, callback: Callable[[], None]) -> FakeTimer:
        timer = FakeTimer(callback)
        heapq.heappush(self._timers, (when, next(self._ties), timer))
        return timer

    @property
    def live_timers(self) -> int:
        return sum(timer.callback is not None for _, _, timer in self._timers)

    async def advance(self, seconds: float) -> None:
        """Moves on, firing what comes due, and lets the loop settle after each timer."""
        target = self.now + seconds
        while self._timers and self._timers[0][0] <= target:
            when, _, timer = heapq.heappop(self._timers)
            self.now = max(self.now, when)
            if timer.callback is not None:
                timer.callback()
                await settle()
        self.now = target
        await settle()


class GoingClock(FakeClock):
    """It goes on while a test moves it: a turn of the loop is over by it."""

    def __init__(self) -> None:
        super().__init__()
        self._began = time.monotonic()

    def monotonic(self) -> float:
        return self.now + time.monotonic() - self._began


class StepClock(LoopClock):
    """Each look at it takes more than half of a slice: what is done in slices does one step in a turn of the loop."""

    def __init__(self) -> None:
        self._looks = 0

    def monotonic(self) -> float:
        self._looks += 1
        return time.monotonic() + 0.6 * SLICE_SECONDS * self._looks


_MAX_TURNS = 100_000


async def settle() -> None:
    """Gives the loop turns until no callback is ready: what goes on from there needs time, a thread or the world."""
    ready = asyncio.get_running_loop()._ready  # type: ignore[attr-defined]  # the only place that knows
    for _ in range(_MAX_TURNS):
        await asyncio.sleep(0)
        if not ready:
            return
    raise AssertionError(f"something kept the loop busy for {_MAX_TURNS} turns")
