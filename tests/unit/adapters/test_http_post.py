"""Requests that go around aiohttp's session are what it would send, and end as its own do."""

from __future__ import annotations

import asyncio
import ssl
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp
import pytest
from aiohttp import web

from py_scheduler.adapters.http_client import LOST_CONNECTION, HttpClient, body_of
from tests.support.servers.certificates import Certificates

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

BODY = {"a": [1, 2]}


class Server:
    """Answers `ok` and notes who asked; or whatever `answer` says, byte by byte."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], bytes]] = []
        self.peers: set[tuple[str, int]] = set()

    async def handle(self, request: web.Request) -> web.Response:
        assert request.transport is not None
        self.peers.add(request.transport.get_extra_info("peername"))
        self.requests.append((request.path_qs, dict(request.headers), await request.read()))
        return web.Response(body=b"ok" * 500_000 if request.path.endswith("/long") else b"ok")


@asynccontextmanager
async def serving(context: ssl.SSLContext | None = None) -> AsyncIterator[tuple[Server, int]]:
    server = Server()
    app = web.Application()
    app.router.add_post("/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    try:
        yield server, runner.addresses[0][1]
    finally:
        await runner.cleanup()


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that writes these bytes whatever it is asked, and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"[1,2]}")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@asynccontextmanager
async def client_of(base_url: str, *, keepalive_seconds: float | None = 3.0) -> AsyncIterator[HttpClient]:
    client = HttpClient(base_url, keepalive_seconds=keepalive_seconds, connect_timeout_seconds=5.0)
    await client.start()
    try:
        yield client
    finally:
        await client.close()


async def answer_of(client: HttpClient, path: str = "/generate", *, fresh: bool = False) -> tuple[int, bytes]:
    async with client.post(path, BODY, fresh=fresh) as response:
        return response.status, await body_of(response)


async def test_path_host_body_and_credentials_are_those_of_the_base_url() -> None:
    async with serving() as (server, port), client_of(f"http://me:se%20cret@127.0.0.1:{port}/v%20x/y/") as client:
        assert await answer_of(client, "/generate?a=b") == (200, b"ok")
    ((path, headers, body),) = server.requests
    assert (path, body) == ("/v%20x/y/generate?a=b", b'{"a":[1,2]}')
    assert headers["Host"] == f"127.0.0.1:{port}"
    assert headers["Content-Type"] == "application/json"
    assert headers["Content-Length"] == "11"
    assert headers["Authorization"] == "Basic bWU6c2UgY3JldA=="


async def test_a_connection_is_used_again_after_the_whole_answer_and_only_then() -> None:
    async with serving() as (server, port), client_of(f"http://127.0.0.1:{port}") as client:
        for _ in range(5):
            assert await answer_of(client) == (200, b"ok")
        assert len(server.peers) == 1
        async with client.post("/long", BODY) as response:
            assert await response.content.readany()
        assert await answer_of(client) == (200, b"ok")
        assert len(server.peers) == 2


@pytest.mark.parametrize(("keepalive_seconds", "fresh"), [(None, False), (3.0, True)])
async def test_a_connection_of_its_own_is_asked_to_be_closed(keepalive_seconds: float | None, fresh: bool) -> None:
    async with (
        serving() as (server, port),
        client_of(f"http://127.0.0.1:{port}", keepalive_seconds=keepalive_seconds) as client,
    ):
        for _ in range(3):
            assert await answer_of(client, fresh=fresh) == (200, b"ok")
    assert len(server.peers) == 3
    assert {headers["Connection"] for _, headers, _ in server.requests} == {"close"}


async def test_many_at_once_have_a_connection_each() -> None:
    async with serving() as (server, port), client_of(f"http://127.0.0.1:{port}") as client:
        answers = await asyncio.gather(*(answer_of(client) for _ in range(20)))
    assert answers == [(200, b"ok")] * 20
    assert 1 < len(server.peers) <= 20


async def test_what_goes_before_the_answer_is_not_the_answer() -> None:
    said = b"HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy"
    async with answering(said) as base_url, client_of(base_url) as client:
        assert await answer_of(client) == (503, b"busy")


async def test_a_switch_to_another_protocol_is_a_lost_connection_at_once() -> None:
    """Nothing follows it: whoever waited for the answer behind it would wait for as long as a server may be silent."""
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"[1,2]}")
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
        await is_over.wait()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, client_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        async with asyncio.timeout(20):
            with pytest.raises(aiohttp.ClientPayloadError, match="another protocol"):
                await answer_of(client)
        is_over.set()


async def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    async with answering(b"HTTP/1.1 200 OK\r\n\r\nall of it") as base_url, client_of(base_url) as client:
        assert await answer_of(client) == (200, b"all of it")


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Le",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nokay",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nokay\r\n",
        b"SSH-2.0-OpenSSH_9.2\r\n",
    ],
    ids=["nothing", "half a head", "less than it says", "no last chunk", "another protocol"],
)
async def test_an_answer_that_is_none_is_a_lost_connection(said: bytes) -> None:
    async with answering(said) as base_url, client_of(base_url) as client:
        with pytest.raises(LOST_CONNECTION):
            await answer_of(client)


async def test_nobody_there_is_told_apart() -> None:
    """A request that never reached a server is not aborted there."""
    async with serving() as (_, port):
        pass
    async with client_of(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(aiohttp.ClientConnectorError):
            await answer_of(client)


async def test_a_redirect_is_an_answer() -> None:
    said = b"HTTP/1.1 308 Permanent Redirect\r\nLocation: /elsewhere\r\nContent-Length: 0\r\n\r\n"
    async with answering(said) as base_url, client_of(base_url) as client:
        assert await answer_of(client) == (308, b"")


async def test_who_gives_up_closes_the_connection() -> None:
    """That is what frees a generation at its server."""
    closed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while await reader.read(1_000):
            pass
        closed.set()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server, client_of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}") as client:
        asking = asyncio.create_task(answer_of(client))
        done, _ = await asyncio.wait([asking], timeout=0.05)
        assert not done
        asking.cancel()
        await asyncio.wait([asking])
        async with asyncio.timeout(10):
            await closed.wait()


async def test_a_certificate_is_checked(tmp_path: Path) -> None:
    made = Certificates(tmp_path)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(made.certificate, made.key)
    async with serving(context) as (_, port), client_of(f"https://127.0.0.1:{port}") as client:
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            await answer_of(client)
