"""An engine with everything around it, for tests in one process."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.batching import BatchingStrategy, fifo_batching
from py_scheduler.domain.events import AttemptEnded, AttemptStarted, EventRecord, TaskDone
from py_scheduler.domain.generation import SamplingParams
from py_scheduler.domain.requests import EventFilter, SubmissionSelector, SubmitReply, SubmitRequest
from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId, SubmissionKey, Task, TaskConfig
from py_scheduler.scheduler.engine import Engine
from py_scheduler.scheduler.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable, Mapping

    from py_scheduler.domain.episodes.api_access import ApiFront
    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import Clock, GenerationBackend, Journal
    from py_scheduler.domain.quotas import NamespaceSettings
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.execution.runner import Runners
    from py_scheduler.placement import PlacementPool


def task_of(prompt: str = "", task_type: str = "agent", **config: Any) -> Task:
    return Task(config=TaskConfig(task_type=task_type, **config), prompt=prompt)


class Harness:
    """Submits, and reads back what the event log says."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._request_ids = itertools.count()

    async def submit(
        self,
        tasks: Iterable[Task],
        batch_id: BatchId = 0,
        *,
        namespace: str = DEFAULT_NAMESPACE,
        request_id: str | None = None,
        iteration: IterationContext | None = None,
    ) -> SubmitReply:
        return await self.engine.submit(
            SubmitRequest(
                request_id=request_id or f"request-{next(self._request_ids)}",
                key=SubmissionKey(batch_id, namespace),
                tasks=tuple(tasks),
                iteration=iteration,
            )
        )

    async def records_until_done(self, reply: SubmitReply) -> list[EventRecord]:
        """Every record of the submission from its start until all of the reply's tasks are done."""
        left = set(reply.task_ids)
        records: list[EventRecord] = []
        event_filter = EventFilter(submission_id=reply.submission_id)
        async for frame in self.engine.watch(event_filter, reply.before_sequence):
            records.extend(frame.records)
            left -= {record.event.task_id for record in frame.records if isinstance(record.event, TaskDone)}
            if not left:
                return records
        raise AssertionError("the stream ended before the tasks were done")

    async def done(self, reply: SubmitReply) -> dict[str, TaskDone]:
        records = await self.records_until_done(reply)
        done = [record.event for record in records if isinstance(record.event, TaskDone)]
        by_id = {event.task_id: event for event in done}
        assert len(by_id) == len(done), "a task has two terminal events"
        return by_id

    async def samples(self, reply: SubmitReply) -> list[SampleDone]:
        return samples_in(await self.records_until_done(reply))

    async def until_started(self, reply: SubmitReply, count: int) -> list[str]:
        """Waits for this many AttemptStarted events of the submission; their task ids."""
        started: list[str] = []
        async for frame in self.engine.watch(EventFilter(submission_id=reply.submission_id), reply.before_sequence):
            started.extend(r.event.task_id for r in frame.records if isinstance(r.event, AttemptStarted))
            if len(started) >= count:
                return started
        raise AssertionError("the stream ended")

    def selector(self, reply: SubmitReply) -> SubmissionSelector:
        return SubmissionSelector(submission_id=reply.submission_id)


def samples_in(records: Iterable[EventRecord]) -> list[SampleDone]:
    return [sample for r in records if isinstance(r.event, AttemptEnded) for sample in r.event.samples]


def versions(sample: SampleDone) -> list[tuple[str, int, int]]:
    """Which weights made which tokens."""
    return [(span.version, span.start, span.end) for span in sample.trajectory.weight_spans]


async def run_one(harness: Harness, prompt: str, **config: Any) -> SampleDone:
    """A task of one sample."""
    (sample,) = await harness.samples(await harness.submit([task_of(prompt, **config)]))
    return sample


@asynccontextmanager
async def running_engine(
    *specs: EvaluatorSpec,
    pool: PlacementPool | None = None,
    clock: Clock | None = None,
    settings: EngineSettings | None = None,
    journal: Journal | None = None,
    max_running_samples: int | None = None,
    generation_backends: Mapping[str, GenerationBackend] | None = None,
    batching_strategy: BatchingStrategy = fifo_batching,
    default_sampling: SamplingParams = SamplingParams(),
    api_front: ApiFront | None = None,
    runners: Mapping[str, Runners] | None = None,
    namespaces: Mapping[str, NamespaceSettings] = {},
) -> AsyncIterator[Harness]:
    if max_running_samples is not None:
        settings = EngineSettings(max_running_samples=max_running_samples)
    engine = Engine(
        specs=specs,
        pool=pool,
        generation_backends=generation_backends or {},
        journal=journal or MemoryJournal(),
        clock=clock or LoopClock(),
        settings=settings or EngineSettings(),
        batching_strategy=batching_strategy,
        default_sampling=default_sampling,
        api_front=api_front,
        runners=runners,
        namespaces=namespaces,
    )
    async with engine:
        yield Harness(engine)
