"""SchedulerService on an engine."""

# ruff: noqa: N802, ARG002 - names and signatures are the proto's

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import collecting_pb2, runner_pb2, scheduler_service_pb2_grpc
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.api.boundary import caller, time_to_answer
from py_scheduler.api.servicers.collects import Collects
from py_scheduler.api.servicers.watches import Watches
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire import requests as wire
from py_scheduler.wire.collecting import (
    decode_ack_request,
    decode_collect_request,
    decode_discard_request,
    decode_drain_request,
    encode_chunks,
)
from py_scheduler.wire.common.cursor import CursorCodec
from py_scheduler.wire.explanations import decode_explain_request, encode_explanation
from py_scheduler.wire.runners import encode_runners

if TYPE_CHECKING:
    import grpc.aio

    from py_scheduler.api.boundary import OutgoingStream
    from py_scheduler.api.ports import EnginePort
    from py_scheduler.api.security.bearer_tokens import Caller
    from py_scheduler.domain.explanations import TaskExplanation

    Context = grpc.aio.ServicerContext[Any, Any]


class SchedulerServicer(scheduler_service_pb2_grpc.SchedulerServiceServicer):
    """Decode, call the engine, encode. Errors travel to the boundary."""

    def __init__(
        self, engine: EnginePort, version: str, max_tasks_per_call: int, disconnect_grace_seconds: float = 10.0
    ) -> None:
        self._engine = engine
        self._version = version
        self._max_tasks_per_call = max_tasks_per_call
        self.watches = Watches(engine, disconnect_grace_seconds)
        self._collects = Collects(engine)

    async def SubmitTasks(self, request: service.SubmitTasksRequest, context: Context) -> service.SubmitTasksResponse:
        submit = wire.decode_submit_request(request, self._max_tasks_per_call)
        reply = await self._engine.submit(submit)
        return wire.encode_submit_reply(reply, submit.key.namespace, self._engine.store_epoch)

    async def GetSubmission(
        self, request: service.GetSubmissionRequest, context: Context
    ) -> service.GetSubmissionResponse:
        return wire.encode_submission(self._engine.submission(wire.decode_get_request(request)))

    async def ExplainTask(self, request: service.ExplainTaskRequest, context: Context) -> service.ExplainTaskResponse:
        explanation = self._engine.explain_task(*decode_explain_request(request))
        return encode_explanation(seen_by(caller(), explanation))

    async def AbortSubmission(
        self, request: service.AbortSubmissionRequest, context: Context
    ) -> service.AbortSubmissionResponse:
        reply = await self._engine.abort(wire.decode_abort_request(request, time_to_answer(context)))
        return wire.encode_abort_reply(reply)

    async def ResumeTraining(
        self, request: service.ResumeTrainingRequest, context: Context
    ) -> service.ResumeTrainingResponse:
        epoch = await self._engine.resume_training(wire.decode_resume_training_request(request))
        return wire.encode_resume_training_reply(epoch)

    async def GetServerInfo(
        self, request: service.GetServerInfoRequest, context: Context
    ) -> service.GetServerInfoResponse:
        return wire.encode_server_info(await self._engine.server_info(self._version))

    async def AckEvents(self, request: service.AckEventsRequest, context: Context) -> service.AckEventsResponse:
        event_filter = wire.decode_filter(request.filter)
        cursors = CursorCodec(self._engine.store_epoch, event_filter, self._engine.oldest_sequence)
        through = cursors.decode(request.cursor)
        if through is None:
            raise InvalidArgumentError("is empty: give that of the last frame that was read", "cursor")
        return service.AckEventsResponse(oldest_sequence=self._engine.acknowledge(event_filter, through))

    async def WatchEvents(  # type: ignore[override] # writes to the context instead of yielding
        self, request: service.WatchEventsRequest, context: OutgoingStream
    ) -> None:
        event_filter = wire.decode_filter(request.filter)
        cursors = CursorCodec(self._engine.store_epoch, event_filter, self._engine.oldest_sequence)
        after = cursors.decode(request.cursor)
        await self.watches.watch(
            event_filter, after, cursors, context, cancel_on_disconnect=request.cancel_on_disconnect
        )

    async def CollectResults(  # type: ignore[override] # as above
        self, request: collecting_pb2.CollectResultsRequest, context: OutgoingStream
    ) -> None:
        reply = await self._collects.collect(decode_collect_request(request), context)
        for parts in encode_chunks(reply):
            await context.write(collecting_pb2.CollectResultsResponse(parts=parts))

    async def DrainSubmission(  # type: ignore[override] # as above
        self, request: collecting_pb2.DrainSubmissionRequest, context: OutgoingStream
    ) -> None:
        reply = await self._engine.results.drain(decode_drain_request(request))
        for parts in encode_chunks(reply):
            await context.write(collecting_pb2.DrainSubmissionResponse(parts=parts))

    async def AckResults(
        self, request: collecting_pb2.AckResultsRequest, context: Context
    ) -> collecting_pb2.AckResultsResponse:
        await self._engine.results.acknowledge(*decode_ack_request(request))
        return collecting_pb2.AckResultsResponse()

    async def DiscardSubmission(
        self, request: collecting_pb2.DiscardSubmissionRequest, context: Context
    ) -> collecting_pb2.DiscardSubmissionResponse:
        await self._engine.results.discard(*decode_discard_request(request))
        return collecting_pb2.DiscardSubmissionResponse()

    async def ListRunners(
        self, request: runner_pb2.ListRunnersRequest, context: Context
    ) -> runner_pb2.ListRunnersResponse:
        return encode_runners(self._engine.runner_views())

    def end_streams(self) -> None:
        """Lets every watch and every wait for results end, with a status that says how to go on."""
        self._collects.end()
        self.watches.end()


def seen_by(who: Caller, explanation: TaskExplanation) -> TaskExplanation:
    """Without the batch ids of namespaces that are none of the caller's: it may know how much is ahead, not whose."""
    replace = msgspec.structs.replace
    return replace(
        explanation,
        waits=tuple(
            replace(
                wait,
                ahead=tuple(
                    entry if who.may_use(entry.namespace) else replace(entry, namespace="", batch_id=None)
                    for entry in wait.ahead
                ),
            )
            for wait in explanation.waits
        ),
    )
