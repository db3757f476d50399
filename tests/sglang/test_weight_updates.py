"""A trainer changes the weights of a real server, through the scheduler's API, while episodes generate."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from py_scheduler.api.server import ApiServer
from py_scheduler.client import GenerationClient, SchedulerClient
from py_scheduler.config import ServerSettings
from py_scheduler.domain.evaluator import STUDENT, BaseAgent
from py_scheduler.domain.generation import OnWeightUpdate, PauseMode, SamplingParams
from py_scheduler.domain.results import AgentResult, Outcome, Reward, SampleDone
from py_scheduler.errors import EngineRejectedError
from tests.sglang.asking import PROMPT, RealSglang
from tests.sglang.conftest import TINY_MODEL
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode
    from tests.sglang.asking import Reference

SAMPLES = 4
TOKENS = 80
SLOW_SECONDS = 0.02
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=TOKENS)


class LongTurn(BaseAgent):
    async def run(self, episode: Episode) -> AgentResult:
        episode.observe(PROMPT)
        await episode.generate()
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class Trained(msgspec.Struct):
    address: str
    trainer: GenerationClient

    async def rollout(self) -> list[SampleDone]:
        async with SchedulerClient.connect(self.address) as client:
            events = client.rollout([task_of(repeat_times=SAMPLES)], batch_id=0)
            return [event async for event in events if isinstance(event, SampleDone)]


@asynccontextmanager
async def trained(real: RealSglang, policy: OnWeightUpdate = OnWeightUpdate.RESTART) -> AsyncIterator[Trained]:
    """The weights have their first name again afterwards."""
    spec = spec_of(LongTurn(), default_sampling=GREEDY, run_timeout_seconds=60.0, on_weight_update=policy)
    async with (
        real.engine() as student,
        running_engine(spec, generation_engines={STUDENT: student}) as harness,
    ):
        server = ApiServer(harness.engine, "1.2.3", ServerSettings(listen="127.0.0.1:0"))
        address = server.bind()
        await server.start()
        try:
            async with GenerationClient.connect(address) as trainer:
                yield Trained(address, trainer)
        finally:
            await server.stop()
            await real.resume()
            await real.update_weights("default")


@pytest.mark.parametrize(
    ("mode", "policy"),
    [
        (PauseMode.ABORT, OnWeightUpdate.RESUME),
        (PauseMode.ABORT, OnWeightUpdate.RESTART),
        (PauseMode.RETRACT, OnWeightUpdate.RESTART),
        (PauseMode.IN_PLACE, OnWeightUpdate.RESTART),
    ],
)
async def test_pause_update_continue_in_mid_generation(
    real: RealSglang, reference: Reference, mode: PauseMode, policy: OnWeightUpdate
) -> None:
    """The new weights are the old ones under another name, so the whole must be what one generation would have been."""
    await real.slow_down(SLOW_SECONDS)
    async with trained(real, policy) as here:
        rollout = asyncio.create_task(here.rollout())
        await real.until_running(SAMPLES, tokens=SAMPLES * 10)
        async with here.trainer.paused(mode) as state:
            assert (state.weight_version, state.weight_epoch) == ("default", 0)
            await here.trainer.update_weights(str(TINY_MODEL), "step-1")
        samples = await rollout
        state = (await here.trainer.states())[STUDENT]
    assert (state.pause_mode, state.weight_version, state.weight_epoch) == (None, "step-1", 1)
    assert (state.running, state.held) == (0, 0)
    whole = reference.continuation(PROMPT, TOKENS)
    for sample in samples:
        assert sample.outcome is Outcome.SOLVED
        trajectory = sample.trajectory
        assert trajectory.token_ids.tolist() == [*PROMPT, *whole]
        assert len(trajectory.log_probs) == len(PROMPT) + TOKENS
        spans = [(span.version, span.start, span.end) for span in trajectory.weight_spans]
        if policy is OnWeightUpdate.RESTART and mode is PauseMode.ABORT:
            assert spans == [("step-1", len(PROMPT), len(PROMPT) + TOKENS)]
        else:
            (_, start, cut), (_, begun, end) = spans
            assert [version for version, _, _ in spans] == ["default", "step-1"]
            assert (start, begun, end) == (len(PROMPT), cut, len(PROMPT) + TOKENS)
            assert start < cut < end


async def test_two_updates_in_a_row_and_nothing_lost_of_a_rollout_between(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with trained(real, OnWeightUpdate.RESUME) as here:
        rollout = asyncio.create_task(here.rollout())
        for version in ("step-1", "step-2"):
            await real.until_running(SAMPLES, tokens=SAMPLES * 10)
            async with here.trainer.paused():
                await real.until_idle()
                await here.trainer.update_weights(str(TINY_MODEL), version)
            await real.until_running(SAMPLES)
        samples = await rollout
    for sample in samples:
        assert [span.version for span in sample.trajectory.weight_spans] == ["default", "step-1", "step-2"]
        assert sample.trajectory.generated_tokens == TOKENS


async def test_weights_that_are_not_there_change_nothing(real: RealSglang) -> None:
    async with trained(real) as here:
        async with here.trainer.paused():
            with pytest.raises(EngineRejectedError):
                await here.trainer.update_weights("/no/such/weights", "step-1")
        samples = await here.rollout()
    assert {span.version for sample in samples for span in sample.trajectory.weight_spans} == {"default"}


async def test_a_pause_that_was_left_behind_does_not_lock_the_server_up(real: RealSglang) -> None:
    """A server that stands still answers a pause in mode abort never, and no call after it either."""
    await real.slow_down(SLOW_SECONDS)
    async with trained(real, OnWeightUpdate.RESUME) as here:
        rollout = asyncio.create_task(here.rollout())
        await real.until_running(SAMPLES, tokens=SAMPLES * 10)
        await real.pause(PauseMode.IN_PLACE)
        async with here.trainer.paused(PauseMode.ABORT):
            await real.until_idle()
        samples = await rollout
    assert [sample.trajectory.generated_tokens for sample in samples] == [TOKENS] * SAMPLES
