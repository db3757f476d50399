"""Short ways to submit tasks whose results are collected, and to collect them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.collecting import CollectReply, CollectRequest
from py_scheduler.domain.requests import Delivery, SubmissionSelector, SubmissionView, SubmitReply, SubmitRequest
from py_scheduler.domain.task import BatchId, SubmissionKey, Task
from tests.support.fake_clock import settle
from tests.support.harness import task_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from py_scheduler.scheduler.engine import Engine
    from tests.support.harness import Harness

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
    reply = await engine.results.collect(CollectRequest(request_id=request_id, batch_id=batch_id, **wishes))
    if acknowledge:
        await engine.results.acknowledge("default", request_id)
    return reply


async def drain(engine: Engine, batch_id: BatchId = 0) -> CollectReply:
    request_id = f"drain-{next(_numbers)}"
    reply = await engine.results.drain(CollectRequest(request_id=request_id, batch_id=batch_id))
    await engine.results.acknowledge("default", request_id)
    return reply


def view(engine: Engine, batch_id: BatchId = 0) -> SubmissionView:
    return engine.submission(SubmissionSelector(batch_id=batch_id))


def hanging(count: int) -> list[Task]:
    return [task_of("hangs") for _ in range(count)]


async def until_collectable(harness: Harness, count: int, batch_id: int | str = 0) -> None:
    while view(harness.engine, batch_id).collectable_tasks < count:
        await settle()


async def until_running(harness: Harness, count: int) -> None:
    while view(harness.engine).running_attempts < count:
        await settle()
