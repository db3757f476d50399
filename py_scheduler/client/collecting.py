"""Pulling results: the calls by which a trainer takes them.

Invariant: a broken connection loses no result. The call is made again under its request id, and the server forgets
what it gave only once all of it has arrived.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import runner_pb2
from py_scheduler._generated.rollout_scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from py_scheduler.client.connection import StreamCall
from py_scheduler.domain.limits import check_collect
from py_scheduler.errors import InvalidArgumentError, ServerError
from py_scheduler.wire.collecting import (
    CollectReader,
    encode_ack_request,
    encode_collect_request,
    encode_discard_request,
    encode_drain_request,
)
from py_scheduler.wire.runners import decode_runners

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.client.connection import Connection
    from py_scheduler.domain.collecting import CollectReply, CollectRequest
    from py_scheduler.domain.requests import SubmissionSelector
    from py_scheduler.domain.runners.runner import RunnerView

_log = logging.getLogger("py_scheduler.client")


class Results:
    """Results of tasks that were submitted with `Delivery.COLLECT`. `SchedulerClient` says what each call does."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _stub(self) -> SchedulerServiceStub:
        return self._connection.stub(SchedulerServiceStub)

    async def collect(self, request: CollectRequest, *, acknowledge: bool) -> CollectReply:
        if violations := tuple(check_collect(request)):
            # Before the timeout becomes what is left of it, which may hide what was wrong with it.
            raise InvalidArgumentError(violations)
        loop = asyncio.get_running_loop()
        until = loop.time() + request.timeout_seconds

        def call_again() -> StreamCall[Any]:
            left = msgspec.structs.replace(request, timeout_seconds=max(0.0, until - loop.time()))
            return self._stub.CollectResults(encode_collect_request(left), metadata=self._connection.metadata)

        return await self._take(call_again, request, acknowledge=acknowledge)

    async def drain(self, request: CollectRequest, *, acknowledge: bool) -> CollectReply:
        message = encode_drain_request(request)

        def call_again() -> StreamCall[Any]:
            return self._stub.DrainSubmission(message, metadata=self._connection.metadata)

        return await self._take(call_again, request, acknowledge=acknowledge)

    async def acknowledge(self, namespace: str, request_id: str) -> None:
        message = encode_ack_request(namespace, request_id)
        await self._connection.call(lambda: self._stub.AckResults, message)

    async def discard(self, selector: SubmissionSelector, request_id: str) -> None:
        message = encode_discard_request(selector, request_id)
        await self._connection.call(lambda: self._stub.DiscardSubmission, message)

    async def runners(self) -> tuple[RunnerView, ...]:
        request = runner_pb2.ListRunnersRequest()
        return decode_runners(await self._connection.call(lambda: self._stub.ListRunners, request))

    async def _take(
        self, call_again: Callable[[], StreamCall[Any]], request: CollectRequest, *, acknowledge: bool
    ) -> CollectReply:
        reply = await self._read_until_whole(call_again)
        for warning in reply.warnings:
            _log.warning("%s", warning)
        if acknowledge and (reply.results or any(task.is_stopped for task in reply.unfinished)):
            await self.acknowledge(request.namespace, request.request_id)
        return reply

    async def _read_until_whole(self, call_again: Callable[[], StreamCall[Any]]) -> CollectReply:
        backoff = self._connection.backoff()
        while True:
            call = call_again()
            async with self._connection.one_try(call, backoff):
                # It may be long until there is more to read than that the server has taken the call.
                await call.initial_metadata()
                if not call.done():
                    backoff.connected()
                return await self._read_all(call)

    async def _read_all(self, call: StreamCall[Any]) -> CollectReply:
        reader = CollectReader()
        while (message := await self._connection.read(call)) is not None:
            reader.read(message.parts)
        if reader.reply is None:
            raise ServerError("the stream of results ended before its summary", "DATA_LOSS")
        return reader.reply
