"""Training whose samples go stale: an engine, a model that generates when a test says so, and updates of it."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import STUDENT, SamplingParams, WeightUpdate
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.scheduler.ledger.staleness import StalenessSettings
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import settle
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.models.controlled_model import ControlledModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.ports import Journal
    from py_scheduler.domain.requests import SubmitReply

STEP = 4
BUDGET = 10


class Generates(BaseAgent):
    """One turn; for the prompt "breaks" it raises then."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([0, 1, 2])
        await episode.generate()
        if episode.sample.task.prompt == "breaks":
            raise ValueError("the tool broke")
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class Training:
    """An engine whose model generates when a test says so."""

    def __init__(self, harness: Harness, model: ControlledModel) -> None:
        self.harness = harness
        self.engine = harness.engine
        self.model = model

    async def running(self) -> int:
        await settle()
        return len(self.model.flights)

    async def finish(self) -> None:
        """All that runs ends, and what that lets through begins."""
        await self.model.step(BUDGET)

    async def update(self, version: str) -> int:
        """The epoch afterwards."""
        update = WeightUpdate(model_path="/weights", weight_version=version)
        state = await self.engine.generation.update_weights(STUDENT, update)
        await settle()
        return state.weight_epoch

    async def submit(self, samples: int, batch_id: int | str = 0, **config: Any) -> SubmitReply:
        tasks = [task_of(**config) for _ in range(samples)]
        return await self.harness.submit(tasks, batch_id, request_id=f"{id(self)}/{batch_id}")

    def reasons(self, reply: SubmitReply) -> set[str]:
        return {batch.reason for batch in self.engine.submission(self.harness.selector(reply)).waiting}


@asynccontextmanager
async def training(
    max_staleness: int = 1,
    *,
    journal: Journal | None = None,
    model: ControlledModel | None = None,
    spec: dict[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[Training]:
    model = model or ControlledModel()
    limit = StalenessSettings(max_staleness=max_staleness, step_size=STEP)
    async with running_engine(
        spec_of(Generates(), default_sampling=SamplingParams(max_new_tokens=BUDGET), **(spec or {})),
        generation_backends={STUDENT: model},
        settings=EngineSettings(**{"staleness": {"default": limit}, **settings}),
        journal=journal,
    ) as harness:
        yield Training(harness, model)
