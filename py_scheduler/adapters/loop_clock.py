"""The clock of the running event loop: what the service uses outside of tests."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


def _boot_id() -> bytes:
    """Of Linux, whose monotonic clock all processes of a boot share."""
    try:
        return bytes.fromhex(Path("/proc/sys/kernel/random/boot_id").read_text().strip().replace("-", ""))
    except (OSError, ValueError):
        return b""


class LoopClock:
    """Implements `domain.ports.Clock`. Monotonic time is the loop's own, so timers and readings agree."""

    boot_id = _boot_id()

    # Looked at some ten times a task: the functions themselves, not methods that call them.
    monotonic = staticmethod(time.monotonic)
    unix_time = staticmethod(time.time)

    def call_at(self, when: float, callback: Callable[[], None]) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_at(when, callback)
