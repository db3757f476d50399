"""How long one turn of the event loop takes, whatever else the machine does."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Literal, Self

LIMIT_SECONDS = 0.05
"""What no call may take of one turn, however large it is."""


class LoopLag:
    """Use as `with LoopLag() as lag` in the loop that is watched, in whose turns it takes the time.

    It counts the processor time of the loop's thread between two calls of a callback that each turn runs once: what a
    call computes in one turn, and not what other processes do meanwhile. Nor does it count Python's garbage collector,
    which runs whenever it likes and whose thresholds are the process's.
    """

    def __init__(self) -> None:
        self.worst_seconds = 0.0
        """Of the turns until now, the longest."""
        self.turns = 0
        self._is_on = False
        self._last = 0.0
        self._collecting_since = 0.0

    def __enter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._was_debug = self._loop.get_debug()
        self._loop.set_debug(False)  # It notes where each task was made, which takes longer than what is measured.
        gc.callbacks.append(self._collector)
        self._is_on = True
        self._last = time.thread_time()
        self._loop.call_soon(self._tick)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._measure()
        self._is_on = False
        gc.callbacks.remove(self._collector)
        self._loop.set_debug(self._was_debug)

    def _tick(self) -> None:
        if self._is_on:
            self._measure()
            self._loop.call_soon(self._tick)

    def _measure(self) -> None:
        now = time.thread_time()
        self.worst_seconds = max(self.worst_seconds, now - self._last)
        self.turns += 1
        self._last = now

    def _collector(self, phase: Literal["start", "stop"], _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_since = time.thread_time()
        else:
            self._last += time.thread_time() - self._collecting_since
