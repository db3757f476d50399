"""Health, reflection and binding, over a real channel."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from py_scheduler.api import boundary
from py_scheduler.api.server import (
    GENERATION_SERVICE,
    PLACEMENT_SERVICE,
    ROLLOUT_SERVICE,
    SCHEDULER_SERVICE,
    ApiServer,
)
from py_scheduler.client import SchedulerClient
from py_scheduler.config import ServerSettings
from py_scheduler.errors import (
    ConfigError,
)
from tests.contract.conftest import serve
from tests.support.servers.fake_engine import FakeEngine
from tests.support.servers.grpc_calls import WATCH

if TYPE_CHECKING:
    from tests.contract.conftest import Served


async def test_health_per_service(served: Served, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", SCHEDULER_SERVICE):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service="")) for _ in range(2)]
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watches.pop().cancel()
    served.server.stop_serving()
    assert (await watches[0].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=SCHEDULER_SERVICE))
    assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_each_service_says_whether_what_it_needs_is_there(served: Served, channel: grpc.aio.Channel) -> None:
    """The server as a whole serves meanwhile; who watches is told of each change."""
    stub, states = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
    assert served.server._health._look_seconds == 1.0
    served.server._health._look_seconds = 0.01
    for name, need in ((PLACEMENT_SERVICE, "can_lease"), (GENERATION_SERVICE, "can_generate")):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        for is_there in (True, False, True):
            setattr(served.engine, need, is_there)
            expected = states.SERVING if is_there else states.NOT_SERVING
            assert (await watch.read()).status == expected
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == expected
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
        watch.cancel()
    served.server._health._look_seconds = 60.0
    looks = Mock(return_value=True)
    served.server._health._services[GENERATION_SERVICE] = looks
    for _ in range(20):
        await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION_SERVICE))
    assert looks.call_count <= 1, "who needs no token keeps nobody busy with it"
    check = await stub.Check(health_pb2.HealthCheckRequest(service=ROLLOUT_SERVICE))
    assert check.status == states.NOT_SERVING, "this server executes no steps"


async def test_health_tells_of_a_journal_that_has_failed(served: Served, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    served.engine.can_record = False
    for name in ("", SCHEDULER_SERVICE):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_who_watches_health_without_a_token_takes_no_stream_from_who_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boundary, "_MAX_STREAMS_FOR_ALL", 2)
    served = await serve(FakeEngine(), max_streams=2)
    async with grpc.aio.insecure_channel(served.address) as channel, SchedulerClient(served.address) as client:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await anext(client.watch())
    await served.server.stop()


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    reply = await call.read()
    assert SCHEDULER_SERVICE in [entry.name for entry in reply.list_services_response.service]


async def test_a_port_in_use_is_refused(served: Served) -> None:
    second = ApiServer(FakeEngine(), "1", ServerSettings(listen=served.address))
    with pytest.raises(ConfigError, match=r"server\.listen: cannot listen on"):
        second.bind()
    await second.stop()


async def test_a_unix_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    served = await serve(FakeEngine(), listen=f"unix:{tmp_path_factory.mktemp('s')}/s")
    async with SchedulerClient.connect(served.address) as client:
        assert (await client.server_info()).version == "1.2.3"
    await served.server.stop()


@pytest.mark.slow
async def test_a_client_that_pings_too_often_is_not_cut_off(served: Served) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(served.address, options=options) as channel:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(WATCH)
        watch = call(b"")
        await watch.read()
        # Pings are the transport's own: only time shows whether the server holds them against the client. gRPC pings
        # once a second at most, and a server with its defaults ends the connection at the third.
        await asyncio.sleep(4.0)
        await served.engine.finish("s-1-0")
        assert await watch.read()
        watch.cancel()
