"""The calls about submissions: handing tasks in, asking after them, stopping them, and watching their events."""

from __future__ import annotations

import logging
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from py_scheduler.domain.requests import Delivery
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire import requests as wire
from py_scheduler.wire.events import decode_frame
from py_scheduler.wire.explanations import decode_explanation
from py_scheduler.wire.submissions import encode_submission_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    import grpc.aio

    from py_scheduler.client.connection import Connection
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.requests import (
        AbortReply,
        AbortRequest,
        EventFilter,
        ServerInfo,
        SubmissionSelector,
        SubmissionView,
        WatchedFrame,
    )
    from py_scheduler.domain.task import SubmissionKey, Task
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.wire.submissions import SubmitChunk

_log = logging.getLogger("py_scheduler.client")

_CHUNK_TASKS = 1_000
_CHUNK_BYTES = 4 << 20


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """What `submit` returns. A watch from `cursor` on sees every event of its tasks.

    task_ids: in the order of the tasks. warnings: what the server did not take as asked, such as a task type that falls
    back to another evaluator; the client logs them too.
    """

    submission_id: str
    task_ids: tuple[str, ...]
    warnings: tuple[str, ...]
    cursor: bytes


def chunks_of(
    tasks: Iterable[Task],
    key: SubmissionKey,
    request_id: str,
    iteration: IterationContext | None,
    delivery: Delivery = Delivery.WATCH,
) -> Iterator[SubmitChunk]:
    """The calls that hand in tasks: each has at most 1,000 tasks, and ends with the task that brings it to 4 MiB."""
    return encode_submission_chunks(tasks, key, request_id, _CHUNK_TASKS, _CHUNK_BYTES, iteration, delivery)


class Submissions:
    """The submissions of one server. `SchedulerClient` says what each call does and raises."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._warned: set[str] = set()
        """The client logs each warning once, however many calls a rollout takes."""

    @property
    def _stub(self) -> SchedulerServiceStub:
        return self._connection.stub(SchedulerServiceStub)

    async def submit(self, chunks: Iterable[SubmitChunk]) -> Submission:
        replies = [await self.submit_chunk(chunk) for chunk in chunks]
        return Submission(
            submission_id=replies[0].submission_id,
            task_ids=tuple([task_id for reply in replies for task_id in reply.task_ids]),
            warnings=tuple(dict.fromkeys(warning for reply in replies for warning in reply.warnings)),
            cursor=replies[0].cursor,
        )

    async def submit_chunk(self, chunk: SubmitChunk) -> service.SubmitTasksResponse:
        try:
            reply = await self._connection.call(lambda: self._stub.SubmitTasks, chunk.request)
        except InvalidArgumentError as error:
            raise chunk.with_list_index(error) from error
        for warning in reply.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _log.warning("%s", warning)
        return reply

    async def view(self, selector: SubmissionSelector) -> SubmissionView:
        request = wire.encode_get_request(selector)
        reply = await self._connection.call(lambda: self._stub.GetSubmission, request)
        return wire.decode_submission(reply, selector.namespace)

    async def explain_task(self, task_id: str, namespace: str) -> TaskExplanation:
        request = service.ExplainTaskRequest(task_id=task_id, namespace=namespace)
        return decode_explanation(await self._connection.call(lambda: self._stub.ExplainTask, request))

    async def abort(self, abort: AbortRequest, timeout_seconds: float) -> AbortReply:
        request = wire.encode_abort_request(abort)
        reply = await self._connection.call(lambda: self._stub.AbortSubmission, request, timeout_seconds)
        return wire.decode_abort_reply(reply)

    async def resume_training(self, namespace: str) -> int:
        request = service.ResumeTrainingRequest(namespace=namespace)
        return (await self._connection.call(lambda: self._stub.ResumeTraining, request)).weight_epoch

    async def ack(self, event_filter: EventFilter, cursor: bytes) -> int:
        request = service.AckEventsRequest(filter=wire.encode_filter(event_filter), cursor=cursor)
        return (await self._connection.call(lambda: self._stub.AckEvents, request)).oldest_sequence

    async def server_info(self) -> ServerInfo:
        request = service.GetServerInfoRequest()
        return wire.decode_server_info(await self._connection.call(lambda: self._stub.GetServerInfo, request))

    async def watch(
        self, event_filter: EventFilter, cursor: bytes, *, cancel_on_disconnect: bool = False
    ) -> AsyncGenerator[WatchedFrame, None]:
        request = service.WatchEventsRequest(
            filter=wire.encode_filter(event_filter), cursor=cursor, cancel_on_disconnect=cancel_on_disconnect
        )

        def call() -> grpc.aio.UnaryStreamCall[service.WatchEventsRequest, service.WatchEventsResponse]:
            return self._stub.WatchEvents(request, metadata=self._connection.metadata)

        async with aclosing(self._connection.frames(call, request)) as messages:
            async for message in messages:
                yield decode_frame(message)
