"""Calls that gRPC resets on the server's side, as it does when there are thousands at once."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.api.server import SCHEDULER_SERVICE
from py_scheduler.client import SchedulerClient
from py_scheduler.errors import ResourceExhaustedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


@asynccontextmanager
async def server_that_resets(times: int) -> AsyncIterator[str]:
    """Its address. It ends so many calls without a word before it answers one."""
    left = times

    async def answer(_request: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
        nonlocal left
        left -= 1
        if left >= 0:
            await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
        return service.GetServerInfoResponse(version="after all").SerializeToString()

    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        [grpc.method_handlers_generic_handler(SCHEDULER_SERVICE, {"GetServerInfo": handler})]
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


async def test_a_call_that_was_broken_off_is_sent_again() -> None:
    async with server_that_resets(2) as address, SchedulerClient.connect(address) as client:
        assert (await client.server_info()).version == "after all"


async def test_calls_that_are_broken_off_again_and_again_say_what_to_do() -> None:
    async with server_that_resets(1_000) as address, SchedulerClient.connect(address, reconnect_seconds=0.2) as client:
        with pytest.raises(ResourceExhaustedError, match="too many are made at once: make fewer"):
            await client.server_info()
