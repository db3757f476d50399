"""Holds a context open between two calls that may come from different tasks.

Invariant: one task of this module's own enters the context and leaves it. So a TaskGroup in the context cancels no
caller when one of its tasks fails, and no caller's end ends it.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

_log = logging.getLogger(__name__)

EnteredT = TypeVar("EnteredT")


class HeldOpen(Generic[EnteredT]):
    """make: gives a context for each opening. name: of the task that holds it."""

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[EnteredT]], name: str) -> None:
        self._make = make
        self._name = name
        self._ready: asyncio.Future[EnteredT] | None = None
        self._ending = asyncio.Event()
        self._holder: asyncio.Task[None] | None = None

    @property
    def entered(self) -> EnteredT | None:
        """What the context gave; None while it is not open."""
        if self._holder is None or self._holder.done() or self._ready is None or not self._ready.done():
            return None
        return self._ready.result()

    async def open(self) -> EnteredT:
        """Enters the context, or waits until it is entered. Raises what that raises; then it may be opened again."""
        if self._holder is None or self._ready is None:
            self._ready, self._ending = asyncio.get_running_loop().create_future(), asyncio.Event()
            self._holder = asyncio.create_task(self._hold(self._ready, self._ending), name=self._name)
        try:
            return await asyncio.shield(self._ready)
        except Exception:
            await self.close()
            raise

    async def close(self) -> None:
        """Leaves the context, if it is open. Raises what ended it, or its end."""
        holder, self._holder, self._ready = self._holder, None, None
        if holder is not None:
            self._ending.set()
            await asyncio.wait([holder])
            if not holder.cancelled():
                holder.result()

    async def _hold(self, ready: asyncio.Future[EnteredT], ending: asyncio.Event) -> None:
        try:
            async with self._make() as entered:
                ready.set_result(entered)
                await ending.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
                return
            _log.exception("%s ended by an error", self._name)
            raise
        finally:
            ready.cancel()
