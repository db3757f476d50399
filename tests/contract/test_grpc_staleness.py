"""Staleness over real channels: a trainer that submits ahead is held back, told why, and let through by its updates."""

from __future__ import annotations

import asyncio
import io
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest
from rich.console import Console

from py_scheduler.api.server import ApiServer
from py_scheduler.client import BlockingSchedulerClient, GenerationClient, SchedulerClient
from py_scheduler.commands.why import show_explanation
from py_scheduler.config import ServerSettings
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.events import TrainingResumed, WeightsChanged
from py_scheduler.domain.generation import STUDENT, SamplingParams
from py_scheduler.domain.requests import EventKind
from py_scheduler.domain.results import AgentResult, Reward, SampleDone
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.scheduler.ledger.staleness import StalenessSettings
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of
from tests.support.models.controlled_model import ControlledModel
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode

STEP = 4
BUDGET = 10


class OneTurn(BaseAgent):
    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([0, 1, 2])
        await episode.generate()
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class Served(msgspec.Struct):
    model: ControlledModel
    address: str

    async def until_running(self, count: int) -> None:
        await eventually(lambda: len(self.model.flights) == count)


@asynccontextmanager
async def served() -> AsyncIterator[Served]:
    model = ControlledModel()
    async with running_engine(
        spec_of(OneTurn(), default_sampling=SamplingParams(max_new_tokens=BUDGET)),
        generation_backends={STUDENT: model},
        settings=EngineSettings(staleness={"default": StalenessSettings(max_staleness=1, step_size=STEP)}),
    ) as harness:
        server = ApiServer(harness.engine, "1.2.3", ServerSettings(listen="127.0.0.1:0"))
        address = server.bind()
        await server.start()
        try:
            yield Served(model, address)
        finally:
            await server.stop()


async def rollout(client: SchedulerClient, step: int) -> list[SampleDone]:
    tasks = [task_of(repeat_times=STEP)]
    return [event async for event in client.rollout(tasks, batch_id=step) if isinstance(event, SampleDone)]


async def test_a_trainer_that_submits_ahead_goes_on_by_its_updates() -> None:
    async with (
        served() as here,
        SchedulerClient(here.address) as client,
        GenerationClient(here.address) as generation,
    ):
        steps = []
        for step in range(4):
            steps.append(asyncio.create_task(rollout(client, step)))
            await here.until_running(min(2, step + 1) * STEP)
        staleness: list[set[tuple[int | None, int | None]]] = []
        for number, samples in enumerate(steps):
            await here.model.step(BUDGET)
            staleness.append({(sample.weight_epoch, sample.staleness_at(number)) for sample in await samples})
            async with generation.paused():
                state = await generation.update_weights("/weights", f"step-{number}")
            assert state.weight_epoch == number + 1
            await here.until_running(STEP if number < 2 else 0)
    # The n-th step is trained on by the update that ends epoch n.
    assert staleness == [{(0, 0)}, {(0, 1)}, {(1, 1)}, {(2, 1)}]


async def test_what_is_held_is_told_why_to_whoever_asks() -> None:
    async with served() as here, SchedulerClient(here.address) as client:
        await client.submit([task_of(repeat_times=2 * STEP)], 0)
        held = await client.submit([task_of(repeat_times=STEP), task_of()], 1)
        await here.until_running(2 * STEP)
        view = await client.get_submission(1)
        expected = (
            f"held back: {2 * STEP} samples are accepted or running at weight_epoch 0 (0 and {2 * STEP}, counted from "
            f"epoch 0), max_staleness 1 allows {2 * STEP} (step_size {STEP}): it waits for the next update of the "
            "weights"
        )
        assert [batch.reason for batch in view.waiting] == [expected] * 2
        assert view.queued_attempts == STEP + 1
        explanation = await client.explain_task(held.task_ids[1])
        assert [wait.reason for wait in explanation.waits] == [expected]
        assert [(ahead.batch_id, ahead.tasks) for ahead in explanation.waits[0].ahead] == [(1, 1)]
        console = Console(width=400, file=io.StringIO(), record=True)
        show_explanation(explanation, console)
        assert expected in console.export_text()


async def test_changes_of_weights_and_resumes_are_watched() -> None:
    kinds = [EventKind.WEIGHTS_CHANGED, EventKind.TRAINING_RESUMED]
    async with (
        served() as here,
        SchedulerClient(here.address) as client,
        GenerationClient(here.address) as generation,
    ):
        await generation.update_weights("/weights", "v1")
        await client.resume_training(namespace="elsewhere")
        assert await client.resume_training() == 1
        events = []
        async for frame in client.watch(kinds=kinds):
            events += [record.event for record in frame.records]
            if len(events) == 3:
                break
        first, second, third = events
        assert isinstance(first, WeightsChanged)
        assert (first.roles, first.weight_version, first.epoch) == ((STUDENT,), "v0", 0)
        assert isinstance(second, WeightsChanged)
        assert (second.weight_version, second.epoch) == ("v1", 1)
        assert isinstance(third, TrainingResumed)
        assert third.epoch == 1


async def test_a_resume_frees_a_trainer_from_what_it_has_lost() -> None:
    def resumed(address: str) -> int:
        with BlockingSchedulerClient(address) as client:
            return client.resume_training()

    async with served() as here, SchedulerClient(here.address) as client:
        await client.submit([task_of(repeat_times=2 * STEP)], 0)
        await here.until_running(2 * STEP)
        await here.model.step(BUDGET)
        await here.until_running(0)
        again = asyncio.create_task(rollout(client, 0))
        await asyncio.sleep(0)
        assert await asyncio.to_thread(resumed, here.address) == 0
        await here.until_running(STEP)
        await here.model.step(BUDGET)
        assert len(await again) == STEP


async def test_a_namespace_that_is_none_is_refused() -> None:
    async with served() as here, SchedulerClient(here.address) as client:
        with pytest.raises(InvalidArgumentError, match="namespace"):
            await client.resume_training(namespace="a\nb")
