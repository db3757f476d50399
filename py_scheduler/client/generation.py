"""The asyncio client of the generation service, for trainers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from py_scheduler._generated.rollout_scheduler.v1 import generation_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1.generation_service_pb2_grpc import GenerationServiceStub
from py_scheduler.client.connection import CALL_SECONDS, ServiceClient
from py_scheduler.domain.generation import STUDENT, PauseMode, WeightUpdate
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError, NotFoundError
from py_scheduler.wire import generation as wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.generation import GenerationState

UPDATE_SECONDS = 600.0


class GenerationClient(ServiceClient):
    """Pauses the language models and changes their weights. Takes what SchedulerClient takes.

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
