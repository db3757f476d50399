"""The clock of the running event loop: what the service uses outside of tests."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


class LoopClock:
    """Implements `domain.ports.Clock`. Monotonic time is the loop's own, so timers and readings agree."""

    def monotonic(self) -> float:
        return time.monotonic()

    def unix_time(self) -> float:
        return time.time()

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_at(when, callback)
