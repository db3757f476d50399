"""The connection of an asyncio client: a channel of the running loop, and calls that outlive a broken connection.

Invariants
  1. A call that was broken off is sent again only if that cannot make it happen twice: every request that changes
     something carries an id of its own.
  2. A stream yields frames that join without a gap or a repetition, also across broken connections, or it raises.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, Self, TypedDict, TypeVar, cast

import grpc.aio

from py_scheduler.client.channel import (
    ClientTls,
    check_target,
    check_token,
    is_broken_connection,
    open_channel,
    raise_error_of_call,
)
from py_scheduler.domain.limits import MAX_MESSAGE_BYTES
from py_scheduler.domain.task import DEFAULT_NAMESPACE
from py_scheduler.domain.values.backoff import backoff_seconds
from py_scheduler.errors import FailedPreconditionError, ServerError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable
    from types import TracebackType
    from typing import Unpack

DEFAULT_TARGET = "127.0.0.1:50051"
CALL_SECONDS = 60.0

_log = logging.getLogger("py_scheduler.client")

_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 2.0

StubT = TypeVar("StubT")
Request = TypeVar("Request")
Reply = TypeVar("Reply")
M = TypeVar("M", bound=Any)
StreamCall = grpc.aio.UnaryStreamCall[Any, M]


class Backoff:
    """Waits that double, with jitter, until one connection has been broken for `patience_seconds` on end.

    target: the server's address, for the log.
    """

    __slots__ = ("_broken_since", "_failures", "_patience_seconds", "_target")

    def __init__(self, target: str, patience_seconds: float) -> None:
        self._target = target
        self._patience_seconds = patience_seconds
        self._broken_since: float | None = None
        self._failures = 0

    def connected(self) -> None:
        """Something came through: the next break starts from the beginning."""
        self._broken_since = None
        self._failures = 0

    async def wait(self, until: float = math.inf) -> bool:
        """Waits its time; False, at once, when patience is over or the time would be later than `until`."""
        now = asyncio.get_running_loop().time()
        if self._broken_since is None:
            self._broken_since = now
            if self._patience_seconds > 0:
                _log.warning("waiting for %s, giving up after %g s", self._target, self._patience_seconds)
        self._failures += 1
        delay = backoff_seconds(self._failures, _FIRST_WAIT_SECONDS, _LONGEST_WAIT_SECONDS)
        if now - self._broken_since >= self._patience_seconds or now + delay >= until:
            return False
        await asyncio.sleep(delay)
        return True


class Connection:
    """One server, and how it lets this client in. Nothing is connected before the first call.

    owner: the class that an error tells the user to open. The rest: see `SchedulerClient`.
    """

    def __init__(
        self,
        target: str,
        *,
        reconnect_seconds: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        token: str = "",
        tls: ClientTls | None = None,
        owner: str = "SchedulerClient",
    ) -> None:
        check_target(target)
        check_token(token, target, tls)
        self._tls = tls
        self.metadata = (("authorization", f"Bearer {token}"),) if token else None
        """Goes with every call."""
        self.target = target
        self._reconnect_seconds = reconnect_seconds
        self._max_message_bytes = max_message_bytes
        self._owner = owner
        self._channel: grpc.aio.Channel | None = None
        self._stubs: dict[Callable[[grpc.aio.Channel], Any], Any] = {}

    async def open(self) -> None:
        """Ties the connection to the running loop. The server need not be there yet."""
        if self._channel is None:
            self._channel = open_channel(self.target, self._max_message_bytes, self._tls)

    async def close(self) -> None:
        """Ends calls and streams. Work on the server goes on."""
        channel, self._channel = self._channel, None
        self._stubs.clear()
        if channel is not None:
            await channel.close()

    def stub(self, stub_class: Callable[[grpc.aio.Channel], StubT]) -> StubT:
        """The calls of one service on the open channel. Raises FailedPreconditionError."""
        if self._channel is None:
            raise FailedPreconditionError(f"the client is not open: use `async with {self._owner}(...) as client`")
        if stub_class not in self._stubs:
            self._stubs[stub_class] = stub_class(self._channel)
        return cast("StubT", self._stubs[stub_class])

    def backoff(self) -> Backoff:
        """For one call or stream: how long it waits for a broken connection."""
        return Backoff(self.target, self._reconnect_seconds)

    async def call(
        self,
        method: Callable[[], grpc.aio.UnaryUnaryMultiCallable[Request, Reply]],
        request: Request,
        timeout_seconds: float | None = CALL_SECONDS,
    ) -> Reply:
        """Makes a unary call, and makes it again while the connection is broken.

        method: gives the stub's method; asked before each try. timeout_seconds: of all tries together.
        """
        loop = asyncio.get_running_loop()
        until = math.inf if timeout_seconds is None else loop.time() + timeout_seconds
        backoff = self.backoff()
        while True:
            left = None if timeout_seconds is None else until - loop.time()
            try:
                return await method()(request, timeout=left, metadata=self.metadata)
            except grpc.aio.AioRpcError as error:
                if not (is_broken_connection(error) and await backoff.wait(until)):
                    raise_error_of_call(error, self.target)

    async def frames(self, call_again: Callable[[], StreamCall[M]], request: Any) -> AsyncGenerator[M, None]:
        """Yields messages that join without a gap for as long as they are read, also across broken connections.

        call_again: makes the call with `request`, whose cursor is that of the last message.
        """
        backoff = self.backoff()
        last: M | None = None
        while True:
            if last is not None:
                request.cursor = last.cursor
            call = call_again()
            async with self.one_try(call, backoff):
                while (message := await self.read(call)) is not None:
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
    async def one_try(self, call: StreamCall[M], backoff: Backoff | None) -> AsyncIterator[None]:
        """Reads one stream in its block, and leaves no call behind.

        The block may end with a broken connection: then this waits its time and goes on behind the block, for the next
        try. It raises what any other failure of the call means. backoff: None for a stream that has one try alone.
        """
        try:
            yield
        except grpc.aio.AioRpcError as error:
            if not (backoff is not None and is_broken_connection(error) and await backoff.wait()):
                raise_error_of_call(error, self.target)
        except asyncio.CancelledError:
            if self._channel is not None:
                raise
            # grpc ends the calls of a closed channel with this, though nobody cancelled the reader.
            raise FailedPreconditionError("the client was closed while it was reading") from None
        finally:
            call.cancel()

    async def read(self, call: StreamCall[M]) -> M | None:
        """The next message of a stream; None at its end."""
        message = await call.read()
        return None if message is grpc.aio.EOF else cast("M", message)


class ConnectionSettings(TypedDict, total=False):
    """What every client takes besides its target: see `SchedulerClient`."""

    namespace: str
    reconnect_seconds: float
    max_message_bytes: int
    token: str
    tls: ClientTls | None


class ServiceClient:
    """What every asyncio client is: one connection that its user opens and closes."""

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        reconnect_seconds: float = 30.0,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
        token: str = "",
        tls: ClientTls | None = None,
    ) -> None:
        self._namespace = namespace
        self._connection = Connection(
            target,
            reconnect_seconds=reconnect_seconds,
            max_message_bytes=max_message_bytes,
            token=token,
            tls=tls,
            owner=type(self).__name__,
        )

    @classmethod
    def connect(cls, target: str = DEFAULT_TARGET, **settings: Unpack[ConnectionSettings]) -> Self:
        """Reads well in `async with SchedulerClient.connect("127.0.0.1:50051") as client`."""
        return cls(target, **settings)

    async def open(self) -> None:
        """Ties the client to the running loop. The server need not be there yet."""
        await self._connection.open()

    async def close(self) -> None:
        """Ends open calls and watches. Work on the server goes on."""
        await self._connection.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
