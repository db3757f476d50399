"""How long an eval or a later batch can be kept waiting under Trinity's use: batch ids in order, a few runners, and a
trainer that schedules steps ahead.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.evaluator import BaseAgent, Episode, EvaluatorSpec
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.trainers.collecting import collect, schedule

if TYPE_CHECKING:
    from py_scheduler.domain.task import BatchId, Task

RUNNERS = 4
RUN_SECONDS = 1.0


class Timed(BaseAgent):
    """Takes a second of the clock, and remembers in which order prompts were begun and when."""

    def __init__(self, clock: FakeClock) -> None:
        self._clock = clock
        self.begun: list[tuple[float, str]] = []

    async def run(self, episode: Episode) -> AgentResult:
        self.begun.append((self._clock.now, episode.sample.task.prompt))
        over = asyncio.Event()
        self._clock.call_at(self._clock.now + RUN_SECONDS, over.set)
        await over.wait()
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)

    def seconds_until(self, prompt: str, began: float) -> list[float]:
        return [when - began for when, which in self.begun if which == prompt]


def runners() -> PlacementPool:
    """Each a node with one slot."""
    return PlacementPool([NodeResource(node_ip=f"runner-{n}", gpus=[], cpu=1, memory_gb=1) for n in range(RUNNERS)])


def spec(agent: BaseAgent) -> EvaluatorSpec:
    one = Resource(cpu=1)
    return spec_of(agent, resource=Resource(cpu=1, concurrency=1), run_resource=one, eval_resource=one)


def batch(prompt: str, count: int, *, is_eval: bool = False) -> list[Task]:
    return [task_of(prompt, is_eval=is_eval) for _ in range(count)]


async def run_through(harness: Harness, clock: FakeClock, batch_id: BatchId) -> None:
    waiting = asyncio.create_task(collect(harness.engine, batch_id))
    while not waiting.done():
        await clock.advance(RUN_SECONDS / 2)


async def test_behind_a_long_training_backlog_an_eval_gets_its_share() -> None:
    clock = FakeClock()
    agent = Timed(clock)
    async with running_engine(spec(agent), pool=runners(), clock=clock) as harness:
        await schedule(harness.engine, batch("train", 400), 1)
        await schedule(harness.engine, batch("ahead", 400), 2)
        await settle()
        began = clock.now
        await schedule(harness.engine, batch("eval", 8, is_eval=True), "2/math")
        await run_through(harness, clock, "2/math")
        # Half of four runners: eight tasks are begun within four turns, where 800 are ahead of them.
        assert max(agent.seconds_until("eval", began)) <= 5 * RUN_SECONDS


@pytest.mark.parametrize("max_wait_seconds", [10.0, None])
async def test_in_the_order_of_batch_ids_alone_max_wait_seconds_is_the_bound(max_wait_seconds: float | None) -> None:
    clock = FakeClock()
    agent = Timed(clock)
    settings = EngineSettings(eval_weight="by_batch_id", max_wait_seconds=max_wait_seconds)
    async with running_engine(spec(agent), pool=runners(), clock=clock, settings=settings) as harness:
        await schedule(harness.engine, batch("train", 100), 1)
        await settle()
        await clock.advance(RUN_SECONDS / 4)
        began = clock.now
        await schedule(harness.engine, batch("eval", 2, is_eval=True), "1/math")
        await schedule(harness.engine, batch("later", 2), 2)
        await schedule(harness.engine, batch("train", 100), 1)
        await run_through(harness, clock, 2)
        evals, later = agent.seconds_until("eval", began), agent.seconds_until("later", began)
        if max_wait_seconds is None:
            assert min(*evals, *later) > 40 * RUN_SECONDS
            assert max(evals) <= min(later)
        else:
            # What was older than they were and had waited as long goes before them: 100 of step 1, four at a time.
            assert max(*evals, *later) <= 26 * RUN_SECONDS


async def test_a_later_batch_is_never_passed_by_what_comes_after_it() -> None:
    """Step 2 waits for step 1, and for nothing that the trainer schedules under a later id."""
    clock = FakeClock()
    agent = Timed(clock)
    async with running_engine(spec(agent), pool=runners(), clock=clock) as harness:
        await schedule(harness.engine, batch("one", 20), 1)
        await schedule(harness.engine, batch("three", 200), 3)
        await settle()
        began = clock.now
        await schedule(harness.engine, batch("two", 20), 2)
        await run_through(harness, clock, 2)
        assert max(agent.seconds_until("two", began)) <= (20 + 20) / RUNNERS * RUN_SECONDS
