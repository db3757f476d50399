"""What all streams of an event loop read in one turn of it is bounded, however much lies there.

Invariants

- Behind `TURN_SECONDS` of a turn no stream begins to read: it waits for one of the next turns, in which whoever waits
  longest goes first. So a turn takes that long, and as long as the one read that it ended in.
- In each turn at least one of those who wait reads, whatever else the loop does.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import time
from typing import Final
from weakref import WeakKeyDictionary

TURN_SECONDS: Final = 0.005
_WOKEN: Final = 32
"""Who is woken in a turn: those behind, for whom there is no time, wait again."""


class ReadingTurns:
    """One loop's."""

    def __init__(self) -> None:
        self._ends: float | None = None
        """Of this turn's time; None while nobody has read in it."""
        self._is_under_way = False
        """Whether the next turn is going to be told."""
        self._is_crowded = False
        """Whether somebody was woken who has not run yet: whoever comes now waits behind."""
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._tickets = itertools.count()

    async def until_mine(self) -> None:
        """Returns when its caller may read: until it waits for something, that counts as read in this turn."""
        if not self._waiting and not self._is_crowded and self._has_time():
            return
        ticket = next(self._tickets)
        while True:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (ticket, woken))
            await woken
            if self._has_time():
                return

    def _has_time(self) -> bool:
        now = time.monotonic()
        if self._ends is None:
            self._ends = now + TURN_SECONDS
            if not self._is_under_way:
                self._is_under_way = True
                asyncio.get_running_loop().call_soon(self._next_turn)
            return True
        return now < self._ends

    def _next_turn(self) -> None:
        self._ends = None
        woken = 0
        while self._waiting and woken < _WOKEN:
            _, future = heapq.heappop(self._waiting)
            if not future.done():
                future.set_result(None)
                woken += 1
        self._is_under_way = self._is_crowded = woken > 0
        if woken:
            # Behind those that were woken, so that they find this turn's time whole.
            asyncio.get_running_loop().call_soon(self._next_turn)


_OF_LOOPS: WeakKeyDictionary[asyncio.AbstractEventLoop, ReadingTurns] = WeakKeyDictionary()


def reading_turns() -> ReadingTurns:
    """Those of the running loop, which all backends in it share."""
    loop = asyncio.get_running_loop()
    turns = _OF_LOOPS.get(loop)
    if turns is None:
        turns = _OF_LOOPS[loop] = ReadingTurns()
    return turns
