"""Tells everybody who waits that something has changed, again and again.

Invariant: a ring wakes everybody who took `next_ring` before it. So whoever takes `next_ring` first, and only then
looks at what he waits for, misses nothing.
"""

from __future__ import annotations

import asyncio


class Notifier:
    """Costs nothing to ring while nobody waits."""

    __slots__ = ("_next_ring",)

    def __init__(self) -> None:
        self._next_ring: asyncio.Event | None = None

    def ring(self) -> None:
        if self._next_ring is not None:
            self._next_ring.set()
            self._next_ring = None

    def next_ring(self) -> asyncio.Event:
        """Set by the next `ring`."""
        if self._next_ring is None:
            self._next_ring = asyncio.Event()
        return self._next_ring


async def rings_within(seconds: float, next_ring: asyncio.Event) -> bool:
    """Whether it has rung before so many seconds had passed."""
    try:
        async with asyncio.timeout(seconds):
            await next_ring.wait()
    except TimeoutError:
        return False
    return True
