"""Deadlines of many items in one heap behind one timer.

Invariants
  1. The timer is set for the earliest deadline or sooner.
  2. Ten thousand items may be due at the same moment: `at_once` of them are told of in one turn of the loop, and the
     others in the next ones.
  3. A deadline that no longer matters stays in the heap until it comes up, or until such entries outnumber the others.
     `on_expiry` decides whether a deadline still means anything.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.ports import Clock, TimerHandle


class Timed(Protocol):
    """Something with a deadline; `is_over` when it no longer needs to be told."""

    @property
    def is_over(self) -> bool: ...


TimedT = TypeVar("TimedT", bound=Timed)

_KEEP_AT_LEAST = 64
_AT_ONCE = 500


class Deadlines(Generic[TimedT]):
    """Calls `on_expiry(item)` once the clock has reached an item's deadline, unless the item is over."""

    def __init__(self, clock: Clock, on_expiry: Callable[[TimedT, float], None], at_once: int = _AT_ONCE) -> None:
        self._clock = clock
        self._on_expiry = on_expiry
        self._at_once = at_once
        self._heap: list[tuple[float, int, TimedT]] = []
        self._ties = itertools.count()
        self._compact_at = _KEEP_AT_LEAST
        self._timer: TimerHandle | None = None
        self._timer_at = float("inf")

    def add(self, when: float, item: TimedT) -> None:
        """`when` is monotonic seconds. An item may have several deadlines; `on_expiry` gets the one that expired."""
        if len(self._heap) >= self._compact_at:
            self._compact()
        heapq.heappush(self._heap, (when, next(self._ties), item))
        if when < self._timer_at:
            self._set_timer(when)

    @property
    def is_behind(self) -> bool:
        """Whether more is due than was told of within this turn of the loop."""
        return self._timer_at == float("-inf")

    def clear(self) -> None:
        self._heap.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_at = None, float("inf")

    def _compact(self) -> None:
        self._heap = [entry for entry in self._heap if not entry[2].is_over]
        heapq.heapify(self._heap)
        self._compact_at = max(_KEEP_AT_LEAST, 2 * len(self._heap))

    def _set_timer(self, when: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_at = when
        self._timer = self._clock.call_at(when, self._expire)

    def _expire(self) -> None:
        self._timer, self._timer_at = None, float("inf")
        now = self._clock.monotonic()
        left = self._at_once
        while self._heap and (self._heap[0][0] <= now or self._heap[0][2].is_over):
            if not left:
                self._timer, self._timer_at = asyncio.get_running_loop().call_soon(self._expire), float("-inf")
                return
            left -= 1
            when, _, item = heapq.heappop(self._heap)
            if not item.is_over:
                self._on_expiry(item, when)
        if self._heap and self._heap[0][0] < self._timer_at:
            self._set_timer(self._heap[0][0])
