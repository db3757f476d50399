"""Episodes of several turns through the scheduler's engine, and what faults of a real server become."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import ChatMessage, SamplingParams
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from tests.sglang.asking import CONTEXT_LENGTH, RealSglang, assert_exact
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine, task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import Episode
    from tests.sglang.asking import Reference

TEMPERATURE = 0.9
TURN_TOKENS = 24
TURNS = 3
LONG = 4000


class ConversingAgent(BaseAgent):
    """Asks, and asks again about the answer; notes what the server said of each turn."""

    def __init__(self) -> None:
        self.prompts: list[list[int]] = []
        self.cached: list[int] = []
        self.generated: list[list[int]] = []

    async def run(self, episode: Episode) -> AgentResult:
        await episode.observe_chat([ChatMessage("user", f"What is {episode.sample.task.prompt}?")])
        for turn in range(TURNS):
            if turn:
                episode.observe(await episode.encode(f"</turn>\n<turn>user\nreally, {turn}?</turn>\n<turn>assistant\n"))
            prompt = list(episode.token_ids)
            generation = await episode.generate(max_new_tokens=TURN_TOKENS)
            assert generation.prompt_tokens == len(prompt)
            self.prompts.append(prompt)
            self.cached.append(generation.cached_tokens)
            self.generated.append(generation.token_ids)
        return AgentResult(answer="done")

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class LongAgent(BaseAgent):
    """One generation that takes minutes."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([42, 100, 7])
        await episode.generate(max_new_tokens=LONG)
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


class GreedyForContextAgent(LongAgent):
    """Fills the context, then asks for more of it than there is."""

    async def run(self, episode: Episode) -> AgentResult:
        episode.observe([9] * (CONTEXT_LENGTH - 100))
        await episode.generate(max_new_tokens=50)
        await episode.generate(max_new_tokens=50)
        return AgentResult()


@asynccontextmanager
async def rollout(real: RealSglang, agent: BaseAgent) -> AsyncIterator[Harness]:
    sampling = SamplingParams(temperature=TEMPERATURE, ignore_eos=True)
    async with (
        real.engine() as student,
        running_engine(spec_of(agent, default_sampling=sampling), generation_backends={"student": student}) as harness,
    ):
        yield harness


async def test_every_turn_continues_the_ids_of_those_before(real: RealSglang, reference: Reference) -> None:
    agent = ConversingAgent()
    async with rollout(real, agent) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of("1 + 1")]))
    assert sample.outcome is Outcome.SOLVED
    assert_exact(sample, reference, TEMPERATURE)
    ids, mask = sample.trajectory.token_ids, sample.trajectory.loss_mask
    assert ids[mask == 1].tolist() == [token for turn in agent.generated for token in turn]
    for before, generated, after in zip(agent.prompts, agent.generated, agent.prompts[1:], strict=False):
        assert after[: len(before) + len(generated)] == before + generated
    # The server itself found the context of the turn before in its cache: it was the same ids.
    for before, cached in zip(agent.prompts, agent.cached[1:], strict=False):
        assert cached >= len(before) + TURN_TOKENS - 1


async def test_many_episodes_at_once_do_not_mix(real: RealSglang, reference: Reference) -> None:
    async with rollout(real, ConversingAgent()) as harness:
        tasks = [task_of(f"{number} + {number}", repeat_times=4) for number in range(8)]
        samples = await harness.samples(await harness.submit(tasks))
    assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * 32
    assert len({sample.trajectory.token_ids.tobytes() for sample in samples}) == 32
    for sample in samples:
        assert_exact(sample, reference, TEMPERATURE)


async def test_an_aborted_sample_keeps_its_tokens(real: RealSglang, reference: Reference) -> None:
    await real.slow_down(0.03)
    async with rollout(real, LongAgent()) as harness:
        reply = await harness.submit([task_of()])
        await real.until_running(1, tokens=20)
        answer = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
        assert answer.still_stopping == ()
        # The stop is confirmed, so nothing is left at the server either.
        await real.until_idle(2.0)
        (sample,) = await harness.samples(reply)
    assert sample.outcome is Outcome.ABORTED
    assert 10 < sample.trajectory.generated_tokens < LONG
    assert sample.trajectory.turns[-1].finish_reason == "abort"
    assert_exact(sample, reference, TEMPERATURE)


async def test_a_sample_that_times_out_stops_at_the_server(real: RealSglang, reference: Reference) -> None:
    await real.slow_down(0.03)
    sampling = SamplingParams(ignore_eos=True)
    async with real.engine() as student:
        spec = spec_of(LongAgent(), default_sampling=sampling, run_timeout_seconds=2.0)
        async with running_engine(spec, generation_backends={"student": student}) as harness:
            (sample,) = await harness.samples(await harness.submit([task_of()]))
            await real.until_idle(2.0)
    assert sample.outcome is Outcome.AGENT_TIMEOUT
    assert 0 < sample.trajectory.generated_tokens < LONG
    assert_exact(sample, reference, 1.0)


async def test_a_context_that_is_full_is_the_models_matter(real: RealSglang, reference: Reference) -> None:
    async with rollout(real, GreedyForContextAgent()) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of()]))
    assert sample.outcome is Outcome.CONTEXT_OVERFLOW
    assert sample.trajectory.generated_tokens == 50
    assert_exact(sample, reference, TEMPERATURE)
