"""What a turn may generate at most, when nobody names a budget: what the context leaves, and never more."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import STUDENT, SamplingParams, StoppingCriteria
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from py_scheduler.errors import FailedPreconditionError
from tests.support.fake_clock import settle
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of
from tests.support.models.controlled_model import ControlledModel

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.results import SampleDone

CONTEXT = 30


class Chatters(BaseAgent):
    """Turns of an observation and a generation, until the context is full."""

    def __init__(self, observed: int, **said: Any) -> None:
        self.observed = observed
        self.said = said

    async def run(self, episode: Episode) -> AgentResult:
        while True:
            episode.observe(range(self.observed))
            await episode.generate(**self.said)

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        raise AssertionError("it never ends by itself")


async def sample_and_budgets(
    agent: Chatters, model: ControlledModel, **config: Any
) -> tuple[SampleDone, list[int | None]]:
    """Plays until the sample is done; what each of its turns asked the engine for."""
    async with running_engine(spec_of(agent), generation_backends={STUDENT: model}) as harness:
        reply = await harness.submit([task_of(**config)])
        await settle()
        while model.flights:
            await model.step(1_000)
        (sample,) = await harness.samples(reply)
    return sample, [request.sampling.max_new_tokens for request in model.requests]


async def test_the_last_turn_gets_what_the_context_leaves_and_only_a_full_one_overflows() -> None:
    model = ControlledModel(default_max_new_tokens=8, context_length=CONTEXT)
    sample, budgets = await sample_and_budgets(Chatters(observed=3), model)
    assert budgets == [8, 8, 30 - 3 - 8 - 3 - 8 - 3]
    assert sample.trajectory.generated_tokens == 8 + 8 + 5
    assert sample.outcome is Outcome.CONTEXT_OVERFLOW
    assert "the context has 33 tokens, that of controlled is 30" in sample.error


async def test_max_context_len_beyond_the_models_context_is_cut_too() -> None:
    model = ControlledModel(default_max_new_tokens=8, context_length=CONTEXT)
    sample, budgets = await sample_and_budgets(
        Chatters(observed=3), model, stopping=StoppingCriteria(max_context_len=1_000)
    )
    assert budgets == [27]
    assert sample.outcome is Outcome.CONTEXT_OVERFLOW


async def test_max_context_len_within_it_counts() -> None:
    model = ControlledModel(default_max_new_tokens=8, context_length=CONTEXT)
    sample, budgets = await sample_and_budgets(
        Chatters(observed=3), model, stopping=StoppingCriteria(max_context_len=20)
    )
    assert budgets == [17]
    assert "the context has 23 tokens, max_context_len is 20" in sample.error


@pytest.mark.parametrize("said", [{"max_new_tokens": 40}, {"sampling": SamplingParams(max_new_tokens=40)}])
async def test_a_budget_that_a_turn_names_is_asked_for_as_it_is(said: dict[str, Any]) -> None:
    """Whether it fits is the engine's to say: somebody meant it."""
    model = ControlledModel(default_max_new_tokens=8, context_length=CONTEXT)
    async with running_engine(spec_of(Chatters(observed=3, **said)), generation_backends={STUDENT: model}) as harness:
        await harness.submit([task_of()])
        await settle()
        assert [request.sampling.max_new_tokens for request in model.requests] == [40]


async def test_so_is_one_of_the_cascade() -> None:
    model = ControlledModel(default_max_new_tokens=8, context_length=CONTEXT)
    async with running_engine(spec_of(Chatters(observed=3)), generation_backends={STUDENT: model}) as harness:
        await harness.submit([task_of(sampling=SamplingParams(max_new_tokens=40))])
        await settle()
        assert [request.sampling.max_new_tokens for request in model.requests] == [40]


async def test_an_engine_whose_default_nobody_knows_is_left_to_it() -> None:
    model = ControlledModel(default_max_new_tokens=None, context_length=CONTEXT)
    async with running_engine(spec_of(Chatters(observed=3)), generation_backends={STUDENT: model}) as harness:
        await harness.submit([task_of()])
        await settle()
        assert [request.sampling.max_new_tokens for request in model.requests] == [None]


async def test_the_least_that_is_asked_for_is_cut_with_the_most() -> None:
    model = ControlledModel(default_max_new_tokens=8, context_length=CONTEXT)
    async with running_engine(spec_of(Chatters(observed=26)), generation_backends={STUDENT: model}) as harness:
        await harness.submit([task_of(sampling=SamplingParams(min_new_tokens=6))])
        await settle()
        (asked,) = [request.sampling for request in model.requests]
        assert (asked.min_new_tokens, asked.max_new_tokens) == (4, 4)


async def test_a_second_turn_beside_one_that_asks_for_its_budget_is_refused() -> None:
    """The context grows by one turn at a time, whatever a turn is just waiting for."""
    seen: list[str] = []

    class Twice(BaseAgent):
        async def run(self, episode: Episode) -> AgentResult:
            episode.observe([1])
            first = asyncio.ensure_future(episode.generate())
            await asyncio.sleep(0)
            try:
                episode.observe([2])
            except FailedPreconditionError as error:
                seen.append(str(error))
            await first
            return AgentResult()

        async def eval(self, episode: Episode, result: AgentResult) -> Reward:
            return Reward(score=1.0)

    model = ControlledModel(default_max_new_tokens=8, context_length=CONTEXT)
    async with running_engine(spec_of(Twice()), generation_backends={STUDENT: model}) as harness:
        reply = await harness.submit([task_of()])
        await model.step(8)
        await harness.done(reply)
    assert seen == ["this episode is generating: wait for it before anything else is added"]
