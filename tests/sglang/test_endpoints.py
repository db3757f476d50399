"""A trainer that starts its servers after the scheduler, names them, and pushes its weights itself; real servers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.generation import STUDENT, EndpointState, OnWeightUpdate, PauseMode, SamplingParams
from py_scheduler.domain.results import Outcome
from tests.sglang.asking import FIRST_VERSION, PROMPT, TRAINED_VERSION, RealSglang, assert_exact
from tests.sglang.conftest import TRAINED_MODEL
from tests.sglang.fleets import TalkingAgent, fleet_on
from tests.sglang.training import training

if TYPE_CHECKING:
    from tests.sglang.asking import Reference

SLOW_SECONDS = 0.05
SAMPLES, TOKENS = 4, 60


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_named_late_pushed_to_and_removed(pair: list[RealSglang], reference: Reference, mode: PauseMode) -> None:
    """One push names its weights, the other does not: that server is told. Every token is of the weights it names."""
    first, second = pair
    for real in pair:
        await real.slow_down(SLOW_SECONDS)
    agent, sampling = TalkingAgent(1, TOKENS), SamplingParams(ignore_eos=True)
    async with fleet_on() as fleet, training(fleet, agent, sampling, OnWeightUpdate.RESUME) as here:
        trainer = here.trainer
        rollout = asyncio.create_task(here.samples(2 * SAMPLES))
        await trainer.set_endpoints(STUDENT, [real.base_url for real in pair])
        for real in pair:
            await real.until_running(SAMPLES, tokens=len(PROMPT) + SAMPLES * 10)
        async with trainer.paused(mode):
            push = {"model_path": str(TRAINED_MODEL), "flush_cache": mode is not PauseMode.IN_PLACE, "keep_pause": True}
            await first.post("/update_weights_from_disk", push | {"weight_version": TRAINED_VERSION})
            await second.post("/update_weights_from_disk", push)
            assert [await real.weight_version() for real in pair] == [TRAINED_VERSION, FIRST_VERSION]
            state = await trainer.weights_changed(TRAINED_VERSION)
            assert (state.weight_version, state.weight_epoch) == (TRAINED_VERSION, 1)
            assert [await real.weight_version() for real in pair] == [TRAINED_VERSION] * 2
        views = await trainer.set_endpoints(STUDENT, [second.base_url])
        assert [view.state for view in views] == [EndpointState.DRAINING, EndpointState.UP]
        samples = await rollout
        assert [view.url for view in (await trainer.endpoints())[STUDENT]] == [second.base_url]
        assert (await trainer.states())[STUDENT].weight_epoch == 1
    for sample in samples:
        assert sample.outcome is Outcome.SOLVED, sample.error
        assert [span.version for span in sample.trajectory.weight_spans] == [FIRST_VERSION, TRAINED_VERSION]
        if mode is not PauseMode.IN_PLACE:
            assert_exact(sample, reference, 1.0)
