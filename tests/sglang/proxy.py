"""A TCP proxy that breaks connections on demand, and notes in which order requests passed.

Invariant: a connection that was broken carries nothing more from the server; new ones are whole.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Self
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from collections.abc import Callable

CHUNK_BYTES = 65536
WAIT_SECONDS = 60.0
REQUEST = re.compile(rb"^(?:GET|POST) (\S+) HTTP/1\.1\r\n", re.MULTILINE)


class Connection:
    """One client's connection and the one to the server behind it."""

    def __init__(self, client: asyncio.StreamWriter, server: asyncio.StreamWriter) -> None:
        self._client = client
        self._server = server
        self.is_broken = False
        self.has_lost_server = False

    def stall(self) -> None:
        """What comes from the server goes nowhere; both ends stay connected."""
        self.is_broken = True

    def half_close(self) -> None:
        """The client sees the end of the stream; the server notices nothing."""
        self.is_broken = True
        self._client.write_eof()

    def cut(self) -> None:
        """The client sees a reset; the server notices nothing."""
        self.is_broken = True
        self._client.transport.abort()

    @property
    def is_closing(self) -> bool:
        """On the server's side, by the client."""
        return self._server.is_closing()

    def forward(self, data: bytes) -> None:
        if not self.is_broken:
            self._client.write(data)

    def send(self, data: bytes) -> None:
        self._server.write(data)

    def end(self) -> None:
        """Of what the client has to say."""
        self._server.close()

    def close(self) -> None:
        self._client.transport.abort()
        self._server.transport.abort()


class Proxy:
    """Use as an async context manager; `base_url` is its address."""

    def __init__(self, server_url: str) -> None:
        address = urlsplit(server_url)
        self._server_address = (address.hostname, address.port)
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self.connections: list[Connection] = []
        self.requests: list[str] = []
        """Paths, in the order in which they went to the server."""
        self.events = 0
        """Events of streams that have reached the client."""
        self.server_ends = 0
        """Connections that the server was the first to end."""
        self.keeps_ends = False
        """The client is not told of those."""
        self._faults: dict[str, Callable[[Connection], None]] = {}

    async def __aenter__(self) -> Self:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.base_url = "http://{}:{}".format(*self._listener.sockets[0].getsockname())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()
        for connection in self.connections:
            connection.close()
        await asyncio.gather(*self._tasks)

    def on_request(self, path: str, fault: Callable[[Connection], None] | None) -> None:
        """What befalls a connection as soon as a request for `path` has passed, before any answer; None: nothing."""
        if fault is None:
            self._faults.pop(path, None)
        else:
            self._faults[path] = fault

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_SECONDS):
            while not condition():
                self._changed.clear()
                await self._changed.wait()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        from_server, to_server = await asyncio.open_connection(*self._server_address)
        connection = Connection(writer, to_server)
        self.connections.append(connection)
        try:
            async with asyncio.TaskGroup() as group:
                answers = group.create_task(self._down(from_server, connection))
                await self._up(reader, connection)
                if not connection.is_broken:
                    # Its end is the server's to hear of, as without a proxy; of a broken one it never does.
                    connection.end()
                await answers
        finally:
            connection.close()

    async def _up(self, reader: asyncio.StreamReader, connection: Connection) -> None:
        try:
            while data := await reader.read(CHUNK_BYTES):
                if connection.has_lost_server:
                    return connection.cut()
                paths = [found[1].decode() for found in REQUEST.finditer(data)]
                self.requests += paths
                connection.send(data)
                for path in paths:
                    if path in self._faults:
                        self._faults[path](connection)
                self._changed.set()
        except ConnectionError:
            pass

    async def _down(self, from_server: asyncio.StreamReader, connection: Connection) -> None:
        try:
            while data := await from_server.read(CHUNK_BYTES):
                connection.forward(data)
                if not connection.is_broken:
                    self.events += data.count(b"data: ")
                self._changed.set()
        except ConnectionError:
            pass
        self.server_ends += not connection.is_closing
        connection.has_lost_server = True
        self._changed.set()
        if not self.keeps_ends:
            connection.close()
