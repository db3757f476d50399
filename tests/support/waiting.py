"""For what nothing tells: the state of a process that is not ours to wait for, an answer that somebody has read."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


async def eventually(condition: Callable[[], bool], *, pause_seconds: float = 0.0) -> None:
    """Looks at each turn of the loop, or after each pause; fails after half a minute."""
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 -- as said
            await asyncio.sleep(pause_seconds)
