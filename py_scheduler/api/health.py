"""grpc.health.v1: whether the server, and each of its services, serves.

Nothing does once the server stops, nor while its event loop is known to stand still for long. Besides, each service
says for itself whether what it needs is there; the server as a whole needs nothing but a journal that works.

Not grpc_health's own servicer: there, the first of two watchers of a service that leaves deafens the other.
"""

# ruff: noqa: N802, ARG002 - names and signatures are the proto's

from __future__ import annotations

import asyncio
import math
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from py_scheduler.api.boundary import CallRefusedError
from py_scheduler.scheduler.notifier import Notifier, rings_within

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import grpc.aio

    from py_scheduler.api.boundary import OutgoingStream

    Context = grpc.aio.ServicerContext[Any, Any]

_States = health_pb2.HealthCheckResponse


_LOOK_SECONDS = 1.0
"""How often a service is asked for its state at most, however many want to know, and while it is watched: what it
needs tells nobody of coming and going.
"""


class HealthServicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # grpc_health has no types
    """services: by name, whether what each needs is there. The empty name is the server as a whole."""

    def __init__(self, services: Mapping[str, Callable[[], bool]], look_seconds: float = _LOOK_SECONDS) -> None:
        self._services = dict(services)
        self._look_seconds = look_seconds
        self._seen: dict[str, tuple[float, bool]] = {}
        """When each service was asked last, and what it said."""
        self._is_stopping = False
        self._is_blocked = False
        self._is_ended = False
        self._news = Notifier()

    def stop_serving(self) -> None:
        """NOT_SERVING from now on; watchers are told."""
        self._is_stopping = True
        self._news.ring()

    def set_blocked(self, is_blocked: bool) -> None:
        """Whether the event loop stands still again and again."""
        self._is_blocked = is_blocked
        self._news.ring()

    def end_streams(self) -> None:
        self._is_ended = True
        self._news.ring()

    def _state(self, service: str) -> Any:
        if service not in self._services:
            return _States.SERVICE_UNKNOWN
        is_down = self._is_stopping or self._is_blocked or not self._has_what_it_needs(service)
        return _States.NOT_SERVING if is_down else _States.SERVING

    def _has_what_it_needs(self, service: str) -> bool:
        now = asyncio.get_running_loop().time()
        asked_at, answer = self._seen.get(service, (-math.inf, False))
        if now - asked_at >= self._look_seconds:
            answer = self._services[service]()
            self._seen[service] = now, answer
        return answer

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._services:
            raise CallRefusedError(grpc.StatusCode.NOT_FOUND, "no such service on this server")
        return _States(status=self._state(request.service))

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: OutgoingStream) -> None:
        told: Any = None
        while True:
            news, state = self._news.next_ring(), self._state(request.service)
            if state != told:
                told = state
                await context.write(_States(status=state))
            elif self._is_ended:
                return
            else:
                await rings_within(self._look_seconds, news)
