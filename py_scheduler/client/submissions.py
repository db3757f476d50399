"""Submissions: tasks are handed in, asked after, stopped and watched; a rollout does all of it at once.

A rollout sends tasks in chunks while events of the first ones come in. Invariants
  1. Each sample and each task of a rollout is handed over once; events of other tasks of the submission never are.
  2. It ends when every chunk was accepted and every task is done, and not before.
  3. One that aborts on exit leaves none of its tasks behind: a chunk that is under way is learnt of first.

Its two tasks are not in a TaskGroup: a generator may be continued and closed by other tasks than the one that began it.
They are awaited by whatever ends it.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
from py_scheduler.client.connection import CALL_SECONDS
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import AbortRequest, Delivery, EventFilter, EventKind, SubmissionSelector
from py_scheduler.domain.results import SampleDone
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.wire import requests as wire
from py_scheduler.wire.events import decode_frame
from py_scheduler.wire.explanations import decode_explanation
from py_scheduler.wire.tasks import SubmitChunk, encode_submission_chunks

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


RolloutEvent = SampleDone | TaskDone
"""What a rollout yields: `SampleDone` for each sample that ended, `TaskDone` for each task."""

_KINDS = frozenset({EventKind.ATTEMPT_ENDED, EventKind.TASK_DONE})


class Rollouts:
    """The rollouts of one client, and which of them are under way."""

    def __init__(self, submissions: Submissions) -> None:
        self._submissions = submissions
        self._open: set[_OpenRollout] = set()

    async def events(
        self, chunks: Iterator[SubmitChunk], namespace: str, *, abort_on_exit: bool
    ) -> AsyncGenerator[RolloutEvent, None]:
        """See `SchedulerClient.rollout`."""
        async with aclosing(self.batches(chunks, namespace, abort_on_exit=abort_on_exit)) as batches:
            async for batch in batches:
                for event in batch:
                    yield event

    async def batches(
        self, chunks: Iterator[SubmitChunk], namespace: str, *, abort_on_exit: bool
    ) -> AsyncGenerator[list[RolloutEvent], None]:
        """Lists of events in the order they happened. See `SchedulerClient.rollout_batches`."""
        rollout = _OpenRollout(self._submissions, chunks, namespace, abort_on_exit=abort_on_exit)
        self._open.add(rollout)
        try:
            first = await rollout.first_reply()
            event_filter = EventFilter(submission_id=first.submission_id, kinds=_KINDS, namespace=namespace)
            frames = self._submissions.watch(event_filter, first.cursor)
            async with aclosing(frames), aclosing(_until_done(frames, rollout.submitting, rollout.tasks)) as batches:
                async for batch in batches:
                    yield batch
        finally:
            self._open.discard(rollout)
            await rollout.leave()

    async def leave(self) -> None:
        """Leaves what is under way, as its reader would: the client is closed."""
        for rollout in tuple(self._open):
            self._open.discard(rollout)
            await rollout.leave()


class _OpenRollout:
    """Hands in the chunks, one after the other, and knows how to leave what it handed in."""

    def __init__(
        self, submissions: Submissions, chunks: Iterator[SubmitChunk], namespace: str, *, abort_on_exit: bool
    ) -> None:
        self.tasks = _Tasks()
        self._submissions = submissions
        self._namespace = namespace
        self._abort_on_exit = abort_on_exit
        self._is_left = False
        self._first: asyncio.Future[service.SubmitTasksResponse] = asyncio.get_running_loop().create_future()
        self.submitting = asyncio.create_task(self._submit(chunks))

    async def first_reply(self) -> service.SubmitTasksResponse:
        """Raises what the first call raised."""
        await asyncio.wait((self._first, self.submitting), return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            await self.submitting
        return self._first.result()

    async def _submit(self, chunks: Iterator[SubmitChunk]) -> None:
        for chunk in chunks:
            reply = await self._submissions.submit_chunk(chunk)
            self.tasks.accept(reply)
            if not self._first.done():
                self._first.set_result(reply)
            if self._is_left:
                return

    async def leave(self) -> None:
        """Stops handing in and, with `abort_on_exit`, stops the tasks that were handed in and are not done."""
        if self._is_left:
            return
        self._is_left = True
        if not self._abort_on_exit:
            self.submitting.cancel()
        try:
            await asyncio.wait([self.submitting])
        finally:
            self.submitting.cancel()
        if not self.submitting.cancelled():
            self.submitting.exception()  # whoever reads the rollout has been told
        if self._abort_on_exit and not self.tasks.are_done:
            abort = AbortRequest(
                selector=SubmissionSelector(submission_id=self.tasks.submission_id, namespace=self._namespace),
                request_id=uuid.uuid4().hex,
                task_ids=tuple(self.tasks.open),
                reason="its client left",
                wait=False,
            )
            await self._submissions.abort(abort, CALL_SECONDS)


async def _until_done(
    frames: AsyncGenerator[WatchedFrame, None], submitting: asyncio.Task[None], mine: _Tasks
) -> AsyncGenerator[list[RolloutEvent], None]:
    reading: asyncio.Task[WatchedFrame] | None = None
    try:
        while not (submitting.done() and mine.are_done):
            if submitting.done():
                submitting.result()
                frame = await (reading or anext(frames))
            else:
                # Both are watched, since the last chunk's answer may come after its last event.
                reading = reading or asyncio.create_task(_next_of(frames))
                await asyncio.wait((reading, submitting), return_when=asyncio.FIRST_COMPLETED)
                if submitting.done():
                    submitting.result()
                    if batch := mine.settle():
                        yield batch
                if not reading.done():
                    continue
                frame = reading.result()
            reading = None
            if batch := mine.take(frame, everything_submitted=submitting.done()):
                yield batch
    finally:
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])


async def _next_of(frames: AsyncGenerator[WatchedFrame, None]) -> WatchedFrame:
    return await anext(frames)


class _Tasks:
    """Which of a submission's tasks are this rollout's, and which of those are still open."""

    __slots__ = ("_early", "_known", "open", "submission_id")

    def __init__(self) -> None:
        self.submission_id = ""
        self._known: set[str] = set()
        self.open: set[str] = set()
        self._early: list[RolloutEvent] = []

    @property
    def are_done(self) -> bool:
        return not self.open

    def accept(self, reply: service.SubmitTasksResponse) -> None:
        self.submission_id = self.submission_id or reply.submission_id
        if reply.submission_id != self.submission_id:
            raise FailedPreconditionError(
                f"submission {self.submission_id} was drained while tasks were still being submitted under its "
                "batch_id: drain after the rollout, or use another batch_id"
            )
        self._known.update(reply.task_ids)
        self.open.update(reply.task_ids)

    def take(self, frame: WatchedFrame, *, everything_submitted: bool) -> list[RolloutEvent]:
        """This rollout's events of a frame. Those of unknown tasks wait until it is clear whose they are."""
        events = rollout_events(frame)
        if everything_submitted:
            return self._own(events)
        self._early.extend(event for event in events if event.task_id not in self._known)
        return self._own(events)

    def settle(self) -> list[RolloutEvent]:
        """Everything is submitted: what came early is told apart."""
        early, self._early = self._early, []
        return self._own(early)

    def _own(self, events: list[RolloutEvent]) -> list[RolloutEvent]:
        own = [event for event in events if event.task_id in self._known]
        self.open.difference_update(event.task_id for event in own if type(event) is TaskDone)
        return own


def rollout_events(frame: WatchedFrame) -> list[RolloutEvent]:
    """What a frame holds for whoever waits for samples and tasks."""
    events: list[RolloutEvent] = []
    for record in frame.records:
        event = record.event
        if type(event) is AttemptEnded:
            events.extend(event.samples)
        elif type(event) is TaskDone:
            events.append(event)
    return events
