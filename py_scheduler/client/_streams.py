"""Server streams of frames, as the asyncio clients read them.

Invariant: a stream yields frames that join without a gap or a repetition, also across broken connections, or it raises.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

import grpc.aio

from py_scheduler.client._backoff import Backoff
from py_scheduler.client._base import ServiceClient, StubT
from py_scheduler.client._channel import is_broken_connection, raise_error_of_call
from py_scheduler.errors import FailedPreconditionError, ServerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable

M = TypeVar("M", bound=Any)
StreamCall = grpc.aio.UnaryStreamCall[Any, M]


class StreamClient(ServiceClient[StubT]):
    """A client with calls that stream frames."""

    async def _messages(self, call_again: Callable[[], StreamCall[M]], request: Any) -> AsyncGenerator[M, None]:
        """Messages of frames that join without a gap, for as long as they are read, also across broken connections.

        call_again: makes the call with `request`, whose cursor is that of the last frame.
        """
        backoff = Backoff(self._target, self._reconnect_seconds)
        last: M | None = None
        while True:
            if last is not None:
                request.cursor = last.cursor
            call = call_again()
            async with self._one_try(call, backoff):
                while (message := await self._read(call)) is not None:
                    backoff.connected()
                    if last is not None and message.after_sequence != last.through_sequence:
                        raise ServerError(
                            f"the stream goes on after event {message.after_sequence} instead of "
                            f"{last.through_sequence}: resume from the last cursor",
                            "DATA_LOSS",
                        )
                    last = message
                    yield message
                if not await backoff.wait():
                    raise ServerError("the server ends the stream again and again", "UNAVAILABLE")

    @asynccontextmanager
    async def _one_try(self, call: StreamCall[M], backoff: Backoff) -> AsyncIterator[None]:
        """Leaves no call behind. Goes on behind the block when the connection broke and has been waited for; what else
        a failed call means is raised.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if not (is_broken_connection(error) and await backoff.wait()):
                raise_error_of_call(error, self._target)
        except asyncio.CancelledError:
            if self._channel is not None:
                raise
            # grpc ends the calls of a closed channel with this, though nobody cancelled the reader.
            raise FailedPreconditionError("the client was closed while it was reading") from None
        finally:
            call.cancel()

    async def _read(self, call: StreamCall[M]) -> M | None:
        """The next message; None at the end of the stream."""
        message = await call.read()
        return None if message is grpc.aio.EOF else cast("M", message)
