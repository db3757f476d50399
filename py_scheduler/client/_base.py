"""What the asyncio clients of all services share: a channel of the running loop, and calls that outlive a broken one.

Invariant: a call that was broken off is sent again only if that cannot make it happen twice; every request that changes
something carries an id of its own.
"""

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar, cast

import grpc.aio

from py_scheduler.client._backoff import Backoff
from py_scheduler.client._channel import (
    ClientTls,
    check_target,
    check_token,
    is_broken_connection,
    open_channel,
    raise_error_of_call,
)
from py_scheduler.domain.limits import MAX_MESSAGE_BYTES
from py_scheduler.domain.task import DEFAULT_NAMESPACE
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

DEFAULT_TARGET = "127.0.0.1:50051"
CALL_SECONDS = 60.0

StubT = TypeVar("StubT")


class ServiceClient(Generic[StubT]):
    """Talks to one server; any number of calls at a time. Use it as `async with`, or call `open` and `close`.

    target: "host:port" or "unix:/path"; anything else is an InvalidArgumentError.
    reconnect_seconds: how long a connection may stay broken before calls and watches give up. 0: not at all.
    max_message_bytes: the largest message that is sent or taken.
    token: the bearer token that `py-scheduler token new` printed. tls: for a server with TLS; without it a token goes
    to this machine alone.
    """

    stub_class: ClassVar[type[Any]]

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
        check_target(target)
        check_token(token, target, tls)
        self._tls = tls
        self._metadata = (("authorization", f"Bearer {token}"),) if token else None
        self._target = target
        self._namespace = namespace
        self._reconnect_seconds = reconnect_seconds
        self._max_message_bytes = max_message_bytes
        self._channel: grpc.aio.Channel | None = None
        self._stub_of_channel: StubT | None = None

    @classmethod
    def connect(cls, target: str = DEFAULT_TARGET, **settings: Any) -> Self:
        """Reads well in `async with SchedulerClient.connect("127.0.0.1:50051") as client`."""
        return cls(target, **settings)

    async def open(self) -> None:
        """Ties the client to the running loop. The server need not be there yet."""
        if self._channel is None:
            self._channel = open_channel(self._target, self._max_message_bytes, self._tls)

    async def close(self) -> None:
        """Ends open watches. Work on the server goes on."""
        channel, self._channel, self._stub_of_channel = self._channel, None, None
        if channel is not None:
            await channel.close()

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def _open_channel(self) -> grpc.aio.Channel:
        if self._channel is None:
            name = type(self).__name__
            raise FailedPreconditionError(f"the client is not open: use `async with {name}(...) as client`")
        return self._channel

    @property
    def _stub(self) -> StubT:
        if self._stub_of_channel is None:
            self._stub_of_channel = self.stub_class(self._open_channel)
        return cast("StubT", self._stub_of_channel)

    async def _call(
        self, method: Callable[[StubT], Any], request: Any, timeout_seconds: float | None = CALL_SECONDS
    ) -> Any:
        """One unary call, sent again while the connection is broken: every method may be.

        timeout_seconds: of all tries together.
        """
        loop = asyncio.get_running_loop()
        until = math.inf if timeout_seconds is None else loop.time() + timeout_seconds
        backoff = Backoff(self._target, self._reconnect_seconds)
        while True:
            left = None if timeout_seconds is None else until - loop.time()
            try:
                return await method(self._stub)(request, timeout=left, metadata=self._metadata)
            except grpc.aio.AioRpcError as error:
                if not (is_broken_connection(error) and await backoff.wait(until)):
                    raise_error_of_call(error, self._target)
