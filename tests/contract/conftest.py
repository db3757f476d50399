"""A server on a fake engine and clients to it, over real channels on loopback."""

from __future__ import annotations

from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
import msgspec
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc
from py_scheduler.api.server import ApiServer
from py_scheduler.app import build, running
from py_scheduler.client import SchedulerClient
from py_scheduler.config import ServerSettings, parse_config
from tests.support.servers.fake_engine import FakeEngine
from tests.support.servers.guarded import Guarded

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


class Served(msgspec.Struct):
    """A running server: what it serves and where."""

    engine: FakeEngine
    server: ApiServer
    address: str


async def serve(engine: FakeEngine, **settings: object) -> Served:
    server = ApiServer(engine, "1.2.3", ServerSettings(**{"listen": "127.0.0.1:0", **settings}))  # type: ignore[arg-type]
    address = server.bind()
    await server.start()
    return Served(engine, server, address)


@asynccontextmanager
async def whole_server(config: str) -> AsyncIterator[str]:
    """The address of a server on the real engine, from the text of its configuration."""
    parts = build(parse_config(config), Path())
    bound = parts.api.bind()
    async with running(parts):
        await parts.api.start()
        yield bound
        await parts.scheduler.drain(0)
        await parts.api.stop()


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    running = await serve(FakeEngine())
    yield running
    await running.server.stop()


@pytest.fixture
def address(served: Served) -> str:
    """Of the server on the fake engine; modules that test the real one have a fixture of this name in its place."""
    return served.address


@pytest.fixture
async def client(address: str) -> AsyncIterator[SchedulerClient]:
    async with SchedulerClient.connect(address, reconnect_seconds=0.0) as opened:
        yield opened


@pytest.fixture
async def channel(served: Served) -> AsyncIterator[grpc.aio.Channel]:
    async with grpc.aio.insecure_channel(served.address) as opened:
        yield opened


@pytest.fixture
def stub(channel: grpc.aio.Channel) -> scheduler_service_pb2_grpc.SchedulerServiceStub:
    return scheduler_service_pb2_grpc.SchedulerServiceStub(channel)


@pytest.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    """A server on a fake engine that wants tokens."""
    guarded = Guarded(tmp_path / "tokens.toml")
    guarded.served = await serve(FakeEngine(), tokens_file=str(guarded.file))
    yield guarded
    await guarded.served.server.stop()
