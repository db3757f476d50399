"""One actor of a Ray cluster that is a child: how its connection becomes known as its own, and how it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.adapters.children.framed_child import FramedChild
from py_scheduler.adapters.children.frames import FrameProtocol
from py_scheduler.domain.runners.frames import Hello, read_child_frame

if TYPE_CHECKING:
    import concurrent.futures
    from collections.abc import Callable

_log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""How long Ray may take to say that an actor has ended; a node that is gone says nothing for half a minute."""
_MAX_HOW = 300
_HELLO_SECONDS = 10.0
_MAX_HELLO_BYTES = 4_096


class Newcomer(FrameProtocol):
    """A connection that has not said yet whose it is. It is cut unless its first frame names an actor that the host
    waits for.
    """

    def __init__(self, admit: Callable[[FrameProtocol, Hello], bool]) -> None:
        super().__init__(max_bytes=_MAX_HELLO_BYTES)
        self._admit = admit
        self._limit: asyncio.TimerHandle | None = None
        self.listen(self._greeted)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        bound = transport.get_extra_info("socket")
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._limit = asyncio.get_running_loop().call_later(_HELLO_SECONDS, self.close)

    def connection_lost(self, error: Exception | None) -> None:
        super().connection_lost(error)
        if self._limit is not None:
            self._limit.cancel()

    def _greeted(self, data: bytes) -> None:
        if self._limit is not None:
            self._limit.cancel()
        try:
            hello = read_child_frame(data)
        except (msgspec.ValidationError, msgspec.DecodeError):
            hello = None
        self.hold(data)
        if not isinstance(hello, Hello) or not self._admit(self, hello):
            _log.warning("a connection to the runners' port was refused: it did not say a secret that is waited for")
            self.close()


class RayActor(FramedChild):
    """One actor."""

    def __init__(
        self, ray: Any, actor: Any, over: asyncio.Future[Any], protocol: FrameProtocol, pid: int, node: str
    ) -> None:
        self.node = node
        self._ray = ray
        self._actor = actor
        self._over = over
        super().__init__(pid, protocol)

    def resident_mib(self) -> float | None:
        return None  # It is on another machine. An actor that Ray kills for its memory ends like any other.

    @property
    def _has_ended(self) -> bool:
        return self._over.done()

    def _end_by_force(self) -> None:
        # Ray may take a while; nothing that the actor says meanwhile is heard.
        self._protocol.close()
        kill(self._ray, self._actor)

    async def _end(self) -> str:
        lost = asyncio.ensure_future(self._protocol.lost.wait())
        await asyncio.wait([self._over, lost], return_when=asyncio.FIRST_COMPLETED)
        self._protocol.close()
        await lost
        if not self._over.done():
            # Only the actor holds the other end of the connection: it has ended, or ends now.
            kill(self._ray, self._actor)
            await asyncio.wait([self._over], timeout=END_SECONDS)
        return how_it_ended(self._over) if self._over.done() else "its connection broke"


def kill(ray: Any, actor: Any) -> None:
    """Returns at once."""
    try:
        ray.kill(actor, no_restart=True)
    except Exception as error:  # noqa: BLE001 -- whatever Ray raises, an actor without a connection ends by itself
        _log.warning("Ray does not kill an actor: %s", error)


def told(ended: concurrent.futures.Future[Any]) -> asyncio.Future[Any]:
    """An actor's end as a future of the loop. Nobody need be waiting for it when it comes."""
    over = asyncio.wrap_future(ended)
    over.add_done_callback(lambda over: over.cancelled() or over.exception())
    return over


def how_it_ended(over: asyncio.Future[Any]) -> str:
    """What Ray says of it, in one line."""
    error = asyncio.CancelledError() if over.cancelled() else over.exception()
    if error is None:
        return "the actor returned"
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:_MAX_HOW]}"
