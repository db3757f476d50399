"""POST over the pooled connections of an aiohttp session, without what a session does for each request.

Headers, cookies, redirects, uploads and traces take aiohttp as long as everything else that a short generation costs
here, and none of it is wanted: each request to a server has the same headers, and its body is at hand. Connecting (TLS,
time limit, pool, keeping alive) and reading (the parser, the stream of the body) are aiohttp's.

Invariants

- A connection goes back to its pool only after the whole answer; else it is closed.
- What goes wrong is raised as aiohttp would: ClientError, or an OSError.
- Nothing is sent twice, and no redirect is followed: its status is the answer's.
"""

from __future__ import annotations

import asyncio
import base64
from typing import TYPE_CHECKING, Self

import aiohttp
from aiohttp.http import HttpProcessingError
from yarl import URL

if TYPE_CHECKING:
    from types import TracebackType

    from aiohttp.connector import Connection

SWITCHING_PROTOCOLS, FIRST_FINAL_STATUS = 101, 200


class Poster:
    """Of one session to one server. closes: a connection serves one request."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str, *, closes: bool) -> None:
        url = URL(base_url)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        if closes:
            headers["Connection"] = "close"
        if url.user is not None or url.password is not None:
            said = f"{url.user or ''}:{url.password or ''}".encode()
            headers["Authorization"] = "Basic " + base64.b64encode(said).decode()
            url = url.with_user(None)
        self.session = session
        self.request = aiohttp.ClientRequest(
            "POST", url, headers=headers, loop=asyncio.get_running_loop(), session=session
        )
        """What a connection is chosen by, and the headers of all requests."""
        self._path = url.raw_path.rstrip("/")
        self._heads: dict[str, bytes] = {}

    def post(self, path: str, body: bytes) -> Exchange:
        head = self._heads.get(path)
        if head is None:
            lines = [f"POST {self._path}{path} HTTP/1.1", *(f"{name}: {said}" for name, said in self._headers())]
            head = self._heads[path] = "\r\n".join([*lines, "Content-Length: "]).encode()
        return Exchange(self, head, body)

    def _headers(self) -> list[tuple[str, str]]:
        return [(name, said) for name, said in self.request.headers.items() if name.lower() != "content-length"]


class Exchange:
    """One request and its answer, as a context manager. status and content: as of aiohttp's own response."""

    __slots__ = ("_body", "_connection", "_head", "_poster", "content", "status")

    content: aiohttp.StreamReader
    status: int

    def __init__(self, poster: Poster, head: bytes, body: bytes) -> None:
        self._poster = poster
        self._head = head
        self._body = body
        self._connection: Connection | None = None

    async def __aenter__(self) -> Self:
        poster = self._poster
        connector = poster.session.connector
        if connector is None:
            raise aiohttp.ClientConnectionError("the session is closed")
        try:
            connection = await connector.connect(poster.request, [], poster.session.timeout)
        except TimeoutError as error:
            raise aiohttp.ConnectionTimeoutError(f"no connection to {poster.request.url} in time") from error
        try:
            await self._begin(connection)
        except BaseException:
            connection.close()
            raise
        self._connection = connection
        return self

    async def _begin(self, connection: Connection) -> None:
        protocol, transport = connection.protocol, connection.transport
        if protocol is None or transport is None:
            raise aiohttp.ServerDisconnectedError
        protocol.set_response_params(read_until_eof=True)
        transport.write(b"%b%d\r\n\r\n%b" % (self._head, len(self._body), self._body))
        status = 0
        while status < FIRST_FINAL_STATUS:
            try:
                message, self.content = await protocol.read()
            except HttpProcessingError as error:
                raise aiohttp.ClientPayloadError(f"what answers speaks no HTTP: {error}") from error
            status = message.code
            if status == SWITCHING_PROTOCOLS:
                # Nothing follows it, and nobody asked for another protocol.
                raise aiohttp.ClientPayloadError("what answers goes on in another protocol than HTTP")
        self.status = status

    async def __aexit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _trace: TracebackType | None
    ) -> None:
        assert self._connection is not None
        # Which closes it, if there is more to read.
        self._connection.release()
