"""SchedulerService on an engine.

Invariant: a watch ends its subscription in the task of its own call, whichever way the call ends, so a client that goes
away leaves nothing behind.
"""

# ruff: noqa: N802, ARG002 - names and signatures are the proto's

from __future__ import annotations

import asyncio
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any, cast

import grpc
import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc
from py_scheduler.api.boundary import CallRefusedError, caller
from py_scheduler.api.disconnect_guard import DisconnectGuard
from py_scheduler.api.servicers.collecting import CollectingServicer
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire import requests as wire
from py_scheduler.wire.common.cursor import CursorCodec
from py_scheduler.wire.events import encode_frames
from py_scheduler.wire.explanations import decode_explain_request, encode_explanation

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import grpc.aio

    from py_scheduler.api.boundary import OutgoingStream
    from py_scheduler.api.security.bearer_tokens import Caller
    from py_scheduler.api.servicers.engine_port import EnginePort
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.requests import EventFrame

    Context = grpc.aio.ServicerContext[Any, Any]

_ANSWER_MARGIN_SECONDS = 0.25
"""How long before its deadline a waiting call is answered, so that the answer arrives in time."""


class _Stream:
    """One open watch. `idle`: it waits for the engine, so cancelling it interrupts no write."""

    __slots__ = ("idle", "task", "through_sequence")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.idle = False
        self.through_sequence = 0


class SchedulerServicer(CollectingServicer, scheduler_service_pb2_grpc.SchedulerServiceServicer):  # type: ignore[misc]
    """Decode, call the engine, encode. Errors travel to the boundary."""

    def __init__(
        self, engine: EnginePort, version: str, max_tasks_per_call: int, disconnect_grace_seconds: float = 10.0
    ) -> None:
        super().__init__(engine)
        self._version = version
        self._max_tasks_per_call = max_tasks_per_call
        self._streams: set[_Stream] = set()
        self._ending = False
        self._tethers = DisconnectGuard(engine, disconnect_grace_seconds)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

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
        task = asyncio.current_task()
        if task is None:
            message = "a watch runs in the task of its call"
            raise RuntimeError(message)
        if request.cancel_on_disconnect and not event_filter.submission_id:
            raise InvalidArgumentError("needs a filter with a submission_id", "cancel_on_disconnect")
        stream = _Stream(task)
        self._streams.add(stream)
        tether = self._tethers.held(event_filter) if request.cancel_on_disconnect else nullcontext()
        try:
            # The port promises no more than an iterator; what `async def` with yield makes can be closed as well.
            watch = cast("AsyncGenerator[EventFrame, None]", self._engine.watch(event_filter, after))
            async with aclosing(watch) as frames:
                with tether:
                    await self._pump(stream, frames, cursors, context)
        finally:
            self._streams.discard(stream)
        raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the server is stopping: resume from the last cursor")

    async def _pump(
        self, stream: _Stream, frames: AsyncGenerator[EventFrame, None], cursors: CursorCodec, context: OutgoingStream
    ) -> None:
        """Returns when the server is stopping and everything that happened has been sent."""
        while not (self._ending and stream.through_sequence >= self._engine.last_sequence):
            stream.idle = True
            try:
                frame = await anext(frames, None)
            except asyncio.CancelledError:
                if self._ending and not context.cancelled():
                    stream.task.uncancel()
                    return
                raise
            finally:
                stream.idle = False
            if frame is None:
                return
            for encoded in encode_frames(frame, cursors):
                await context.write(encoded)
            stream.through_sequence = frame.through_sequence

    def end_streams(self) -> None:
        """Lets every watch send what has happened until now and end, with a status that says to resume."""
        self._ending = True
        self.end_waits()
        self._tethers.close()
        for stream in self._streams:
            if stream.idle and stream.through_sequence >= self._engine.last_sequence:
                stream.task.cancel()


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


def time_to_answer(context: Any) -> float | None:
    """Seconds a call may wait so that its answer arrives in time; None without a deadline."""
    remaining: float | None = context.time_remaining()
    return None if remaining is None else max(0.0, remaining - min(_ANSWER_MARGIN_SECONDS, remaining / 4))
