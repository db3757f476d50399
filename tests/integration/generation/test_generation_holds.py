"""Pauses and new weights as episodes see them, through the whole engine on a clock of the test's own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import STUDENT, TEACHER, OnWeightUpdate, PauseMode, SamplingParams, WeightUpdate
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine, task_of, versions
from tests.support.models.controlled_model import ControlledModel

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode

BUDGET = 10


class ToolAgent(BaseAgent):
    """Two turns, with a tool between them that takes until `tool` is set; notes the time it has left."""

    def __init__(self, second_role: str = STUDENT) -> None:
        self.tool = asyncio.Event()
        self.in_tool = 0
        self.remaining: list[float | None] = []
        self.second_role = second_role

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([0, 1, 2])
        await episode.generate()
        self.in_tool += 1
        await self.tool.wait()
        self.in_tool -= 1
        episode.observe([3])
        self.remaining.append(episode.remaining_seconds)
        await episode.generate(role=self.second_role)
        self.remaining.append(episode.remaining_seconds)
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class Held:
    """An engine, its model and its clock, and how they are moved on."""

    def __init__(self, harness: Harness, model: ControlledModel, clock: FakeClock, agent: ToolAgent) -> None:
        self.harness = harness
        self.model = model
        self.clock = clock
        self.agent = agent
        self.gateway = harness.engine.generation

    async def until_in_tool(self, count: int) -> None:
        while self.agent.in_tool < count:
            await self.model.step(BUDGET)

    async def change_weights(self, version: str, mode: PauseMode = PauseMode.ABORT) -> None:
        await self.gateway.pause(STUDENT, mode)
        await settle()
        await self.gateway.update_weights(STUDENT, WeightUpdate(model_path="/w", weight_version=version))
        await self.gateway.resume(STUDENT)
        await settle()


@asynccontextmanager
async def held(agent: ToolAgent | None = None, **spec: Any) -> AsyncIterator[Held]:
    model, clock, agent = ControlledModel(), FakeClock(), agent or ToolAgent()
    sampling = SamplingParams(max_new_tokens=BUDGET)
    engines = {STUDENT: model, TEACHER: ControlledModel()}
    async with running_engine(
        spec_of(agent, default_sampling=sampling, **spec), clock=clock, generation_backends=engines
    ) as harness:
        yield Held(harness, model, clock, agent)


async def test_an_episode_in_a_tool_call_is_held_before_its_next_generation_and_no_time_passes() -> None:
    async with held(run_timeout_seconds=60.0) as here:
        reply = await here.harness.submit([task_of()])
        await here.until_in_tool(1)
        await here.clock.advance(20)
        await here.gateway.pause(STUDENT, PauseMode.ABORT)
        # The tool's own time counts, paused or not.
        await here.clock.advance(10)
        here.agent.tool.set()
        await settle()
        assert len(here.model.requests) == 1
        (state,) = await here.gateway.states(STUDENT)
        assert (state.running, state.held) == (0, 1)
        await here.clock.advance(3_600)
        await here.gateway.update_weights(STUDENT, WeightUpdate(model_path="/w", weight_version="v1"))
        await here.gateway.resume(STUDENT)
        await here.clock.advance(5)
        await here.model.step(BUDGET)
        (sample,) = await here.harness.samples(reply)
    assert sample.outcome is Outcome.SOLVED
    assert here.agent.remaining == [30.0, 25.0]
    assert versions(sample) == [("v0", 3, 13), ("v1", 14, 24)]


@pytest.mark.parametrize("mode", list(PauseMode))
async def test_what_is_left_of_the_phase_after_a_pause_still_ends_it(mode: PauseMode) -> None:
    async with held(run_timeout_seconds=60.0, on_weight_update=OnWeightUpdate.RESUME) as here:
        reply = await here.harness.submit([task_of()])
        await here.model.step(4)
        await here.clock.advance(50)
        for _ in range(3):
            await here.gateway.pause(STUDENT, mode)
            await here.clock.advance(1_000)
            await here.gateway.resume(STUDENT)
        await here.clock.advance(9)
        assert len(here.model.flights) == 1
        await here.clock.advance(1)
        (sample,) = await here.harness.samples(reply)
    assert sample.outcome is Outcome.AGENT_TIMEOUT
    assert sample.trajectory.generated_tokens == 4
    assert sample.timings.run_seconds == 3_060


async def test_the_deadline_of_a_task_takes_no_notice_of_a_pause() -> None:
    async with held(run_timeout_seconds=60.0) as here:
        reply = await here.harness.submit([task_of(task_deadline_seconds=100.0)])
        await here.model.step(4)
        await here.gateway.pause(STUDENT, PauseMode.IN_PLACE)
        await here.clock.advance(100)
        (sample,) = await here.harness.samples(reply)
    assert sample.trajectory.generated_tokens == 4
    assert "task_deadline_seconds" in sample.error


async def test_a_sample_that_is_aborted_while_it_is_held_keeps_its_tokens() -> None:
    async with held(on_weight_update=OnWeightUpdate.RESUME) as here:
        reply = await here.harness.submit([task_of()])
        await here.model.step(4)
        await here.gateway.pause(STUDENT, PauseMode.ABORT)
        await settle()
        answer = await here.harness.engine.abort(AbortRequest(selector=here.harness.selector(reply), wait=True))
        assert answer.still_stopping == ()
        (sample,) = await here.harness.samples(reply)
        assert (await here.gateway.states(STUDENT))[0].held == 0
    assert sample.outcome is Outcome.ABORTED
    assert sample.trajectory.token_ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert sample.trajectory.turns[-1].finish_reason == "abort"


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (OnWeightUpdate.RESUME, [("v0", 3, 7), ("v1", 7, 13), ("v1", 14, 24)]),
        (OnWeightUpdate.RESTART, [("v1", 3, 13), ("v1", 14, 24)]),
    ],
)
async def test_the_evaluator_says_what_becomes_of_a_turn_that_is_aborted(
    policy: OnWeightUpdate, expected: list[tuple[str, int, int]]
) -> None:
    async with held(on_weight_update=policy) as here:
        reply = await here.harness.submit([task_of()])
        await here.model.step(4)
        await here.change_weights("v1")
        here.agent.tool.set()
        await here.model.step(BUDGET)
        await here.model.step(BUDGET)
        (sample,) = await here.harness.samples(reply)
    assert versions(sample) == expected
    assert sample.trajectory.token_ids.tolist() == [*range(13), 3, *range(14, 24)]
    assert sample.trajectory.loss_mask.tolist() == [0] * 3 + [1] * 10 + [0] + [1] * 10
    assert len(sample.trajectory.turns) == 4


async def test_tokens_of_older_weights_can_be_left_out_of_the_loss() -> None:
    """Of every turn, whatever kind of pause; another role's tokens have weights of their own."""
    agent = ToolAgent(second_role=TEACHER)
    async with held(agent, on_weight_update=OnWeightUpdate.RESUME, mask_off_policy_prefix=True) as here:
        reply = await here.harness.submit([task_of()])
        await here.model.step(4)
        await here.change_weights("v1")
        await here.model.step(3)
        await here.change_weights("v2", PauseMode.IN_PLACE)
        await here.model.step(BUDGET)
        agent.tool.set()
        await settle()
        teacher = here.harness.engine.generation.backend(TEACHER)
        assert isinstance(teacher, ControlledModel)
        await teacher.step(BUDGET)
        (sample,) = await here.harness.samples(reply)
    assert versions(sample) == [("v0", 3, 7), ("v1", 7, 10), ("v2", 10, 13), ("v0", 14, 24)]
    assert sample.trajectory.loss_mask.tolist() == [0] * 10 + [1] * 3 + [0] + [1] * 10
    assert len(sample.trajectory.log_probs) == 24


async def test_a_group_over_three_versions_restarts_fresh() -> None:
    """Case 11 of the faults: a group is aborted again and again, and no sample of it mixes versions."""
    async with held() as here:
        here.agent.tool.set()
        reply = await here.harness.submit([task_of(repeat_times=4)])
        for version in ("2", "4", "6"):
            await here.model.step(4)
            await here.change_weights(version)
        for _ in range(2):
            await here.model.step(BUDGET)
        samples = await here.harness.samples(reply)
        assert (await here.gateway.states(STUDENT))[0].weight_epoch == 3
    assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * 4
    for sample in samples:
        assert versions(sample) == [("6", 3, 13), ("6", 14, 24)]


async def test_generations_of_a_role_beyond_its_cap_wait_at_the_scheduler() -> None:
    agent, model = ToolAgent(), ControlledModel()
    agent.tool.set()
    sampling = SamplingParams(max_new_tokens=BUDGET)
    async with running_engine(
        spec_of(agent, default_sampling=sampling),
        generation_backends={STUDENT: model},
        settings=EngineSettings(max_running_generations={STUDENT: 3}),
    ) as harness:
        reply = await harness.submit([task_of(repeat_times=8)])
        most = 0
        while len(model.requests) < 16 or model.flights:
            await settle()
            most = max(most, len(model.flights))
            await model.step(BUDGET)
        samples = await harness.samples(reply)
    assert most == 3
    assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * 8
