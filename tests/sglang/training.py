"""A trainer and its rollouts, through the scheduler's API, on real servers."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.api.server import ApiServer
from py_scheduler.client import GenerationClient, SchedulerClient
from py_scheduler.config import ServerSettings
from py_scheduler.domain.generation import STUDENT, OnWeightUpdate, SamplingParams
from py_scheduler.domain.results import SampleDone
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.episodes.api_access import ApiFront
    from py_scheduler.domain.evaluator import BaseAgent
    from py_scheduler.domain.ports import GenerationBackend
    from py_scheduler.domain.task import Task


class Training(msgspec.Struct):
    address: str
    trainer: GenerationClient

    async def rollout(self, *tasks: Task) -> list[SampleDone]:
        async with SchedulerClient.connect(self.address) as client:
            events = client.rollout(list(tasks), batch_id=0)
            return [event async for event in events if isinstance(event, SampleDone)]

    async def samples(self, count: int) -> list[SampleDone]:
        return await self.rollout(task_of(repeat_times=count))


@asynccontextmanager
async def training(
    engine: GenerationBackend,
    agent: BaseAgent,
    sampling: SamplingParams,
    policy: OnWeightUpdate = OnWeightUpdate.RESTART,
    api_front: ApiFront | None = None,
) -> AsyncIterator[Training]:
    spec = spec_of(agent, default_sampling=sampling, run_timeout_seconds=60.0, on_weight_update=policy)
    async with running_engine(spec, generation_backends={STUDENT: engine}, api_front=api_front) as harness:
        server = ApiServer(harness.engine, "1.2.3", ServerSettings(listen="127.0.0.1:0"))
        address = server.bind()
        await server.start()
        try:
            async with GenerationClient.connect(address) as trainer:
                yield Training(address, trainer)
        finally:
            await server.stop()
