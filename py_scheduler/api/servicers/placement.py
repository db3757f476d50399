"""PlacementService on an engine's lease manager."""

# ruff: noqa: N802, ARG002 - names and signatures are the proto's

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler._generated.rollout_scheduler.v1 import placement_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import placement_service_pb2_grpc
from py_scheduler.api.boundary import time_to_answer
from py_scheduler.wire import placement as wire

if TYPE_CHECKING:
    import grpc.aio

    from py_scheduler.api.ports import EnginePort

    Context = grpc.aio.ServicerContext[Any, Any]


class PlacementServicer(placement_service_pb2_grpc.PlacementServiceServicer):
    """Decode, call the lease manager, encode. Errors travel to the boundary."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine

    async def AcquireLease(
        self, request: service.AcquireLeaseRequest, context: Context
    ) -> service.AcquireLeaseResponse:
        acquire = wire.decode_acquire_request(request, time_to_answer(context))
        return wire.encode_lease(await self._engine.leases.acquire(acquire))

    async def RenewLease(self, request: service.RenewLeaseRequest, context: Context) -> service.RenewLeaseResponse:
        seconds = self._engine.leases.renew(wire.decode_renew_request(request))
        return service.RenewLeaseResponse(expires_in_seconds=seconds)

    async def ReleaseLease(
        self, request: service.ReleaseLeaseRequest, context: Context
    ) -> service.ReleaseLeaseResponse:
        return wire.encode_release_reply(self._engine.leases.release(wire.decode_release_request(request)))

    async def GetCapacity(self, request: service.GetCapacityRequest, context: Context) -> service.GetCapacityResponse:
        return wire.encode_capacity(self._engine.leases.capacity(wire.decode_capacity_request(request)))

    async def ExplainPlacement(
        self, request: service.ExplainPlacementRequest, context: Context
    ) -> service.ExplainPlacementResponse:
        return wire.encode_placement(self._engine.leases.explain(wire.decode_explain_request(request)))
