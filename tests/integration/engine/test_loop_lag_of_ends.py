"""However many attempts end at the same moment, and however large what ends is, the loop is given back within 50 ms."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult, Outcome, Reward, TaskState
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import GoingClock
from tests.support.handlers import GatedAgent, StubbornAgent, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.loop_lag import LIMIT_SECONDS, LoopLag

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode

VERY_MANY = 1_500
AT_ONCE = Resource(concurrency=VERY_MANY)
ROOMY = EngineSettings(max_running_samples=VERY_MANY, stop_grace_seconds=5.0)


class BrokenAgent(GatedAgent):
    """Whatever waited for the gate fails."""

    async def run(self, episode: Episode) -> AgentResult:
        await super().run(episode)
        raise ConnectionError("the gate is broken")


class SlowToScore(GatedAgent):
    """The gate stands before `eval`."""

    async def run(self, episode: Episode) -> AgentResult:
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        await super().run(episode)
        return Reward(score=1.0)


async def all_done(harness: Harness) -> None:
    while harness.engine.ledger.open_tasks:  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
        await asyncio.sleep(0)


@pytest.mark.parametrize("agent", [GatedAgent(), SlowToScore(), BrokenAgent()], ids=["run", "eval", "failure"])
@pytest.mark.parametrize("follow", [0, 1], ids=["last", "others follow"])
async def test_very_many_handlers_that_one_event_wakes_while_the_loop_goes_on(agent: GatedAgent, follow: int) -> None:
    agent.gate = asyncio.Event()
    async with running_engine(spec_of(agent, resource=AT_ONCE), settings=ROOMY) as harness:
        reply = await harness.submit([task_of()] * (VERY_MANY * (1 + follow)), 1)
        await harness.until_started(reply, VERY_MANY)
        with LoopLag() as lag:
            agent.gate.set()
            await all_done(harness)
        assert lag.worst_seconds < LIMIT_SECONDS
        done = (await harness.done(reply)).values()
        (outcome,) = {outcome for event in done for outcome in event.outcomes}
        assert (outcome is Outcome.SOLVED) == (not isinstance(agent, BrokenAgent))


async def test_very_many_stranded_handlers_that_come_back_together_while_the_loop_goes_on() -> None:
    agent, clock = StubbornAgent(), GoingClock()
    async with running_engine(spec_of(agent, resource=AT_ONCE), settings=ROOMY, clock=clock) as harness:
        task = task_of("stubborn", repeat_times=VERY_MANY, max_samples_per_subtask=1)
        reply = await harness.submit([task], 1)
        await harness.until_started(reply, VERY_MANY)
        request = AbortRequest(selector=harness.selector(reply), request_id="a", wait=True, timeout_seconds=60.0)
        call = asyncio.create_task(harness.engine.abort(request))
        while len(harness.engine._supervisor._ladder._deadlines._heap) < VERY_MANY:  # noqa: ASYNC110 -- all are told to stop
            await asyncio.sleep(0)
        clock.now += 60.0
        harness.engine._supervisor._ladder._deadlines._expire()
        await call
        assert len(harness.engine._admission.room.stranded) == VERY_MANY
        with LoopLag() as lag:
            agent.free.set()
            while harness.engine._admission.room.stranded:  # noqa: ASYNC110 -- gives the loop back
                await asyncio.sleep(0)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert {event.state for event in (await harness.done(reply)).values()} == {TaskState.ABORTED}
