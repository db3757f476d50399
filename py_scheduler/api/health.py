"""grpc.health.v1 with one state for all services of the server: serving, or not any more.

Not grpc_health's own servicer: there, the first of two watchers of a service that leaves deafens the other.
"""

# ruff: noqa: N802, ARG002 - names and signatures are the proto's

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from py_scheduler.api.boundary import CallRefusedError

if TYPE_CHECKING:
    from collections.abc import Iterable

    import grpc.aio

    Context = grpc.aio.ServicerContext[Any, Any]


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # grpc_health has no types
    """Knows the services by name; the empty name is the server as a whole."""

    def __init__(self, services: Iterable[str]) -> None:
        self._services = {"", *services}
        self._serving = True
        self._stopping = asyncio.Event()
        self._ended = asyncio.Event()

    def stop_serving(self) -> None:
        """NOT_SERVING from now on; watchers are told."""
        self._serving = False
        self._stopping.set()

    def end_streams(self) -> None:
        self._ended.set()

    def _status(self, service: str) -> health_pb2.HealthCheckResponse:
        if service not in self._services:
            state = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        elif self._serving:
            state = health_pb2.HealthCheckResponse.SERVING
        else:
            state = health_pb2.HealthCheckResponse.NOT_SERVING
        return health_pb2.HealthCheckResponse(status=state)

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, "no such service on this server")
        return self._status(request.service)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        await context.write(self._status(request.service))
        if self._serving:
            await self._stopping.wait()
            await context.write(self._status(request.service))
        await self._ended.wait()
