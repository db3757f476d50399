"""SchedulerService on an engine.

Invariants
  1. A watch ends its subscription in the task of its own call, whichever way the call ends, so a client that goes away
     leaves nothing behind.
  2. A collect that has not begun to stream has handed nothing out; one that has is repeated under its request id.
"""

# ruff: noqa: N802, ARG002 - names and signatures are the proto's

from __future__ import annotations

import asyncio
from contextlib import aclosing, nullcontext
from typing import TYPE_CHECKING, Any, cast

import grpc
import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import collecting_pb2, runner_pb2, scheduler_service_pb2_grpc
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.api.boundary import CallRefusedError, caller, large_message_bytes, time_to_answer
from py_scheduler.api.disconnect_guard import DisconnectGuard
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
from py_scheduler.wire.envelopes import SubmitEnvelope, decode_envelope
from py_scheduler.wire.events import encode_frames
from py_scheduler.wire.explanations import decode_explain_request, encode_explanation
from py_scheduler.wire.runners import encode_runners

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    import grpc.aio

    from py_scheduler.api.boundary import OutgoingStream
    from py_scheduler.api.ports import EnginePort
    from py_scheduler.api.security.bearer_tokens import Caller
    from py_scheduler.domain.collecting import CollectReply, CollectRequest
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.requests import EventFilter, EventFrame

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
        if isinstance(request, SubmitEnvelope):
            key, reading = decode_envelope(request, self._max_tasks_per_call)
            reply = await self._engine.submit_as_read(key, reading, size=large_message_bytes())
        else:
            submit = wire.decode_submit_request(request, self._max_tasks_per_call)
            key = submit.key
            reply = await self._engine.submit(submit)
        return wire.encode_submit_reply(reply, key.namespace, self._engine.store_epoch)

    async def GetSubmission(
        self, request: service.GetSubmissionRequest, context: Context
    ) -> service.GetSubmissionResponse:
        return wire.encode_submission(self._engine.submission(wire.decode_get_request(request)))

    async def ExplainTask(self, request: service.ExplainTaskRequest, context: Context) -> service.ExplainTaskResponse:
        explanation = await self._engine.explain_task(*decode_explain_request(request))
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


class _Stream:
    """One open watch. `idle`: it waits for the engine, so cancelling it interrupts no write."""

    __slots__ = ("idle", "task", "through_sequence")

    def __init__(self, task: asyncio.Task[Any]) -> None:
        self.task = task
        self.idle = False
        self.through_sequence = 0


class Watches:
    """The watches of one server. disconnect_grace_seconds: see DisconnectGuard."""

    def __init__(self, engine: EnginePort, disconnect_grace_seconds: float) -> None:
        self._engine = engine
        self._streams: set[_Stream] = set()
        self._is_ending = False
        self.guard = DisconnectGuard(engine, disconnect_grace_seconds)

    @property
    def open_streams(self) -> int:
        return len(self._streams)

    async def watch(
        self,
        event_filter: EventFilter,
        after: int | None,
        cursors: CursorCodec,
        context: OutgoingStream,
        *,
        cancel_on_disconnect: bool,
    ) -> None:
        """Writes events to the context until the client goes. Raises CallRefusedError when the server stops."""
        task = asyncio.current_task()
        if task is None:
            message = "a watch runs in the task of its call"
            raise RuntimeError(message)
        if cancel_on_disconnect and not event_filter.submission_id:
            raise InvalidArgumentError("needs a filter with a submission_id", "cancel_on_disconnect")
        stream = _Stream(task)
        self._streams.add(stream)
        guarded = self.guard.watched(event_filter) if cancel_on_disconnect else nullcontext()
        try:
            # The port promises no more than an iterator; what `async def` with yield makes can be closed as well.
            watch = cast("AsyncGenerator[EventFrame, None]", self._engine.watch(event_filter, after))
            async with aclosing(watch) as frames:
                with guarded:
                    await self._pump(stream, frames, cursors, context)
        finally:
            self._streams.discard(stream)
        raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "the server is stopping: resume from the last cursor")

    async def _pump(
        self, stream: _Stream, frames: AsyncGenerator[EventFrame, None], cursors: CursorCodec, context: OutgoingStream
    ) -> None:
        """Returns when the server is stopping and everything that happened has been sent."""
        while not (self._is_ending and stream.through_sequence >= self._engine.last_sequence):
            stream.idle = True
            try:
                frame = await anext(frames, None)
            except asyncio.CancelledError:
                if self._is_ending and not context.cancelled():
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

    def end(self) -> None:
        """Lets every watch send what has happened until now and end, with a status that says to resume."""
        self._is_ending = True
        self.guard.close()
        for stream in self._streams:
            if stream.idle and stream.through_sequence >= self._engine.last_sequence:
                stream.task.cancel()


_STOPPING = "the server is stopping: collect again with the same request_id"


class Collects:
    """The collects of one server that wait, each in the task of its call."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._waits: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    async def collect(self, request: CollectRequest, context: OutgoingStream) -> CollectReply:
        """Raises CallRefusedError when the server stops before there are results."""
        task = asyncio.current_task()
        assert task is not None, "a call runs in a task of its own"
        self._waits.add(task)
        try:
            if self._is_stopping:
                raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, _STOPPING)
            await context.begin()
            return await self._engine.results.collect(request)
        except asyncio.CancelledError:
            if self._is_stopping and not context.cancelled():
                task.uncancel()
                raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, _STOPPING) from None
            raise
        finally:
            self._waits.discard(task)

    def end(self) -> None:
        """Lets every call that waits for results end, with a status that says to repeat it."""
        self._is_stopping = True
        for task in self._waits:
            task.cancel()
