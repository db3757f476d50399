"""The two ways by which a trainer pulls results, as one: in-process, and from a server in another process over gRPC."""

from __future__ import annotations

import uuid
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any, Protocol

from py_scheduler.app import build, running
from py_scheduler.client import SchedulerClient
from py_scheduler.config import load_config
from py_scheduler.domain.collecting import CollectReply, CollectRequest
from py_scheduler.domain.events import AttemptStarted
from py_scheduler.domain.requests import (
    AbortRequest,
    Delivery,
    EventFilter,
    EventKind,
    SubmissionSelector,
    SubmitRequest,
)
from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId, SubmissionKey, Task
from py_scheduler.errors import NotFoundError
from tests.support.servers.served_process import served_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.scheduler.engine import Engine

WAYS = ("in-process", "over gRPC")


class Pulling(Protocol):
    """What both ways have in common."""

    async def schedule(self, tasks: list[Task], batch_id: BatchId) -> tuple[str, ...]: ...
    async def collect(self, batch_id: BatchId, **wishes: Any) -> CollectReply: ...
    async def drain(self, batch_id: BatchId) -> CollectReply: ...
    async def abort_batch(self, batch_id: BatchId, *, return_partial_tasks: bool) -> None: ...
    async def has_step(self, batch_id: BatchId) -> bool: ...
    async def discard(self, batch_id: BatchId) -> None: ...
    async def starts(self, count: int) -> list[AttemptStarted]: ...
    async def runners(self) -> tuple[RunnerView, ...]: ...


class InProcess:
    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def schedule(self, tasks: list[Task], batch_id: BatchId) -> tuple[str, ...]:
        request = SubmitRequest(
            request_id=uuid.uuid4().hex,
            key=SubmissionKey(batch_id),
            tasks=tuple(tasks),
            delivery=Delivery.COLLECT,
        )
        return (await self._engine.submit(request)).task_ids

    async def collect(self, batch_id: BatchId, *, acknowledge: bool = True, **wishes: Any) -> CollectReply:
        request_id = wishes.pop("request_id", None) or uuid.uuid4().hex
        reply = await self._engine.results.collect(CollectRequest(request_id=request_id, batch_id=batch_id, **wishes))
        if acknowledge:
            await self._engine.results.acknowledge(DEFAULT_NAMESPACE, request_id)
        return reply

    async def drain(self, batch_id: BatchId) -> CollectReply:
        request = CollectRequest(request_id=uuid.uuid4().hex, batch_id=batch_id)
        reply = await self._engine.results.drain(request)
        await self._engine.results.acknowledge(DEFAULT_NAMESPACE, request.request_id)
        return reply

    async def abort_batch(self, batch_id: BatchId, *, return_partial_tasks: bool) -> None:
        selector = SubmissionSelector(batch_id=batch_id)
        await self._engine.abort(AbortRequest(selector=selector, wait=True, keep_partial=return_partial_tasks))

    async def has_step(self, batch_id: BatchId) -> bool:
        try:
            return self._engine.submission(SubmissionSelector(batch_id=batch_id)).has_step
        except NotFoundError:
            return False

    async def discard(self, batch_id: BatchId) -> None:
        await self._engine.results.discard(SubmissionSelector(batch_id=batch_id))

    async def starts(self, count: int) -> list[AttemptStarted]:
        found: list[AttemptStarted] = []
        async for frame in self._engine.watch(EventFilter(kinds=frozenset({EventKind.ATTEMPT_STARTED})), None):
            found.extend(record.event for record in frame.records if isinstance(record.event, AttemptStarted))
            if len(found) >= count:
                break
        return found

    async def runners(self) -> tuple[RunnerView, ...]:
        return tuple(self._engine.runner_views())


class OverGrpc:
    def __init__(self, client: SchedulerClient) -> None:
        self._client = client
        self.has_step = client.has_step
        self.discard = client.discard_completed_results
        self.runners = client.list_runners

    async def collect(self, batch_id: BatchId, **wishes: Any) -> CollectReply:
        return await self._client.collect(batch_id, **wishes)

    async def drain(self, batch_id: BatchId) -> CollectReply:
        return await self._client.drain(batch_id)

    async def schedule(self, tasks: list[Task], batch_id: BatchId) -> tuple[str, ...]:
        submission = await self._client.schedule(tasks, batch_id)
        assert submission is not None
        return submission.task_ids

    async def abort_batch(self, batch_id: BatchId, *, return_partial_tasks: bool) -> None:
        await self._client.abort_batch(batch_id, return_partial_tasks, restart_runners=False)

    async def starts(self, count: int) -> list[AttemptStarted]:
        found: list[AttemptStarted] = []
        async with aclosing(self._client.watch(kinds=[EventKind.ATTEMPT_STARTED])) as frames:
            async for frame in frames:
                found.extend(record.event for record in frame.records if isinstance(record.event, AttemptStarted))
                if len(found) >= count:
                    break
        return found


@asynccontextmanager
async def pulling(way: str, config: Path) -> AsyncIterator[Pulling]:
    if way == "in-process":
        parts = build(load_config(config), config.parent)
        async with running(parts):
            yield InProcess(parts.scheduler)
    else:
        async with served_process(config) as served, SchedulerClient(served.address) as client:
            yield OverGrpc(client)
