"""Samples that are rolled out again because the infrastructure failed them: on the real engine."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.domain.events import AttemptEnded
from py_scheduler.domain.results import AgentResult, AttemptState, Outcome, TaskState
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.errors import SandboxError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.agents.ranking import RankingAgent, one_done
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import ScriptedAgent, StubbornAgent, spec_of
from tests.support.harness import running_engine, samples_in, task_of
from tests.support.journal.journal_store import SurvivingJournal

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode


async def test_a_sample_that_the_infrastructure_failed_is_rolled_out_again_and_its_siblings_are_not() -> None:
    begun: list[tuple[int, int]] = []

    async def third_is_unlucky(episode: Episode) -> AgentResult:
        begun.append((episode.sample.sample_no, episode.attempt_no))
        if episode.sample.sample_no == 2 and episode.attempt_no < 3:
            raise SandboxError("no sandbox could be made")
        return AgentResult()

    agent = RankingAgent(unlucky=third_is_unlucky)
    async with running_engine(spec_of(agent)) as harness:
        reply = await harness.submit([task_of("unlucky", repeat_times=4, retry=RetryPolicy(max_infra_refills=2))])
        records = await harness.records_until_done(reply)
    assert sorted(begun) == [(0, 1), (1, 1), (2, 1), (2, 2), (2, 3), (3, 1)]
    refilled = [r.event for r in records if isinstance(r.event, AttemptEnded) and r.event.next_attempt_no]
    assert [(e.state, e.samples, e.is_refill) for e in refilled] == [(AttemptState.FAILED, (), True)] * 2
    assert sorted(sample.sample_no for sample in samples_in(records)) == [0, 1, 2, 3]
    assert agent.asked == [("unlucky", [0, 1, 2, 3])], "a refill keeps the task open"


async def test_refills_are_counted_across_a_restart() -> None:
    attempts: list[int] = []

    async def is_down(episode: Episode) -> AgentResult:
        attempts.append(episode.attempt_no)
        raise ConnectionRefusedError("down")

    async def hangs_on_retry(episode: Episode) -> AgentResult:
        if episode.attempt_no == 1:
            raise ConnectionRefusedError("down")
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    journal = SurvivingJournal()
    retry = RetryPolicy(max_infra_refills=2)
    async with running_engine(spec_of(ScriptedAgent(down=hangs_on_retry)), journal=journal) as harness:
        reply = await harness.submit([task_of("down", retry=retry)])
        await harness.until_started(reply, 2)
    async with running_engine(spec_of(ScriptedAgent(down=is_down)), journal=journal) as harness:
        done = await one_done(harness, reply)
    assert attempts == [3, 4], "attempt 1 was refilled, 2 ended with its server, 3 was refilled"
    assert done.outcomes == {Outcome.INFRA_CONN: 1}


async def test_a_stranded_attempt_is_never_refilled() -> None:
    clock, agent = FakeClock(), StubbornAgent()
    settings = EngineSettings(stop_grace_seconds=1.0)
    async with running_engine(spec_of(agent, run_timeout_seconds=10.0), clock=clock, settings=settings) as harness:
        reply = await harness.submit([task_of("stubborn", retry=RetryPolicy(max_infra_refills=9))])
        await agent.started.wait()
        await clock.advance(20)
        assert (await one_done(harness, reply)).state is TaskState.FAILED
        agent.free.set()
        await settle()
    assert agent.begun == {"stubborn": 1}
