"""A rollout seen from the client: tasks go out in chunks while events of the first ones come in.

Invariants
  1. Each sample and each task of this rollout is handed over once; events of other tasks of the submission never are.
  2. It ends when every chunk was accepted and every task is done, and not before.
  3. One that aborts on exit leaves none of its tasks behind: a chunk that is under way is learnt of first.

Not in a TaskGroup: a generator may be continued and closed by other tasks than the one that began it. Its two tasks are
awaited by whatever ends it.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING

from py_scheduler.client.connection import CALL_SECONDS
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import AbortRequest, EventFilter, EventKind, SubmissionSelector
from py_scheduler.domain.results import SampleDone
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
    from py_scheduler.client.submissions import Submissions
    from py_scheduler.domain.requests import WatchedFrame
    from py_scheduler.wire.submissions import SubmitChunk

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
