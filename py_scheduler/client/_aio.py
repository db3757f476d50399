"""The asyncio client: submissions, watches and rollouts. Whole steps are in `_steps`."""

from __future__ import annotations

import logging
import uuid
from contextlib import aclosing
from functools import cached_property
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.client._base import CALL_SECONDS
from py_scheduler.client._collecting import CollectClient
from py_scheduler.client._rollout import follow_rollout
from py_scheduler.domain.requests import AbortRequest, Delivery, EventFilter
from py_scheduler.domain.task import BatchId, SubmissionKey
from py_scheduler.errors import InvalidArgumentError, NotFoundError
from py_scheduler.wire import requests as wire
from py_scheduler.wire.events import decode_frame
from py_scheduler.wire.explanations import decode_explanation
from py_scheduler.wire.submissions import SubmitChunk, encode_submission_chunks

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator

    from py_scheduler.client._rollout import OpenRollout, RolloutEvent
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.requests import AbortReply, EventKind, ServerInfo, SubmissionView, WatchedFrame
    from py_scheduler.domain.task import Task
    from py_scheduler.domain.training.iteration import IterationContext

_log = logging.getLogger("py_scheduler.client")

_CHUNK_TASKS = 1_000
_CHUNK_BYTES = 4 << 20


class Submission(msgspec.Struct, frozen=True, kw_only=True):
    """What `submit` returns. task_ids stand in the order of the tasks; a watch from `cursor` on sees all their events.

    warnings: what was not taken as asked, such as a fallback evaluator; they are logged too.
    """

    submission_id: str
    task_ids: tuple[str, ...]
    warnings: tuple[str, ...]
    cursor: bytes


class SchedulerClient(CollectClient):
    """Talks to one server; any number of calls at a time. Use it as `async with`, or call `open` and `close`.

    reconnect_seconds: how long a connection may stay broken before calls and watches give up. 0: not at all.
    max_message_bytes: the largest message that is sent or taken.
    """

    @cached_property
    def _warned(self) -> set[str]:
        """What this client logged already: a rollout of many calls says it once."""
        return set()

    @cached_property
    def open_rollouts(self) -> set[OpenRollout]:
        """For the rollouts' use: what is to be left when the client is closed."""
        return set()

    async def close(self) -> None:
        """Leaves open rollouts and ends open watches. Work on the server goes on, unless a rollout aborts its own."""
        for rollout in tuple(self.open_rollouts):
            await rollout.leave()
        await super().close()

    # Calls

    async def submit(
        self,
        tasks: Iterable[Task],
        batch_id: BatchId,
        *,
        request_id: str | None = None,
        namespace: str | None = None,
        iteration: IterationContext | None = None,
        delivery: Delivery = Delivery.WATCH,
    ) -> Submission:
        """Hands in tasks, in several calls when they are many; returns when the server has taken them all.

        The same request_id with the same tasks again gives the same task ids and runs nothing twice; None makes a fresh
        one. A call is all or nothing; when a later one of several is refused, the tasks of the earlier ones stay
        accepted. `iteration` is what every episode of these tasks is told of the step. `delivery`: whether results are
        kept until they are collected.
        Raises InvalidArgumentError, UnplaceableError, AlreadyExistsError, ResourceExhaustedError, ServerError.
        """
        chunks = self._chunks(tasks, batch_id, request_id, namespace, iteration, delivery)
        replies = [await self.submit_chunk(chunk) for chunk in chunks]
        return Submission(
            submission_id=replies[0].submission_id,
            task_ids=tuple([task_id for reply in replies for task_id in reply.task_ids]),
            warnings=tuple(dict.fromkeys(warning for reply in replies for warning in reply.warnings)),
            cursor=replies[0].cursor,
        )

    async def get_submission(
        self, batch_id: BatchId | None = None, *, submission_id: str = "", namespace: str | None = None
    ) -> SubmissionView:
        """How a submission stands, and why what waits is waiting. Raises NotFoundError."""
        selector = self._selector(batch_id, submission_id, namespace)
        request = wire.encode_get_request(selector)
        reply = await self._call(lambda stub: stub.GetSubmission, request)
        return wire.decode_submission(reply, selector.namespace)

    async def explain_task(self, task_id: str, *, namespace: str | None = None) -> TaskExplanation:
        """How a task stands; if it waits, what is short where and who is ahead of it. Raises NotFoundError."""
        request = service.ExplainTaskRequest(task_id=task_id, namespace=namespace or self._namespace)
        return decode_explanation(await self._call(lambda stub: stub.ExplainTask, request))

    async def abort(  # noqa: PLR0913 -- the fields of an AbortRequest
        self,
        batch_id: BatchId | None = None,
        *,
        submission_id: str = "",
        namespace: str | None = None,
        request_id: str | None = None,
        task_ids: Iterable[str] = (),
        reason: str = "",
        wait: bool = True,
        timeout_seconds: float = CALL_SECONDS,
        keep_partial: bool = False,
        restart_runners: bool = False,
    ) -> AbortReply:
        """Stops a submission, or those of its tasks that are named. Each task still ends with its own TaskDone.

        request_id: repeats an abort; it stops nothing that was submitted after the first. One is made up where none is
        given, since the client repeats a call that the network lost.
        wait: return when the work has stopped, or shortly before `timeout_seconds` with what is `still_stopping`.
        keep_partial, restart_runners: see `AbortRequest`.
        Raises NotFoundError, AlreadyExistsError (the request_id is another call's).
        """
        abort = AbortRequest(
            selector=self._selector(batch_id, submission_id, namespace),
            request_id=request_id or uuid.uuid4().hex,
            task_ids=tuple(task_ids),
            reason=reason,
            wait=wait,
            keep_partial=keep_partial,
            restart_runners=restart_runners,
        )
        request = wire.encode_abort_request(abort)
        reply = await self._call(lambda stub: stub.AbortSubmission, request, timeout_seconds)
        return wire.decode_abort_reply(reply)

    async def resume_training(self, *, namespace: str | None = None) -> int:
        """For a trainer that starts, perhaps again from a checkpoint: what its namespace has produced until now counts
        towards its `max_staleness` no more. The student's weight_epoch.
        """
        request = service.ResumeTrainingRequest(namespace=namespace or self._namespace)
        reply = await self._call(lambda stub: stub.ResumeTraining, request)
        return int(reply.weight_epoch)

    # By the names of Trinity's Scheduler

    async def schedule(self, tasks: Iterable[Task], batch_id: BatchId) -> Submission | None:
        """`submit` for results that are collected. No tasks: nothing happens. Raises what `submit` raises."""
        tasks = list(tasks)
        return await self.submit(tasks, batch_id, delivery=Delivery.COLLECT) if tasks else None

    async def abort_batch(
        self,
        batch_id: BatchId,
        return_partial_tasks: bool = False,
        restart_runners: bool = True,
    ) -> None:
        """`abort`; a batch that is not known has nothing to stop. What is completed can be drained still."""
        try:
            await self.abort(batch_id, keep_partial=return_partial_tasks, restart_runners=restart_runners)
        except NotFoundError:
            return

    async def has_step(self, batch_id: BatchId) -> bool:
        """Whether anything waits, runs or is to be collected under this id."""
        try:
            return (await self.get_submission(batch_id)).has_step
        except NotFoundError:
            return False

    async def ack(
        self,
        cursor: bytes,
        *,
        submission_id: str = "",
        kinds: Iterable[EventKind] = (),
        namespace: str | None = None,
    ) -> int:
        """Says that events have been read up to a cursor, so that the server may drop them; the rest as it was watched.

        Concerns all events of the submission (without one: of the namespace), of every kind. Returns the oldest
        sequence that can still be watched. Raises InvalidArgumentError, CursorExpiredError.
        """
        event_filter = EventFilter(
            submission_id=submission_id, kinds=frozenset(kinds), namespace=namespace or self._namespace
        )
        request = service.AckEventsRequest(filter=wire.encode_filter(event_filter), cursor=cursor)
        reply = await self._call(lambda stub: stub.AckEvents, request)
        return int(reply.oldest_sequence)

    async def server_info(self) -> ServerInfo:
        """The server's evaluators, engines and nodes."""
        reply = await self._call(lambda stub: stub.GetServerInfo, service.GetServerInfoRequest())
        return wire.decode_server_info(reply)

    # Streams

    async def watch(
        self,
        *,
        submission_id: str = "",
        kinds: Iterable[EventKind] = (),
        cursor: bytes = b"",
        namespace: str | None = None,
        cancel_on_disconnect: bool = False,
    ) -> AsyncGenerator[WatchedFrame, None]:
        """Frames of events from a cursor on, for as long as they are read; an empty cursor is the oldest event.

        Empty submission_id: all submissions of the namespace; no kinds: all kinds. Frames without events come now and
        then: their cursor is as good to resume from. A broken connection is resumed from the last frame.
        Raises CursorExpiredError, CursorMismatchError, InvalidArgumentError, ServerError.
        """
        event_filter = EventFilter(
            submission_id=submission_id, kinds=frozenset(kinds), namespace=namespace or self._namespace
        )
        request = service.WatchEventsRequest(
            filter=wire.encode_filter(event_filter), cursor=cursor, cancel_on_disconnect=cancel_on_disconnect
        )

        def call() -> Any:
            return self._stub.WatchEvents(request, metadata=self._metadata)

        async with aclosing(self._messages(call, request)) as messages:
            async for message in messages:
                yield decode_frame(message)

    async def rollout(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId,
        request_id: str | None = None,
        namespace: str | None = None,
        iteration: IterationContext | None = None,
        abort_on_exit: bool = False,
    ) -> AsyncGenerator[RolloutEvent, None]:
        """Submits tasks and yields each `SampleDone` and `TaskDone` as it happens, until every task is done.

        Leaving early (break, an exception, a cancel) leaves the work running, to be watched again from the server;
        with `abort_on_exit` it is aborted instead, also when the client is closed.
        Raises what `submit` and `watch` raise.
        """
        batches = self.rollout_batches(
            tasks,
            batch_id=batch_id,
            request_id=request_id,
            namespace=namespace,
            iteration=iteration,
            abort_on_exit=abort_on_exit,
        )
        async with aclosing(batches):
            async for batch in batches:
                for event in batch:
                    yield event

    async def rollout_batches(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId,
        request_id: str | None = None,
        namespace: str | None = None,
        iteration: IterationContext | None = None,
        abort_on_exit: bool = False,
    ) -> AsyncGenerator[list[RolloutEvent], None]:
        """`rollout` with the events that arrived together in one list."""
        chunks = self._chunks(tasks, batch_id, request_id, namespace, iteration)
        following = follow_rollout(self, chunks, namespace, abort_on_exit=abort_on_exit)
        async with aclosing(following):
            async for batch in following:
                yield batch

    # Inside

    def _chunks(
        self,
        tasks: Iterable[Task],
        batch_id: BatchId,
        request_id: str | None,
        namespace: str | None,
        iteration: IterationContext | None,
        delivery: Delivery = Delivery.WATCH,
    ) -> Iterator[SubmitChunk]:
        key = SubmissionKey(batch_id, namespace or self._namespace)
        request_id = request_id or uuid.uuid4().hex
        return encode_submission_chunks(tasks, key, request_id, _CHUNK_TASKS, _CHUNK_BYTES, iteration, delivery)

    async def submit_chunk(self, chunk: SubmitChunk) -> service.SubmitTasksResponse:
        """One SubmitTasks call. For the rollout's use."""
        try:
            reply: service.SubmitTasksResponse = await self._call(lambda stub: stub.SubmitTasks, chunk.request)
        except InvalidArgumentError as error:
            raise chunk.with_list_index(error) from error
        for warning in reply.warnings:
            if warning not in self._warned:
                self._warned.add(warning)
                _log.warning("%s", warning)
        return reply
