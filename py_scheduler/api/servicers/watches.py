"""Open watches, and how they end.

Invariant: a watch ends its subscription in the task of its own call, whichever way the call ends, so a client that goes
away leaves nothing behind.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any, cast

import grpc

from py_scheduler.api.boundary import CallRefusedError
from py_scheduler.api.disconnect_guard import DisconnectGuard
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire.events import encode_frames

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from py_scheduler.api.boundary import OutgoingStream
    from py_scheduler.api.ports import EnginePort
    from py_scheduler.domain.requests import EventFilter, EventFrame
    from py_scheduler.wire.common.cursor import CursorCodec


class _Stream:
    """One open watch. `idle`: it waits for the engine, so cancelling it interrupts no write."""

    __slots__ = ("idle", "task", "through_sequence")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.idle = False
        self.through_sequence = 0


class Watches:
    """The watches of one server. disconnect_grace_seconds: see DisconnectGuard."""

    def __init__(self, engine: EnginePort, disconnect_grace_seconds: float) -> None:
        self._engine = engine
        self._streams: set[_Stream] = set()
        self._is_ending = False
        self.guard = DisconnectGuard(engine, disconnect_grace_seconds)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    async def watch(
        self,
        event_filter: EventFilter,
        after: int | None,
        cursors: CursorCodec,
        context: OutgoingStream,
        *,
        cancel_on_disconnect: bool,
    ) -> None:
        """Writes events to the context until the client goes. Raises CallRefusedError when the server stops."""
        task = asyncio.current_task()
        if task is None:
            message = "a watch runs in the task of its call"
            raise RuntimeError(message)
        if cancel_on_disconnect and not event_filter.submission_id:
            raise InvalidArgumentError("needs a filter with a submission_id", "cancel_on_disconnect")
        stream = _Stream(task)
        self._streams.add(stream)
        guarded = self.guard.watched(event_filter) if cancel_on_disconnect else nullcontext()
        try:
            # The port promises no more than an iterator; what `async def` with yield makes can be closed as well.
            watch = cast("AsyncGenerator[EventFrame, None]", self._engine.watch(event_filter, after))
            async with aclosing(watch) as frames:
                with guarded:
                    await self._pump(stream, frames, cursors, context)
        finally:
            self._streams.discard(stream)
        raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the server is stopping: resume from the last cursor")

    async def _pump(
        self, stream: _Stream, frames: AsyncGenerator[EventFrame, None], cursors: CursorCodec, context: OutgoingStream
    ) -> None:
        """Returns when the server is stopping and everything that happened has been sent."""
        while not (self._is_ending and stream.through_sequence >= self._engine.last_sequence):
            stream.idle = True
            try:
                frame = await anext(frames, None)
            except asyncio.CancelledError:
                if self._is_ending and not context.cancelled():
                    stream.task.uncancel()
                    return
                raise
            finally:
                stream.idle = False
            if frame is None:
                return
            for encoded in encode_frames(frame, cursors):
                await context.write(encoded)
            stream.through_sequence = frame.through_sequence

    def end(self) -> None:
        """Lets every watch send what has happened until now and end, with a status that says to resume."""
        self._is_ending = True
        self.guard.close()
        for stream in self._streams:
            if stream.idle and stream.through_sequence >= self._engine.last_sequence:
                stream.task.cancel()
