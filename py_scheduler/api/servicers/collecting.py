"""The calls of SchedulerService by which a trainer pulls results.

Invariant: a call that has not begun to stream has handed nothing out; one that has is repeated under its request id.
"""

# ruff: noqa: N802, ARG002 - names and signatures are the proto's

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc

from py_scheduler._generated.rollout_scheduler.v1 import collecting_pb2, runner_pb2
from py_scheduler.api.boundary import CallRefusedError
from py_scheduler.wire.collecting import (
    decode_ack_request,
    decode_collect_request,
    decode_discard_request,
    decode_drain_request,
    encode_chunks,
)
from py_scheduler.wire.runners import encode_runners

if TYPE_CHECKING:
    import grpc.aio

    from py_scheduler.api.boundary import OutgoingStream
    from py_scheduler.api.servicers.engine_port import EnginePort
    from py_scheduler.domain.collecting import CollectReply, CollectRequest

    Context = grpc.aio.ServicerContext[Any, Any]

_STOPPING = "the server is stopping: collect again with the same request_id"


class CollectingServicer:
    """The part of SchedulerServicer that hands out results. Decode, call the engine, encode."""

    def __init__(self, engine: EnginePort) -> None:
        self._engine = engine
        self._waits: set[asyncio.Task[Any]] = set()
        self._is_stopping = False

    async def CollectResults(self, request: collecting_pb2.CollectResultsRequest, context: OutgoingStream) -> None:
        reply = await self._wait(decode_collect_request(request), context)
        for parts in encode_chunks(reply):
            await context.write(collecting_pb2.CollectResultsResponse(parts=parts))

    async def DrainSubmission(self, request: collecting_pb2.DrainSubmissionRequest, context: OutgoingStream) -> None:
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

    async def _wait(self, request: CollectRequest, context: OutgoingStream) -> CollectReply:
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

    def end_waits(self) -> None:
        """Lets every call that waits for results end, with a status that says to repeat it."""
        self._is_stopping = True
        for task in self._waits:
            task.cancel()
