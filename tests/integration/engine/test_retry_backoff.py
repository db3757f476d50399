"""Attempts after one that the infrastructure failed: they wait a bounded, growing time, and say so."""

from __future__ import annotations

from py_scheduler.domain.evaluator import Episode
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.results import AgentResult, TaskState
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.errors import EngineUnavailableError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import ScriptedAgent, raises, spec_of
from tests.support.harness import running_engine, task_of

SETTINGS = EngineSettings(retry_backoff_seconds=2.0, max_retry_backoff_seconds=5.0)


async def unreachable(_: Episode) -> AgentResult:
    raise EngineUnavailableError("nobody answers")


async def test_each_further_attempt_waits_longer_up_to_the_bound_and_says_why() -> None:
    clock, agent = FakeClock(), ScriptedAgent(down=unreachable)
    async with running_engine(spec_of(agent), clock=clock, settings=SETTINGS) as harness:
        reply = await harness.submit([task_of("down", retry=RetryPolicy(max_retries=4))])
        waits = []
        for attempts in range(1, 5):
            await settle()
            assert agent.begun["down"] == attempts
            (waiting,) = harness.engine.submission(harness.selector(reply)).waiting
            assert waiting.reason.startswith("the infrastructure failed the attempt before: attempt")
            assert waiting.task_ids == reply.task_ids
            (wait,) = (await harness.engine.explain_task(reply.task_ids[0], "default")).waits
            assert wait.reason == waiting.reason
            began = clock.now
            while agent.begun["down"] == attempts:
                await clock.advance(0.25)
            waits.append(clock.now - began)
        await settle()
        (done,) = (await harness.done(reply)).values()
        assert done.state is TaskState.FAILED
    for waited, whole in zip(waits, (2.0, 4.0, 5.0, 5.0), strict=True):
        assert whole / 2 <= waited <= whole + 0.25
    assert clock.live_timers == 0


async def test_what_the_agent_failed_is_tried_again_at_once() -> None:
    clock, agent = FakeClock(), ScriptedAgent(bad=raises)
    async with running_engine(spec_of(agent), clock=clock, settings=SETTINGS) as harness:
        reply = await harness.submit([task_of("bad", retry=RetryPolicy(max_retries=2))])
        await harness.done(reply)
    assert agent.begun["bad"] == 3


async def test_an_abort_ends_what_waits_and_it_never_runs() -> None:
    clock, agent = FakeClock(), ScriptedAgent(down=unreachable)
    async with running_engine(spec_of(agent), clock=clock, settings=SETTINGS) as harness:
        reply = await harness.submit([task_of("down", retry=RetryPolicy(max_retries=4))])
        await settle()
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply)))
        (done,) = (await harness.done(reply)).values()
        assert done.state is TaskState.ABORTED
        assert harness.engine.submission(harness.selector(reply)).waiting == ()
        await clock.advance(60)
        assert harness.engine._supervisor.backoffs._waiting == {}, "nor is it remembered"
    assert agent.begun["down"] == 1
