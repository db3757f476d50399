"""GenerationService on an engine's gateway."""

# ruff: noqa: N802, ARG002 - names and signatures are the proto's

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2_grpc
from py_scheduler.wire import generation as wire

if TYPE_CHECKING:
    import grpc.aio

    from py_scheduler.api.ports import EnginePort

    Context = grpc.aio.ServicerContext[Any, Any]


class GenerationServicer(generation_service_pb2_grpc.GenerationServiceServicer):
    """Decode, call the gateway, encode. Errors travel to the boundary."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine

    async def PauseGeneration(
        self, request: service.PauseGenerationRequest, context: Context
    ) -> service.PauseGenerationResponse:
        state = await self._engine.generation.pause(*wire.decode_pause_request(request))
        return service.PauseGenerationResponse(state=wire.encode_state(state))

    async def ContinueGeneration(
        self, request: service.ContinueGenerationRequest, context: Context
    ) -> service.ContinueGenerationResponse:
        state = await self._engine.generation.resume(wire.decode_continue_request(request))
        return service.ContinueGenerationResponse(state=wire.encode_state(state))

    async def UpdateWeights(
        self, request: service.UpdateWeightsRequest, context: Context
    ) -> service.UpdateWeightsResponse:
        state = await self._engine.generation.update_weights(*wire.decode_update_request(request))
        return service.UpdateWeightsResponse(state=wire.encode_state(state))

    async def ReportWeights(
        self, request: service.ReportWeightsRequest, context: Context
    ) -> service.ReportWeightsResponse:
        state = await self._engine.generation.weights_changed(*wire.decode_report_request(request))
        return service.ReportWeightsResponse(state=wire.encode_state(state))

    async def SetEndpoints(
        self, request: service.SetEndpointsRequest, context: Context
    ) -> service.SetEndpointsResponse:
        views = await self._engine.generation.set_endpoints(*wire.decode_endpoints_request(request))
        return service.SetEndpointsResponse(endpoints=map(wire.encode_endpoint, views))

    async def GetEndpoints(
        self, request: service.GetEndpointsRequest, context: Context
    ) -> service.GetEndpointsResponse:
        views = self._engine.generation.endpoints()
        return service.GetEndpointsResponse(roles=[wire.encode_role_endpoints(*entry) for entry in views.items()])

    async def GetGenerationState(
        self, request: service.GetGenerationStateRequest, context: Context
    ) -> service.GetGenerationStateResponse:
        states = await self._engine.generation.states(*wire.decode_state_request(request))
        return service.GetGenerationStateResponse(states=map(wire.encode_state, states))
