"""Two real servers behind one engine: aborts, pauses, updates, and many episodes at once."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.generation import FinishReason, OnWeightUpdate, PauseMode, SamplingParams
from py_scheduler.domain.results import Outcome
from tests.sglang.asking import FIRST_VERSION, PROMPT, TRAINED_VERSION, RealSglang, assert_exact, request
from tests.sglang.conftest import TRAINED_MODEL
from tests.sglang.fleets import TalkingAgent, fleet_on, up
from tests.sglang.training import training
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from tests.sglang.asking import Reference

SLOW_SECONDS = 0.05
EPISODES, TURNS, TURN_TOKENS = 512, 2, 8
LOOKS_SECONDS = 3.0
"""Long enough for the fleet to look at its servers many times."""
SAMPLES, TOKENS = 4, 60


async def test_generations_are_aborted_where_they_run(pair: list[RealSglang]) -> None:
    for real in pair:
        await real.slow_down(SLOW_SECONDS)
    async with fleet_on(*(real.base_url for real in pair)) as fleet:
        tasks = [asyncio.create_task(fleet.generate(request(f"r{n}", max_new_tokens=4000))) for n in range(8)]
        for real in pair:
            await real.until_running(4, tokens=len(PROMPT) + 4 * 4)
        await asyncio.gather(*(fleet.abort(f"r{n}") for n in range(8)))
        for real in pair:
            await real.until_idle(2.0)
        for task in tasks:
            generation = await task
            assert generation.finish_reason is FinishReason.ABORT
            assert generation.token_ids


async def test_paused_is_not_dead(pair: list[RealSglang]) -> None:
    """Its load is told all the same, and what it holds is neither moved nor failed, ready or not."""
    async with fleet_on(*(real.base_url for real in pair)) as fleet:
        await pair[0].pause()
        tasks = [asyncio.create_task(fleet.generate(request(f"r{n}"))) for n in range(8)]
        assert await pair[0].status("/ready") == 503
        done, held = await asyncio.wait(tasks, timeout=LOOKS_SECONDS)
        assert 0 < len(done) < 8
        assert [(each.is_up, each.is_silent) for each in fleet._endpoints] == [(True, False)] * 2
        await pair[0].resume()
        assert [len((await task).token_ids) for task in (*done, *held)] == [16] * 8


@pytest.mark.parametrize("mode", PauseMode)
async def test_pause_update_continue_at_both(pair: list[RealSglang], reference: Reference, mode: PauseMode) -> None:
    """Every sample says which weights made what, and to the digit they did, wherever it ran."""
    for real in pair:
        await real.slow_down(SLOW_SECONDS)
    agent, sampling = TalkingAgent(1, TOKENS), SamplingParams(ignore_eos=True)
    async with (
        fleet_on(*(real.base_url for real in pair)) as fleet,
        training(fleet, agent, sampling, OnWeightUpdate.RESUME) as here,
    ):
        rollout = asyncio.create_task(here.samples(2 * SAMPLES))
        for real in pair:
            await real.until_running(SAMPLES, tokens=len(PROMPT) + SAMPLES * 10)
        async with here.trainer.paused(mode):
            before = [await real.load() for real in pair]
            await here.trainer.update_weights(str(TRAINED_MODEL), TRAINED_VERSION)
            assert [await real.weight_version() for real in pair] == [TRAINED_VERSION] * 2
            assert [load["num_running_reqs"] for load in before] == [(await r.load())["num_running_reqs"] for r in pair]
        samples = await rollout
    assert len(samples) == 2 * SAMPLES
    for sample in samples:
        assert sample.outcome is Outcome.SOLVED, sample.error
        assert [span.version for span in sample.trajectory.weight_spans] == [FIRST_VERSION, TRAINED_VERSION]
        assert sample.trajectory.generated_tokens == TOKENS
        if mode is not PauseMode.IN_PLACE:
            # In place it goes on from what the old weights made of the tokens before.
            assert_exact(sample, reference, 1.0)


async def test_512_episodes_at_once(pair: list[RealSglang]) -> None:
    """All of them are at the servers at the same time: nothing on this side holds any back."""
    for real in pair:
        await real.slow_down(1.0)
    spec = spec_of(TalkingAgent(TURNS, TURN_TOKENS), default_sampling=SamplingParams(ignore_eos=True))
    async with (
        fleet_on(*(real.base_url for real in pair)) as fleet,
        running_engine(spec, generation_backends={"student": fleet}) as harness,
    ):
        reply = await harness.submit([task_of(repeat_times=8) for _ in range(EPISODES // 8)])
        for real in pair:
            half = EPISODES // 2
            await real.until(lambda load, half=half: load["num_running_reqs"] + load["num_waiting_reqs"] == half)  # type: ignore[misc]
        for real in pair:
            await real.slow_down(None)
        samples = await harness.samples(reply)
        assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * EPISODES
        assert {sample.trajectory.generated_tokens for sample in samples} == {TURNS * TURN_TOKENS}
        assert up(fleet) == [True, True]
        taken = [endpoint.taken for endpoint in fleet._endpoints]
        assert sum(taken) == EPISODES * TURNS
        assert min(taken) > EPISODES * TURNS // 4
