"""The gRPC server: its services, its options, its start and its graceful stop."""

from __future__ import annotations

import errno
import socket
from pathlib import Path
from typing import TYPE_CHECKING

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from py_scheduler._generated.rollout_scheduler.v1 import (
    generation_service_pb2,
    generation_service_pb2_grpc,
    placement_service_pb2,
    placement_service_pb2_grpc,
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    scheduler_service_pb2,
    scheduler_service_pb2_grpc,
)
from py_scheduler.api.boundary import Boundary
from py_scheduler.api.health import HealthServicer
from py_scheduler.api.security.access import Access
from py_scheduler.api.security.bearer_tokens import BearerTokens
from py_scheduler.api.security.tls import grpc_credentials
from py_scheduler.api.servicers.generation import GenerationServicer
from py_scheduler.api.servicers.placement import PlacementServicer
from py_scheduler.api.servicers.rollout import RolloutServicer
from py_scheduler.api.servicers.scheduler import SchedulerServicer
from py_scheduler.config import UNIX_PREFIX, is_local
from py_scheduler.errors import ConfigError

if TYPE_CHECKING:
    from py_scheduler.api.ports import EnginePort, RolloutPort
    from py_scheduler.config import ServerSettings

SCHEDULER_SERVICE = scheduler_service_pb2.DESCRIPTOR.services_by_name["SchedulerService"].full_name
PLACEMENT_SERVICE = placement_service_pb2.DESCRIPTOR.services_by_name["PlacementService"].full_name
ROLLOUT_SERVICE = rollout_service_pb2.DESCRIPTOR.services_by_name["RolloutService"].full_name
GENERATION_SERVICE = generation_service_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
_OWN_SERVICES = (SCHEDULER_SERVICE, PLACEMENT_SERVICE, ROLLOUT_SERVICE, GENERATION_SERVICE)
HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
_STREAMS_END_SECONDS = 3.0


class ApiServer:
    """Serves an engine, and a step service that executes steps over it, which somebody else starts and stops."""

    def __init__(
        self, engine: EnginePort, version: str, settings: ServerSettings, rollouts: RolloutPort | None = None
    ) -> None:
        """Raises ConfigError for files of tokens or certificates that are no good."""
        self._settings = settings
        self.tokens = BearerTokens(Path(settings.tokens_file)) if settings.tokens_file else None
        self._credentials = grpc_credentials(settings.tls) if settings.tls.is_on else None
        self._servicer = SchedulerServicer(
            engine, version, settings.max_tasks_per_call, settings.disconnect_grace_seconds
        )
        self._health = HealthServicer(
            {
                "": lambda: engine.can_record,
                SCHEDULER_SERVICE: lambda: engine.can_record,
                PLACEMENT_SERVICE: lambda: engine.can_lease,
                ROLLOUT_SERVICE: lambda: rollouts is not None,
                GENERATION_SERVICE: lambda: engine.can_generate,
            }
        )
        boundary = Boundary(Access(self.tokens), settings.max_streams, settings.stalled_stream_seconds)
        self._server = grpc.aio.server(interceptors=[boundary], options=_options(settings))
        scheduler_service_pb2_grpc.add_SchedulerServiceServicer_to_server(self._servicer, self._server)
        placement_service_pb2_grpc.add_PlacementServiceServicer_to_server(PlacementServicer(engine), self._server)
        rollout_service_pb2_grpc.add_RolloutServiceServicer_to_server(RolloutServicer(engine, rollouts), self._server)
        generation_service_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(engine), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if _wants_reflection(settings):
            names = [*_OWN_SERVICES, HEALTH_SERVICE, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)

    @property
    def open_streams(self) -> int:
        return self._servicer.watches.open_streams

    def bind(self) -> str:
        """Takes the port and returns the address with it. Raises ConfigError when it cannot be had.

        Apart from `start`, so that a port in use is known before a model is loaded.
        """
        listen = self._settings.listen
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(listen)
            else:
                port = self._server.add_secure_port(listen, self._credentials)
        except RuntimeError as error:
            raise ConfigError(
                f"cannot listen on {listen}: {_why_not(listen)}",
                "server.listen",
            ) from error
        return listen if listen.startswith(UNIX_PREFIX) else f"{listen.rpartition(':')[0]}:{port}"

    async def start(self) -> None:
        await self._server.start()

    def stop_serving(self) -> None:
        """Health says NOT_SERVING; calls are still answered, streams go on."""
        self._health.stop_serving()

    def loop_is_blocked(self, is_blocked: bool) -> None:
        """Health says NOT_SERVING while the event loop stands still again and again."""
        self._health.set_blocked(is_blocked)

    async def stop(self) -> None:
        """Streams end with a cursor to resume from; what does not end is cut off after three seconds."""
        self._health.stop_serving()
        self._health.end_streams()
        self._servicer.end_streams()
        await self._server.stop(_STREAMS_END_SECONDS)


def _wants_reflection(settings: ServerSettings) -> bool:
    """By default only where everybody who reaches the port may call anyway."""
    if settings.reflection is not None:
        return settings.reflection
    return not settings.tokens_file and is_local(settings.listen)


def _why_not(listen: str) -> str:
    """gRPC does not say; a plain socket does."""
    if listen.startswith(UNIX_PREFIX):
        return "its folder is not there or may not be written, or a server is using the socket"
    host, _, port = listen.rpartition(":")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return "the port is taken: choose another, or port 0 for any free one"
        if error.errno == errno.EADDRNOTAVAIL or isinstance(error, socket.gaierror):
            return "the host is not one of this machine: name one of its addresses, such as 127.0.0.1"
        return f"{error.strerror}: choose another port, or port 0 for any free one"
    return "the port was taken until just now: try again"


def _options(settings: ServerSettings) -> list[tuple[str, int]]:
    keepalive_ms = round(settings.keepalive_seconds * 1_000)
    return [
        # Two servers on one port would share the calls, and each would know half of the submissions.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # A client that pings too often costs little; one that is cut off for it loses its stream.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 500),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 0),
        # Notices a client whose machine vanished without a word, so that its watch is freed.
        ("grpc.keepalive_time_ms", keepalive_ms),
        ("grpc.keepalive_timeout_ms", min(keepalive_ms, 20_000)),
        ("grpc.max_metadata_size", 64 * 1024),
    ]
