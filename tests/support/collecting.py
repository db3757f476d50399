"""Short ways to submit tasks whose results are collected, and to collect them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.collecting import CollectReply, CollectRequest
from py_scheduler.domain.requests import Delivery, SubmissionSelector, SubmissionView, SubmitReply, SubmitRequest
from py_scheduler.domain.task import BatchId, SubmissionKey, Task

if TYPE_CHECKING:
    from collections.abc import Iterable

    from py_scheduler.scheduler.engine import Engine

_numbers = itertools.count()


async def schedule(engine: Engine, tasks: Iterable[Task], batch_id: BatchId = 0) -> SubmitReply:
    request = SubmitRequest(
        request_id=f"schedule-{next(_numbers)}",
        key=SubmissionKey(batch_id),
        tasks=tuple(tasks),
        delivery=Delivery.COLLECT,
    )
    return await engine.submit(request)


async def collect(
    engine: Engine, batch_id: BatchId | None = 0, *, acknowledge: bool = True, **wishes: Any
) -> CollectReply:
    request_id = wishes.pop("request_id", None) or f"collect-{next(_numbers)}"
    reply = await engine.collect(CollectRequest(request_id=request_id, batch_id=batch_id, **wishes))
    if acknowledge:
        await engine.ack_results("default", request_id)
    return reply


async def drain(engine: Engine, batch_id: BatchId = 0) -> CollectReply:
    request_id = f"drain-{next(_numbers)}"
    reply = await engine.drain_submission(CollectRequest(request_id=request_id, batch_id=batch_id))
    await engine.ack_results("default", request_id)
    return reply


def view(engine: Engine, batch_id: BatchId = 0) -> SubmissionView:
    return engine.submission(SubmissionSelector(batch_id=batch_id))
