"""Calls that wait for results.

Invariant: a call that has not begun to stream has handed nothing out; one that has is repeated under its request id.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from py_scheduler.api.boundary import CallRefusedError

if TYPE_CHECKING:
    from py_scheduler.api.boundary import OutgoingStream
    from py_scheduler.api.ports import EnginePort
    from py_scheduler.domain.collecting import CollectReply, CollectRequest

_STOPPING = "the server is stopping: collect again with the same request_id"


class Collects:
    """The collects of one server that wait, each in the task of its call."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._waits: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    async def collect(self, request: CollectRequest, context: OutgoingStream) -> CollectReply:
        """Raises CallRefusedError when the server stops before there are results."""
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task of its own"
        self._waits.add(task)
        try:
            if self._is_stopping:
                raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await context.begin()
            return await self._engine.results.collect(request)
        except asyncio.CancelledError:
            if self._is_stopping and not context.cancelled():
                task.uncancel()
                raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, _STOPPING) from None
            raise
        finally:
            self._waits.discard(task)

    def end(self) -> None:
        """Lets every call that waits for results end, with a status that says to repeat it."""
        self._is_stopping = True
        for task in self._waits:
            task.cancel()
