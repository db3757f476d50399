"""An engine that runs nothing: a test says what happens, and sees what it was asked."""

from __future__ import annotations

import asyncio
import os
from typing import TYPE_CHECKING

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.domain.collecting import CollectReply
from py_scheduler.domain.events import (
    AcceptedTask,
    AttemptEnded,
    AttemptStarted,
    EventRecord,
    JournalledEvent,
    TaskDone,
    TasksAccepted,
)
from py_scheduler.domain.requests import (
    AbortReply,
    AbortRequest,
    EventFilter,
    EventFrame,
    ServerInfo,
    SubmissionSelector,
    SubmissionView,
    SubmitReply,
    SubmitRequest,
)
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, TaskState
from py_scheduler.errors import CursorExpiredError, NotFoundError
from py_scheduler.scheduler.log.event_log import KIND_OF_EVENT
from py_scheduler.scheduler.notifier import Notifier
from py_scheduler.scheduler.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Generator

    from py_scheduler.api.ports import GenerationPort, PlacementPort
    from py_scheduler.domain.collecting import CollectRequest
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.domain.task import SubmissionKey


class FakeResults:
    """The results of a `FakeEngine`. may_answer: what collects wait for."""

    def __init__(self, engine: FakeEngine) -> None:
        self._engine = engine
        self.collects: list[CollectRequest] = []
        self.collected = CollectReply()
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.acknowledged: list[tuple[str, str]] = []
        self.discarded: list[SubmissionSelector] = []

    async def collect(self, request: CollectRequest) -> CollectReply:
        self._engine.maybe_fail()
        self.collects.append(request)
        self._engine.changed()
        await self.may_answer.wait()
        return self.collected

    async def drain(self, request: CollectRequest) -> CollectReply:
        return await self.collect(request)

    async def acknowledge(self, namespace: str, request_id: str) -> None:
        self._engine.maybe_fail()
        self.acknowledged.append((namespace, request_id))

    async def discard(self, selector: SubmissionSelector, request_id: str = "") -> None:
        self._engine.maybe_fail()
        self.discarded.append(selector)


class FakeEngine:
    """Implements `api.ports.EnginePort`. `fail_with` is raised by the next calls until it is None
    again.

    finish_at_once: a submitted task is done before its submit returns.
    """

    leases: PlacementPort
    """Not faked: what leases needs an engine."""
    generation: GenerationPort
    """Likewise."""

    def __init__(self, *, finish_at_once: bool = False) -> None:
        self.store_epoch = os.urandom(16)
        self.records: list[EventRecord] = []
        self.submits: list[SubmitRequest] = []
        self.aborts: list[AbortRequest] = []
        self.acknowledged: list[tuple[EventFilter, int]] = []
        self.results = FakeResults(self)
        self.runners: list[RunnerView] = []
        self.fail_with: BaseException | None = None
        self.still_stopping: tuple[str, ...] = ()
        self.view: SubmissionView | None = None
        self.info = ServerInfo(version="", evaluators=(), engines=(), nodes=())
        self.open_watches = 0
        self.oldest_sequence = 1
        self.can_record = True
        self.can_lease = True
        self.can_generate = True
        self._pulse = Notifier()
        self._finish_at_once = finish_at_once
        self._replies: dict[str, SubmitReply] = {}
        self._tasks: dict[str, int] = {}

    @property
    def last_sequence(self) -> int:
        return len(self.records)

    # What a test makes happen

    async def happen(self, *events: JournalledEvent, namespace: str = "default") -> None:
        for event in events:
            self.records.append(EventRecord(len(self.records) + 1, namespace, event))
        self.changed()
        await asyncio.sleep(0)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that calls bring about; fails after some seconds."""
        async with asyncio.timeout(10):
            while not condition():
                await self._pulse.next_ring().wait()

    def changed(self) -> None:
        self._pulse.ring()

    async def finish(self, *task_ids: str, sample: SampleDone | None = None) -> None:
        """Lets tasks of one sample start, end and be done."""
        for task_id in task_ids:
            await self.happen(*events_of_finish(task_id, sample))

    # The port

    async def submit_as_read(
        self, key: SubmissionKey, reading: Generator[None, None, SubmitRequest], *, size: int
    ) -> SubmitReply:
        request = await in_slices(reading, LoopClock())
        assert request.key == key
        assert size
        return await self.submit(request)

    async def submit(self, request: SubmitRequest) -> SubmitReply:
        self.maybe_fail()
        self.submits.append(request)
        if request.request_id in self._replies:
            return self._replies[request.request_id]
        submission_id = f"s-{request.key.batch_id}"
        first = self._tasks.get(submission_id, 0)
        self._tasks[submission_id] = first + len(request.tasks)
        accepted = tuple(
            AcceptedTask(f"{submission_id}-{number}", task) for number, task in enumerate(request.tasks, first)
        )
        reply = SubmitReply(
            submission_id=submission_id,
            task_ids=tuple(task.task_id for task in accepted),
            warnings=(),
            before_sequence=self.last_sequence,
        )
        self._replies[request.request_id] = reply
        event = TasksAccepted(
            submission_id=submission_id,
            namespace=request.key.namespace,
            batch_id=request.key.batch_id,
            request_id=request.request_id,
            request_digest=b"",
            tasks=accepted,
            unix_seconds=1.0,
        )
        await self.happen(event, namespace=request.key.namespace)
        if self._finish_at_once:
            await self.finish(*reply.task_ids)
        return reply

    async def abort(self, request: AbortRequest) -> AbortReply:
        self.maybe_fail()
        self.aborts.append(request)
        if request.wait and self.still_stopping:
            await asyncio.sleep(request.timeout_seconds or 0)
        return AbortReply(aborted_tasks=len(request.task_ids), still_stopping=self.still_stopping)

    def runner_views(self) -> list[RunnerView]:
        self.maybe_fail()
        return self.runners

    def acknowledge(self, event_filter: EventFilter, through_sequence: int) -> int:
        self.maybe_fail()
        self.acknowledged.append((event_filter, through_sequence))
        return self.oldest_sequence

    def submission(self, selector: SubmissionSelector) -> SubmissionView:
        self.maybe_fail()
        if self.view is None:
            raise NotFoundError(f"no submission {selector.submission_id or selector.batch_id!r}")
        return self.view

    async def resume_training(self, namespace: str) -> int:
        self.maybe_fail()
        return 0

    async def explain_task(self, task_id: str, namespace: str) -> TaskExplanation:
        self.maybe_fail()
        raise NotFoundError(f"no task {task_id!r}")

    async def watch(self, event_filter: EventFilter, after_sequence: int | None) -> AsyncIterator[EventFrame]:
        self.maybe_fail()
        after = self.oldest_sequence - 1 if after_sequence is None else after_sequence
        if after + 1 < self.oldest_sequence:
            raise CursorExpiredError("compacted", self.oldest_sequence)
        self.open_watches += 1
        try:
            while True:
                through = self.last_sequence
                records = tuple(record for record in self.records[after:through] if passes(record, event_filter))
                yield EventFrame(after_sequence=after, through_sequence=through, records=records)
                after = through
                while self.last_sequence == through:
                    await self._pulse.next_ring().wait()
        finally:
            self.open_watches -= 1
            self.changed()

    async def server_info(self, version: str) -> ServerInfo:
        self.maybe_fail()
        return ServerInfo(
            version=version, evaluators=self.info.evaluators, engines=self.info.engines, nodes=self.info.nodes
        )

    def maybe_fail(self) -> None:
        if self.fail_with is not None:
            raise self.fail_with


def passes(record: EventRecord, event_filter: EventFilter) -> bool:
    """What a stream's filter means, in the plainest words."""
    return (
        record.namespace == event_filter.namespace
        and event_filter.submission_id in {"", record.event.submission_id}
        and (not event_filter.kinds or KIND_OF_EVENT[type(record.event)] in event_filter.kinds)
    )


def events_of_finish(task_id: str, sample: SampleDone | None = None) -> list[JournalledEvent]:
    """The three events of a task with one sample."""
    submission_id = task_id.rpartition("-")[0]
    sample = sample or SampleDone(task_id=task_id, sample_no=0, attempt_no=1, outcome=Outcome.SOLVED)
    return [
        AttemptStarted(
            submission_id=submission_id,
            task_id=task_id,
            subtask_no=0,
            attempt_no=1,
            node_ip="10.0.0.1",
            gpu_ids=(0,),
            unix_seconds=2.0,
        ),
        AttemptEnded(
            submission_id=submission_id,
            task_id=task_id,
            subtask_no=0,
            attempt_no=1,
            state=AttemptState.SUCCEEDED,
            samples=(sample,),
            message="",
            next_attempt_no=0,
            unix_seconds=3.0,
        ),
        TaskDone(
            submission_id=submission_id,
            task_id=task_id,
            client_key="",
            state=TaskState.SUCCEEDED,
            planned_samples=1,
            outcomes={sample.outcome: 1},
            reason="",
            unix_seconds=3.0,
        ),
    ]
