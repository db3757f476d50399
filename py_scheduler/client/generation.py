"""The asyncio client of the generation service, for trainers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1.generation_service_pb2_grpc import GenerationServiceStub
from py_scheduler.client.connection import CALL_SECONDS, ServiceClient
from py_scheduler.domain.generation import STUDENT, Endpoints, PauseMode, WeightUpdate
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from py_scheduler.wire import generation as wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from py_scheduler.domain.generation import EndpointView, GenerationState

UPDATE_SECONDS = 600.0


class GenerationClient(ServiceClient):
    """Pauses the language models, changes their weights and names their servers. Takes what SchedulerClient takes.

    Every method may be called again, and answers how generation stands then. Each raises FailedPreconditionError for a
    generation backend that cannot be controlled, NotFoundError for a role without one, EngineUnavailableError for one
    that does not answer, InvalidArgumentError and ServerError.
    """

    async def pause(
        self, mode: PauseMode = PauseMode.ABORT, *, role: str = STUDENT, timeout_seconds: float = CALL_SECONDS
    ) -> GenerationState:
        """Holds new generations and pauses the backend; nothing is generated any more when this returns.

        Raises FailedPreconditionError also when the backend is paused in another mode.
        """
        request = wire.encode_pause_request(role, mode)
        reply = await self._connection.call(lambda: self._stub.PauseGeneration, request, timeout_seconds)
        return wire.decode_state(reply.state)

    async def resume(self, *, role: str = STUDENT, timeout_seconds: float = CALL_SECONDS) -> GenerationState:
        """Lets the backend go on, and lets what was held begin."""
        request = service.ContinueGenerationRequest(role=role)
        reply = await self._connection.call(lambda: self._stub.ContinueGeneration, request, timeout_seconds)
        return wire.decode_state(reply.state)

    async def update_weights(
        self, model_path: str, weight_version: str, *, role: str = STUDENT, timeout_seconds: float = UPDATE_SECONDS
    ) -> GenerationState:
        """Has the backend load weights from an absolute path on its own machine. One that is paused stays paused.

        Raises EngineRejectedError, with the backend's reason, when it cannot load them.
        """
        request = wire.encode_update_request(role, WeightUpdate(model_path=model_path, weight_version=weight_version))
        reply = await self._connection.call(lambda: self._stub.UpdateWeights, request, timeout_seconds)
        return wire.decode_state(reply.state)

    async def weights_changed(
        self, weight_version: str, *, role: str = STUDENT, timeout_seconds: float = CALL_SECONDS
    ) -> GenerationState:
        """Says that you have put weights into the backend yourself, over NCCL or as tensors. Loads nothing: it counts
        the change, and the servers call their weights `weight_version` from now on.

        Call it inside the `paused` block that the push was in: raises FailedPreconditionError while the role is not
        paused, or has no servers.
        """
        request = service.ReportWeightsRequest(role=role, weight_version=weight_version)
        reply = await self._connection.call(lambda: self._stub.ReportWeights, request, timeout_seconds)
        return wire.decode_state(reply.state)

    async def set_endpoints(
        self,
        role: str,
        urls: Sequence[str] | None,
        *,
        control_urls: Sequence[str] = (),
        timeout_seconds: float = CALL_SECONDS,
    ) -> tuple[EndpointView, ...]:
        """Names all servers of a role, such as "http://10.0.0.1:30000", in place of those before; none: generations
        wait. One router, with the workers behind it as control_urls. Returns at once: `endpoints` tells how each does.

        A new one gets generations once it is up and was seen to have the same model and weights. One that is named no
        more gets none, and finishes what it runs. The list survives a restart of the scheduler, and counts in place of
        the configuration's until another is set; urls=None goes back to the configuration's.

        Raises InvalidArgumentError for what is no address or named twice, FailedPreconditionError for a role whose
        servers cannot be named; nothing is changed then.
        """
        if isinstance(urls, str) or isinstance(control_urls, str):
            raise InvalidArgumentError(
                "is one string: give a list of addresses", "urls" if isinstance(urls, str) else "control_urls"
            )
        endpoints = None if urls is None else Endpoints(urls=tuple(urls), control_urls=tuple(control_urls))
        request = wire.encode_endpoints_request(role, endpoints)
        reply = await self._connection.call(lambda: self._stub.SetEndpoints, request, timeout_seconds)
        return wire.decode_endpoints(reply.endpoints)

    async def endpoints(self) -> dict[str, tuple[EndpointView, ...]]:
        """The servers of each role that `set_endpoints` can name, and how each stands."""
        reply = await self._connection.call(lambda: self._stub.GetEndpoints, service.GetEndpointsRequest())
        return {entry.role: wire.decode_endpoints(entry.endpoints) for entry in reply.roles}

    async def states(self) -> dict[str, GenerationState]:
        """How generation stands in every role. The server asks the backends for that: whoever changes weights without
        this client calls it afterwards, so that the change is noticed before anything is generated.
        """
        reply = await self._connection.call(lambda: self._stub.GetGenerationState, service.GetGenerationStateRequest())
        return {state.role: wire.decode_state(state) for state in reply.states}

    @asynccontextmanager
    async def paused(self, mode: PauseMode = PauseMode.ABORT, *, role: str = STUDENT) -> AsyncIterator[GenerationState]:
        """A block in which nothing is generated. Generation resumes at its end, however that comes.

        It also resumes when the pause failed, since the backend may be paused nevertheless. When the server refused the
        pause, nothing resumes: the backend may be in somebody else's pause.
        """
        try:
            state = await self.pause(mode, role=role)
        except (FailedPreconditionError, InvalidArgumentError, NotFoundError):
            raise
        except BaseException:
            await self.resume(role=role)
            raise
        try:
            yield state
        finally:
            await self.resume(role=role)

    @property
    def _stub(self) -> GenerationServiceStub:
        return self._connection.stub(GenerationServiceStub)
