"""A trainer changes the weights of a real server, through the scheduler's API, while episodes generate."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import STUDENT, ChatMessage, OnWeightUpdate, PauseMode, SamplingParams
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.errors import EngineRejectedError
from tests.sglang.asking import ANSWER_SECONDS, FIRST_VERSION, PROMPT, TRAINED_VERSION, RealSglang, assert_exact
from tests.sglang.conftest import TINY_MODEL, TRAINED_MODEL, both_ways
from tests.sglang.training import training

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode
    from tests.sglang.asking import Reference

SAMPLES = 4
TOKENS = 80
SLOW_SECONDS = 0.02
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, max_new_tokens=TOKENS)
TEMPERATURE = 0.9
TURNS, TURN_TOKENS = 3, 40


class LongTurn(BaseAgent):
    async def run(self, episode: Episode) -> AgentResult:
        episode.observe(PROMPT)
        await episode.generate()
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class Conversation(LongTurn):
    def __init__(self) -> None:
        self.in_second_turn = 0
        self.all_in_second_turn = asyncio.Event()

    async def run(self, episode: Episode) -> AgentResult:
        await episode.observe_chat([ChatMessage("user", "What is 1 + 1?")])
        for turn in range(TURNS):
            if turn:
                episode.observe(await episode.encode(f"</turn>\n<turn>user\nreally, {turn}?</turn>\n<turn>assistant\n"))
            self.in_second_turn += turn == 1
            if self.in_second_turn == SAMPLES:
                self.all_in_second_turn.set()
            context = list(episode.token_ids)
            generation = await episode.generate(max_new_tokens=TURN_TOKENS)
            assert list(episode.token_ids) == context + generation.token_ids
        return AgentResult()


@both_ways
@pytest.mark.parametrize("mode", PauseMode)
async def test_pause_update_continue_in_mid_generation(real: RealSglang, reference: Reference, mode: PauseMode) -> None:
    """The new weights are the old ones under another name, so the whole must be what one generation would have been."""
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as student, training(student, LongTurn(), GREEDY, OnWeightUpdate.RESUME) as here:
        rollout = asyncio.create_task(here.samples(SAMPLES))
        await real.until_running(SAMPLES, tokens=SAMPLES * 10)
        async with here.trainer.paused(mode) as state:
            assert (state.weight_version, state.weight_epoch) == (FIRST_VERSION, 0)
            await here.trainer.update_weights(str(TINY_MODEL), "renamed")
        samples = await rollout
        state = (await here.trainer.states())[STUDENT]
    assert (state.pause_mode, state.weight_version, state.weight_epoch) == (None, "renamed", 1)
    assert (state.running, state.held) == (0, 0)
    whole = reference.continuation(PROMPT, TOKENS)
    for sample in samples:
        assert sample.outcome is Outcome.SOLVED
        trajectory = sample.trajectory
        assert trajectory.token_ids.tolist() == [*PROMPT, *whole]
        assert len(trajectory.log_probs) == len(PROMPT) + TOKENS
        (_, start, cut), (_, begun, end) = [(s.version, s.start, s.end) for s in trajectory.weight_spans]
        assert [span.version for span in trajectory.weight_spans] == [FIRST_VERSION, "renamed"]
        assert (start, begun, end) == (len(PROMPT), cut, len(PROMPT) + TOKENS)
        assert start < cut < end


async def test_what_a_pause_aborted_may_begin_anew(real: RealSglang, reference: Reference) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as student, training(student, LongTurn(), GREEDY, OnWeightUpdate.RESTART) as here:
        rollout = asyncio.create_task(here.samples(SAMPLES))
        await real.until_running(SAMPLES, tokens=SAMPLES * 10)
        async with here.trainer.paused(PauseMode.ABORT):
            await here.trainer.update_weights(str(TRAINED_MODEL), TRAINED_VERSION)
        samples = await rollout
    whole = reference.continuation(PROMPT, TOKENS, TRAINED_VERSION)
    for sample in samples:
        assert sample.trajectory.token_ids.tolist() == [*PROMPT, *whole]
        assert [(span.version, span.end - span.start) for span in sample.trajectory.weight_spans] == [
            (TRAINED_VERSION, TOKENS)
        ]
        assert_exact(sample, reference, 1.0)


@pytest.mark.parametrize("mode", [PauseMode.ABORT, PauseMode.RETRACT])
async def test_each_token_has_the_log_prob_of_the_weights_that_made_it(
    real: RealSglang, reference: Reference, mode: PauseMode
) -> None:
    """Weights that are really others, in the midst of conversations: what was generated stays, and is read anew.

    Not so in mode in_place, which goes on from the old weights' view of it.
    """
    await real.slow_down(SLOW_SECONDS)
    sampling = SamplingParams(temperature=TEMPERATURE, ignore_eos=True)
    agent = Conversation()
    async with real.engine() as student, training(student, agent, sampling, OnWeightUpdate.RESUME) as here:
        rollout = asyncio.create_task(here.samples(SAMPLES))
        async with asyncio.timeout(ANSWER_SECONDS):
            await agent.all_in_second_turn.wait()
        await real.until_running(SAMPLES)
        async with here.trainer.paused(mode):
            await here.trainer.update_weights(str(TRAINED_MODEL), TRAINED_VERSION)
        samples = await rollout
    for sample in samples:
        assert sample.outcome is Outcome.SOLVED, sample.error
        assert list(dict.fromkeys(s.version for s in sample.trajectory.weight_spans)) == [
            FIRST_VERSION,
            TRAINED_VERSION,
        ]
        assert sample.trajectory.generated_tokens == TURNS * TURN_TOKENS
        assert_exact(sample, reference, TEMPERATURE)


async def test_two_updates_in_a_row_and_nothing_lost_of_a_rollout_between(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as student, training(student, LongTurn(), GREEDY, OnWeightUpdate.RESUME) as here:
        rollout = asyncio.create_task(here.samples(SAMPLES))
        for version in ("step-1", "step-2"):
            await real.until_running(SAMPLES, tokens=SAMPLES * 10)
            async with here.trainer.paused():
                await real.until_idle()
                await here.trainer.update_weights(str(TINY_MODEL), version)
            await real.until_running(SAMPLES)
        samples = await rollout
    for sample in samples:
        assert [span.version for span in sample.trajectory.weight_spans] == [FIRST_VERSION, "step-1", "step-2"]
        assert sample.trajectory.generated_tokens == TOKENS


async def test_weights_that_are_not_there_change_nothing(real: RealSglang) -> None:
    async with real.engine() as student, training(student, LongTurn(), GREEDY) as here:
        async with here.trainer.paused():
            with pytest.raises(EngineRejectedError):
                await here.trainer.update_weights("/no/such/weights", "step-1")
        samples = await here.samples(SAMPLES)
    assert {span.version for sample in samples for span in sample.trajectory.weight_spans} == {FIRST_VERSION}


async def test_a_pause_that_was_left_behind_does_not_lock_the_server_up(real: RealSglang) -> None:
    """A server that stands still answers a pause in mode abort never, and no call after it either."""
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as student, training(student, LongTurn(), GREEDY, OnWeightUpdate.RESUME) as here:
        rollout = asyncio.create_task(here.samples(SAMPLES))
        await real.until_running(SAMPLES, tokens=SAMPLES * 10)
        await real.pause(PauseMode.IN_PLACE)
        async with here.trainer.paused(PauseMode.ABORT):
            await real.until_idle()
        samples = await rollout
    assert [sample.trajectory.generated_tokens for sample in samples] == [TOKENS] * SAMPLES
