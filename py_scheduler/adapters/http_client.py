"""What the backend adapters share of HTTP: one pooled client, server-sent events, and the waits between retries.

Invariants

- A client holds its sessions from `start` to `close`.
- It retires an idle connection before the server would close it, so that a reset at reuse stays rare.
- It retries nothing by itself: only the caller knows whether a request may run twice.
- Whoever reads an answer gets a chunk of it at a time, and the loop is given back between the chunks of all of them.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import aiohttp
import msgspec

from py_scheduler.adapters.http_post import Poster
from py_scheduler.adapters.reading_turns import reading_turns
from py_scheduler.adapters.settings_checks import check_numbers
from py_scheduler.domain.values.backoff import backoff_seconds
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from contextlib import AbstractAsyncContextManager

ShapeT = TypeVar("ShapeT")

HTTP_OK = 200
HTTP_NOT_FOUND = 404
REFUSING_STATUSES = (400, 422)
"""SGLang and vLLM answer 400 to a request that they refuse, and 422 is what their web framework says by itself. Neither
answers a generation with 401, 403, 404 or 413 because of what is in it.
"""
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for what is no JSON, or not of the shape that is expected."""
LOST_CONNECTION = (aiohttp.ClientError, OSError)
"""What aiohttp raises when a connection is refused, reset, cut off or silent (TimeoutError is an OSError)."""


def is_away(error: BaseException | None) -> bool:
    """Whether this is how a request ends at a server that is not there, or was not for a moment. Silence tells
    nothing: it may have much to do.
    """
    is_silence = isinstance(error, TimeoutError) and not isinstance(error, aiohttp.ClientError)
    return isinstance(error, LOST_CONNECTION) and not is_silence


class Response(Protocol):
    """What is read of an answer."""

    @property
    def status(self) -> int: ...

    @property
    def content(self) -> aiohttp.StreamReader: ...


MAX_ANSWER_BYTES = 256 << 20
"""Of a body, or of one event of a stream: far more than the longest generation takes."""
_CHUNK_BYTES = 128 << 10
"""Some 3 000 tokens of a stream, or 2 ms. In smaller ones an event that repeats a long output takes longer."""


class RetrySettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounded, jittered retries."""

    attempts: int = 4
    """In all, the first included."""
    base_seconds: float = 0.1
    """The first wait. Each further one is twice as long; of each up to a half is left out at random."""
    max_seconds: float = 5.0
    """The longest wait."""

    def __post_init__(self) -> None:
        check_numbers(self, may_be_zero=("base_seconds", "max_seconds"))

    def wait_seconds(self, failed_attempts: int) -> float:
        """The wait after that many failures (from 1): between half and the whole of the doubled base."""
        return backoff_seconds(failed_attempts, self.base_seconds, self.max_seconds)


class UnknownPathError(EngineUnavailableError):
    """The server knows no such path: it is another one, or was started without what this needs."""


class HttpClient:
    """One pooled session to one server. Bodies are JSON both ways."""

    def __init__(
        self, base_url: str, *, connections: int = 0, keepalive_seconds: float | None, connect_timeout_seconds: float
    ) -> None:
        """`connections` 0 means no limit: a pool's limit would otherwise silently cap the rollout's concurrency.

        `keepalive_seconds` None means a connection per request.
        """
        self.base_url = base_url.rstrip("/")
        self._connections = connections
        self._keepalive_seconds = keepalive_seconds
        self._connect_timeout_seconds = connect_timeout_seconds
        self._poster: Poster | None = None
        self._fresh_poster: Poster | None = None

    async def start(self) -> None:
        if self._poster is None:
            self._poster = self._make_poster(self._keepalive_seconds)
            self._fresh_poster = self._make_poster(None)

    async def close(self) -> None:
        posters = self._poster, self._fresh_poster
        self._poster = self._fresh_poster = None
        for poster in posters:
            if poster is not None:
                await poster.session.close()

    def post(self, path: str, body: Any, *, fresh: bool = False) -> AbstractAsyncContextManager[Response]:
        """The response as a context manager; leaving it before the end of the body closes the connection.

        `fresh` takes a connection of its own: those that are kept may all be dead, one behind the other. Raises
        EngineUnavailableError when the client is not started or closed.
        """
        return self._open(fresh=fresh).post(path, msgspec.json.encode(body))

    async def get_json(self, path: str, *, timeout_seconds: float, fresh: bool = False) -> Any:
        """Raises EngineUnavailableError when there is no good answer in time. fresh: as of `post`."""
        return await self._json(self._open(fresh=fresh).session.get(self.base_url + path), path, timeout_seconds)

    async def post_json(self, path: str, body: Any, *, timeout_seconds: float, fresh: bool = False) -> Any:
        """Raises EngineUnavailableError when there is no good answer in time. fresh: as of `post`."""
        return await self._json(self.post(path, body, fresh=fresh), path, timeout_seconds)

    async def _json(self, request: AbstractAsyncContextManager[Response], path: str, timeout_seconds: float) -> Any:
        try:
            async with asyncio.timeout(timeout_seconds), request as response:
                content = await body_of(response)
                status = response.status
        except LOST_CONNECTION as error:
            reason = str(error) or f"no answer within {timeout_seconds:g} s"
            raise EngineUnavailableError(f"{self.base_url}{path}: {reason}") from error
        if status != HTTP_OK:
            kind = UnknownPathError if status == HTTP_NOT_FOUND else EngineUnavailableError
            raise kind(f"{self.base_url}{path} answered {status}: {error_message(content)}")
        return decode_json(content)

    def _make_poster(self, keepalive_seconds: float | None) -> Poster:
        if keepalive_seconds is None:
            connector = aiohttp.TCPConnector(limit=self._connections, force_close=True)
        else:
            connector = aiohttp.TCPConnector(limit=self._connections, keepalive_timeout=keepalive_seconds)
        session = aiohttp.ClientSession(
            connector=connector,
            # No total: a generation takes as long as it takes. Callers bound what they wait for.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_timeout_seconds),
        )
        return Poster(session, self.base_url, closes=keepalive_seconds is None)

    def _open(self, *, fresh: bool = False) -> Poster:
        poster = self._fresh_poster if fresh else self._poster
        if poster is None:
            raise EngineUnavailableError(f"the client of {self.base_url} is not started or was closed")
        return poster


async def body_of(response: Response) -> bytes:
    """Raises ClientPayloadError, as for a broken connection, when it does not end where an answer would."""
    content = bytearray()
    while chunk := await _next_chunk(response.content):
        content += chunk
        _check_size(content)
    return bytes(content)


def _check_size(content: bytearray) -> None:
    if len(content) > MAX_ANSWER_BYTES:
        raise aiohttp.ClientPayloadError(f"an answer of more than {MAX_ANSWER_BYTES} bytes")


def decode_json(content: bytes) -> Any:
    """Raises EngineUnavailableError for what is no JSON: a server that answers so is not well."""
    try:
        return msgspec.json.decode(content) if content else None
    except UNREADABLE as error:
        raise EngineUnavailableError(f"the engine answered something other than JSON: {content[:200]!r}") from error


def read_as(shape: type[ShapeT], answer: Any, source: str) -> ShapeT:
    """The answer of `source` as what it should be. Raises EngineUnavailableError when it is something else."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        raise EngineUnavailableError(f"{source} answered what cannot be read: {error}") from error


def is_refusal(status: int, content: bytes) -> bool:
    """Whether an inference server refuses a request here, so that the request is at fault.

    Any other answer below 500 comes from something before the server or in its place, such as a proxy or a login page,
    and tells nothing of the request.
    """
    if status not in REFUSING_STATUSES:
        return False
    try:
        body = msgspec.json.decode(content)
    except UNREADABLE:
        return False
    return isinstance(body, dict) and not body.keys().isdisjoint(("error", "message", "detail"))


def error_message(content: bytes) -> str:
    """The message of an error body, whichever of the known forms it has; the body's beginning otherwise."""
    try:
        body = msgspec.json.decode(content)
    except UNREADABLE:
        return content[:500].decode(errors="replace")
    if isinstance(body, dict):
        inner = body.get("error", body)
        if isinstance(inner, dict):
            inner = inner.get("message") or inner.get("detail") or inner
        return str(inner)
    return str(body)


async def sse_payloads(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """The payload of every complete `data:` event, as it arrives; comments are skipped.

    Events are split here and not by `readline`, which refuses lines above 128 KiB: a long generation's are longer.
    While it waits for the next event it holds none of those before: a thousand streams wait at once, and where each
    event repeats the output one has a megabyte.
    """
    buffer = bytearray()
    while (searched := await _grown_by_a_chunk(buffer, content)) is not None:
        payloads = _taken_from(buffer, searched)
        while payloads:
            yield payloads.pop()


async def _next_chunk(content: aiohttp.StreamReader) -> bytes:
    """What has come, of that at most so much; nothing at the end. What its caller makes of it counts as read too.

    The rest stays in the connection, which takes no more while it has enough.
    """
    chunk = await content.read(_CHUNK_BYTES)
    await reading_turns().until_mine()
    return chunk


async def _grown_by_a_chunk(buffer: bytearray, content: aiohttp.StreamReader) -> int | None:
    """Where in the buffer something new may be found; None at the end of the body."""
    chunk = await _next_chunk(content)
    if not chunk:
        return None
    searched = max(0, len(buffer) - 1)
    buffer += chunk
    return searched


def _taken_from(buffer: bytearray, searched: int) -> list[bytes]:
    """The payloads of its complete events, the last first. `searched`: up to where none of them ends."""
    end = buffer.rfind(b"\n\n", searched)
    if end < 0:
        _check_size(buffer)
        return []
    payloads, start = [], 0
    with memoryview(buffer) as view:
        while start <= end:
            stop = _end_of_event(buffer, start)
            if buffer.startswith(b"data: ", start):
                payloads.append(bytes(view[start + len(b"data: ") : stop]))
            start = stop + len(b"\n\n")
    del buffer[:start]
    payloads.reverse()
    return payloads


def _end_of_event(events: bytearray, start: int) -> int:
    """Of one that is complete. It is one line as a rule, whose end is found at once: a search for the two bytes of the
    empty line looks at each byte.
    """
    end = events.find(b"\n", start)
    return end if events.startswith(b"\n", end + 1) else events.find(b"\n\n", end)
