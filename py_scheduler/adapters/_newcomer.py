"""A connection to the runners' port that has not said yet whose it is."""

from __future__ import annotations

import asyncio
import logging
import socket
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.adapters._frames import FrameProtocol
from py_scheduler.domain.runner_frames import Hello, read_child_frame

if TYPE_CHECKING:
    from collections.abc import Callable

_log = logging.getLogger(__name__)

_HELLO_SECONDS = 10.0
_MAX_HELLO_BYTES = 4_096


class Newcomer(FrameProtocol):
    """Until its first frame, a small one, has named an actor that is waited for; else it is cut."""

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
