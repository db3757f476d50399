"""RolloutService on a step service that executes steps.

Invariant: a call ends its following in the task of its own call, whichever way the call ends, so the step service knows
at once that a client is gone.
"""

# ruff: noqa: N802 - names and signatures are the proto's

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

import grpc

from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2_grpc
from py_scheduler.api.boundary import CallRefusedError
from py_scheduler.domain.training.steps import StepReport
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.wire import rollouts as wire
from py_scheduler.wire.events import encode_frames
from py_scheduler.wire.training_samples import encode_group

if TYPE_CHECKING:
    from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2 as service
    from py_scheduler.api.boundary import OutgoingStream
    from py_scheduler.api.ports import EnginePort, RolloutPort


class RolloutServicer(rollout_service_pb2_grpc.RolloutServiceServicer):
    """Decode, follow the step, encode. Errors travel to the boundary. step_service: None on a server that executes no
    steps.
    """

    def __init__(self, engine: EnginePort, step_service: RolloutPort | None) -> None:
        self._engine = engine
        self._step_service = step_service

    async def ExecuteRollout(  # type: ignore[override] # writes to the context instead of yielding
        self, request: service.ExecuteRolloutRequest, context: OutgoingStream
    ) -> None:
        await self._follow(request, context)

    async def ExecuteEval(  # type: ignore[override] # as above
        self, request: service.ExecuteEvalRequest, context: OutgoingStream
    ) -> None:
        await self._follow(request, context)

    async def ReadSamples(  # type: ignore[override] # as above
        self, request: service.ReadSamplesRequest, context: OutgoingStream
    ) -> None:
        rollout_id = wire.decode_read_request(request)
        async with aclosing(self._running_service.saved_groups(rollout_id)) as groups:
            group_no = 0
            async for group in groups:
                for encoded in encode_group(group_no, group):
                    await context.write(encoded)
                group_no += 1

    @property
    def _running_service(self) -> RolloutPort:
        if self._step_service is None:
            raise FailedPreconditionError("this server executes no steps: submit tasks with SubmitTasks")
        return self._step_service

    async def _follow(self, message: wire.ExecuteRequest, context: OutgoingStream) -> None:
        request = wire.decode_step_request(message)
        cursors = wire.step_cursors(request, self._engine.store_epoch, self._engine.oldest_sequence)
        after = cursors.decode(message.cursor)
        through = 0
        async with aclosing(self._running_service.follow(request, after)) as following:
            async for item in following:
                if isinstance(item, StepReport):
                    await context.write(wire.encode_report_frame(item, through, cursors))
                    return
                through = item.through_sequence
                for encoded in encode_frames(item, cursors):
                    await context.write(encoded)
        raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the server is stopping: resume from the last cursor")
