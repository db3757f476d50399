"""For what nothing tells: the state of a process that is not ours to wait for, an answer that somebody has read."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


async def eventually(
    condition: Callable[[], object | Awaitable[object]], *, pause_seconds: float = 0.0, within_seconds: float = 60.0
) -> None:
    """Looks at each turn of the loop, or after each pause; fails with TimeoutError."""
    async with asyncio.timeout(within_seconds):
        while True:
            said = condition()
            if await said if inspect.isawaitable(said) else said:
                return
            await asyncio.sleep(pause_seconds)
