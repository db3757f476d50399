"""A rollout seen from the client: tasks go out in chunks while events of the first ones come in.

Invariants
  1. Each sample and each task of this rollout is handed over once; events of other tasks of the submission never are.
  2. It ends when every chunk was accepted and every task is done, and not before.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import EventKind
from py_scheduler.domain.results import SampleDone
from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterator

    from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
    from py_scheduler.client._aio import SchedulerClient
    from py_scheduler.domain.requests import WatchedFrame
    from py_scheduler.wire.submissions import SubmitChunk

RolloutEvent = SampleDone | TaskDone

_KINDS = (EventKind.ATTEMPT_ENDED, EventKind.TASK_DONE)


async def follow_rollout(
    client: SchedulerClient, chunks: Iterator[SubmitChunk], namespace: str | None, *, abort_on_exit: bool
) -> AsyncGenerator[list[RolloutEvent], None]:
    """Lists of events in the order they happened. See `SchedulerClient.rollout`."""
    first = await client.submit_chunk(next(chunks))
    mine = _Tasks(first)
    frames = client.watch(submission_id=first.submission_id, kinds=_KINDS, cursor=first.cursor, namespace=namespace)
    submitting = asyncio.create_task(_submit_rest(client, chunks, mine))
    try:
        async with aclosing(frames), aclosing(_until_done(frames, submitting, mine)) as batches:
            async for batch in batches:
                yield batch
    finally:
        submitting.cancel()
        await asyncio.wait([submitting])
        if abort_on_exit and not mine.are_done:
            await client.abort(
                submission_id=first.submission_id,
                namespace=namespace,
                task_ids=mine.open,
                reason="its client left",
                wait=False,
            )


async def _submit_rest(client: SchedulerClient, chunks: Iterator[SubmitChunk], mine: _Tasks) -> None:
    for chunk in chunks:
        mine.accept(await client.submit_chunk(chunk))


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

    __slots__ = ("_early", "_known", "_submission_id", "open")

    def __init__(self, first: service.SubmitTasksResponse) -> None:
        self._submission_id = first.submission_id
        self._known: set[str] = set(first.task_ids)
        self.open: set[str] = set(first.task_ids)
        self._early: list[RolloutEvent] = []

    @property
    def are_done(self) -> bool:
        return not self.open

    def accept(self, reply: service.SubmitTasksResponse) -> None:
        if reply.submission_id != self._submission_id:
            raise FailedPreconditionError(
                f"submission {self._submission_id} was drained while tasks were still being submitted under its "
                "batch_id: drain after the rollout, or use another batch_id"
            )
        self._known.update(reply.task_ids)
        self.open.update(reply.task_ids)

    def take(self, frame: WatchedFrame, *, everything_submitted: bool) -> list[RolloutEvent]:
        """This rollout's events of a frame. Those of unknown tasks wait until it is clear whose they are."""
        events = _events_of(frame)
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


def _events_of(frame: WatchedFrame) -> list[RolloutEvent]:
    events: list[RolloutEvent] = []
    for record in frame.records:
        event = record.event
        if type(event) is AttemptEnded:
            events.extend(event.samples)
        elif type(event) is TaskDone:
            events.append(event)
    return events
