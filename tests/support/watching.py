"""What a client reads of a submission's events."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from py_scheduler.client import SchedulerClient, Submission
    from py_scheduler.domain.requests import WatchedEvent


async def events_until(client: SchedulerClient, submission: Submission, kind: type, count: int) -> list[WatchedEvent]:
    """All of a submission's events, from its first to the one that is the `count`-th of its kind."""
    events: list[WatchedEvent] = []
    frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
    async with aclosing(frames):
        async for frame in frames:
            for record in frame.records:
                events.append(record.event)
                count -= isinstance(record.event, kind)
            if count <= 0:
                return events
    raise AssertionError("the stream ended")
