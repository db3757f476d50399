"""Frames over a stream socket: four bytes of length, most significant first, then that many bytes.

`FrameSocket` is a child's end; it blocks, and any thread may use it. `FrameProtocol` is the server's end, in its loop.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from typing import TYPE_CHECKING, cast

from py_scheduler.domain.runners.frames import MAX_FRAME_BYTES

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

_LENGTH = struct.Struct(">I")
_PIECE_BYTES = 1 << 16


class FrameSocket:
    """Sends whole frames from any thread; receives in one."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._sending = threading.Lock()
        self._received = bytearray()

    def send(self, frame: bytes) -> None:
        """Raises OSError when the server is gone, ValueError for a frame that is too long."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(frame)} bytes, at most {MAX_FRAME_BYTES} can be sent")
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def receive(self) -> bytes | None:
        """The next frame; None at the end of the connection. Raises OSError."""
        if (head := self._read(_LENGTH.size)) is None:
            return None
        return self._read(_LENGTH.unpack(head)[0])

    def _read(self, size: int) -> bytes | None:
        while len(self._received) < size:
            piece = self._socket.recv(_PIECE_BYTES)
            if not piece:
                return None
            self._received += piece
        found = bytes(self._received[:size])
        del self._received[:size]
        return found


class FrameProtocol(asyncio.Protocol):
    """Frames wait until `listen` is called. lost: set when the connection is over.

    max_bytes: of one frame; a longer one ends the connection. fault: says so then.
    """

    def __init__(self, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._transport: asyncio.Transport | None = None
        self._received = bytearray()
        self._wanted: int | None = None
        self._waiting: list[bytes] = []
        self._on_frame: Callable[[bytes], None] = self._waiting.append
        self.fault = ""
        self.lost = asyncio.Event()

    def hold(self, first: bytes) -> None:
        """The sender of the first frame is known: this frame and the next ones wait for another listener."""
        self._max_bytes = MAX_FRAME_BYTES
        self._waiting = [first]
        self._on_frame = self._waiting.append

    def listen(self, on_frame: Callable[[bytes], None]) -> None:
        self._on_frame = on_frame
        waiting, self._waiting = self._waiting, []
        for frame in waiting:
            on_frame(frame)

    def send(self, frame: bytes) -> None:
        """Raises ValueError for a frame that is too long; one to a lost connection is dropped."""
        if len(frame) > MAX_FRAME_BYTES:
            raise ValueError(f"a message of {len(frame)} bytes, at most {MAX_FRAME_BYTES} can be sent")
        if self._transport is not None and not self.lost.is_set():
            self._transport.writelines((_LENGTH.pack(len(frame)), frame))

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A loop's transports need not be asyncio's own.
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while True:
            if self._wanted is None:
                if len(self._received) < _LENGTH.size:
                    return
                (self._wanted,) = _LENGTH.unpack_from(self._received)
                del self._received[: _LENGTH.size]
                if self._wanted > self._max_bytes:
                    self.fault = f"it began a message of {self._wanted} bytes, at most {self._max_bytes} are read"
                    self.close()
                    return
            if len(self._received) < self._wanted:
                return
            frame, self._wanted = self._taken(self._wanted), None
            self._on_frame(frame)

    def _taken(self, size: int) -> bytes:
        """The first bytes that were received. Large frames are not copied: the loop stands still meanwhile."""
        received = self._received
        if size > _PIECE_BYTES:
            self._received = received[size:]
            del received[size:]
            return cast("bytes", received)
        frame = bytes(received[:size])
        del received[:size]
        return frame

    def connection_lost(self, _error: Exception | None) -> None:
        self.lost.set()
