"""Aborts, deadlines, timeouts, drains, and handlers that ignore them."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.requests import AbortRequest, EventFilter
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AgentResult, Outcome, Reward, TaskState
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.errors import (
    FailedPreconditionError,
    NotFoundError,
)
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import (
    GatedAgent,
    ScriptedAgent,
    SolvingAgent,
    StubbornAgent,
    gpu_spec,
    hangs,
    spec_of,
    two_nodes,
)
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import Episode


async def test_an_abort_right_after_a_submit_never_runs() -> None:
    agent = ScriptedAgent()
    async with running_engine(spec_of(agent)) as harness:
        reply = await harness.submit([task_of("never", repeat_times=8)])
        answer = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), reason="too late"))
        done = await harness.done(reply)
        assert answer.aborted_tasks == 1
        assert [(event.state, event.reason) for event in done.values()] == [(TaskState.ABORTED, "too late")]
        await settle()
    assert agent.begun == {}


class StopsSlowly:
    """Plays until it is told to stop, and then until it may."""

    def __init__(self) -> None:
        self.stopping, self.may_stop = asyncio.Event(), asyncio.Event()

    async def __call__(self, _: Episode) -> AgentResult:
        try:
            await asyncio.Event().wait()
        finally:
            self.stopping.set()
            await self.may_stop.wait()
        raise AssertionError("unreachable")


async def test_abort_with_wait_returns_when_the_work_has_stopped() -> None:
    slow = StopsSlowly()
    async with running_engine(spec_of(ScriptedAgent(slow=slow))) as harness:
        reply = await harness.submit([task_of("slow")])
        await harness.until_started(reply, 1)
        selector = harness.selector(reply)
        at_once = await harness.engine.abort(AbortRequest(selector=selector, wait=True, timeout_seconds=0.01))
        assert at_once.still_stopping == reply.task_ids
        waiting = asyncio.ensure_future(harness.engine.abort(AbortRequest(selector=selector, wait=True)))
        await slow.stopping.wait()
        await settle()
        assert not waiting.done()
        slow.may_stop.set()
        assert (await waiting).still_stopping == ()
        (done,) = (await harness.done(reply)).values()
        assert done.state is TaskState.ABORTED


async def test_a_handler_that_ignores_its_stop_is_given_up_and_its_room_stays_out() -> None:
    clock, agent = FakeClock(), StubbornAgent()

    pool = PlacementPool([NodeResource(node_ip="n", gpus=[0, 1], cpu=8, memory_gb=8)])
    spec = gpu_spec(agent, 1.0, budget_gpus=1, run_timeout_seconds=10.0)
    async with running_engine(spec, pool=pool, clock=clock) as harness:
        reply = await harness.submit([task_of("stubborn"), task_of("fine")])
        await agent.started.wait()
        await clock.advance(11)
        view = harness.engine.submission(harness.selector(reply))
        assert (view.running_attempts, view.leased_attempts) == (1, 1)
        await clock.advance(6)
        done = await harness.done(reply)
        assert "did not stop within 5 s" in done[reply.task_ids[0]].reason
        assert done[reply.task_ids[0]].outcomes == {Outcome.AGENT_TIMEOUT: 1}
        (sample,) = [s for s in await harness.samples(reply) if s.task_id == reply.task_ids[0]]
        assert (sample.node_ip, sample.phase, len(sample.gpu_ids)) == ("n", "run", 1), "it says where it ran"
        again = await harness.engine.abort(AbortRequest(selector=harness.selector(reply), wait=True))
        assert again.still_stopping == (reply.task_ids[0],), "nobody has seen it stop"
        assert done[reply.task_ids[1]].state is TaskState.SUCCEEDED, "what waited behind it runs elsewhere"
        assert pool.free_tokens_for(Resource(gpu=1.0)) == 1
        agent.free.set()
        await settle()
        assert pool.free_tokens_for(Resource(gpu=1.0)) == 2


async def test_room_that_is_stranded_holds_nobody_else_back() -> None:
    clock, agent = FakeClock(), StubbornAgent()

    pool = PlacementPool([NodeResource(node_ip="n", gpus=[0, 1], cpu=8, memory_gb=8)])
    spec = gpu_spec(agent, 1.0, budget_gpus=2, run_timeout_seconds=10.0)
    settings = EngineSettings(max_bypass=1)
    async with running_engine(spec, pool=pool, clock=clock, settings=settings) as harness:
        await harness.submit([task_of("stubborn")], 1)
        await agent.started.wait()
        await clock.advance(20)
        large = await harness.submit([task_of("large"), task_of("large")], 2)
        small = [await harness.submit([task_of("small")], 3) for _ in range(20)]
        for reply in small:
            await harness.done(reply)
        (waiting,) = harness.engine.submission(harness.selector(large)).waiting
        assert "1 tokens are held by handlers that do not stop" in waiting.reason
        agent.free.set()
        await harness.done(large)


async def test_an_engine_that_ends_counts_a_handler_that_was_given_up_and_grants_it_no_second_grace() -> None:
    clock, agent = FakeClock(), StubbornAgent()
    spec, an_hour = spec_of(agent, run_timeout_seconds=10.0), EngineSettings(stop_grace_seconds=3600.0)
    try:
        async with asyncio.timeout(10), running_engine(spec, clock=clock, settings=an_hour) as harness:
            reply = await harness.submit([task_of("stubborn")])
            await agent.started.wait()
            await clock.advance(10)
            await clock.advance(3600)
            assert [event.state for event in (await harness.done(reply)).values()] == [TaskState.FAILED]
        assert harness.engine.stranded_workers == 1
    finally:
        agent.free.set()
        await settle()


async def test_nothing_is_tried_again_beside_a_handler_that_ignores_its_stop() -> None:
    clock, agent = FakeClock(), StubbornAgent()

    async with running_engine(spec_of(agent, run_timeout_seconds=10.0), clock=clock) as harness:
        reply = await harness.submit([task_of("stubborn", retry=RetryPolicy(max_failure_retries=2))])
        await agent.started.wait()
        await clock.advance(20)
        assert [event.state for event in (await harness.done(reply)).values()] == [TaskState.FAILED]
        agent.free.set()
        await settle()
    assert agent.begun == {"stubborn": 1}


async def test_an_abort_of_all_waits_for_what_an_earlier_abort_is_still_stopping() -> None:
    slow = StopsSlowly()
    async with running_engine(spec_of(ScriptedAgent(slow=slow, other=hangs))) as harness:
        reply = await harness.submit([task_of("slow"), task_of("other")])
        await harness.until_started(reply, 2)
        selector = harness.selector(reply)
        await harness.engine.abort(AbortRequest(selector=selector, task_ids=(reply.task_ids[0],)))
        await slow.stopping.wait()
        waiting = asyncio.ensure_future(harness.engine.abort(AbortRequest(selector=selector, wait=True)))
        await settle()
        assert not waiting.done()
        slow.may_stop.set()
        assert (await waiting).still_stopping == ()
        with pytest.raises(NotFoundError, match="no task"):
            await harness.engine.abort(AbortRequest(selector=selector, task_ids=("nobody",)))


async def test_a_thousand_deadlines_in_one_moment_end_a_thousand_tasks() -> None:
    clock, agent = FakeClock(), GatedAgent()
    async with running_engine(
        spec_of(agent, resource=Resource(concurrency=1), batch_size=None), clock=clock
    ) as harness:
        reply = await harness.submit([task_of(str(n), task_deadline_seconds=60.0) for n in range(1_000)])
        await harness.until_started(reply, 1)
        await clock.advance(61)
        done = await harness.done(reply)
        assert {event.reason for event in done.values()} == {"task_deadline_seconds (60) passed"}
        later = await harness.submit([task_of("later")], 1)
        agent.gate.set()
        assert [event.state for event in (await harness.done(later)).values()] == [TaskState.SUCCEEDED]
    assert set(agent.begun) == {"0", "later"}


async def test_aborted_batches_hold_nothing_back() -> None:
    agent = GatedAgent()
    async with running_engine(gpu_spec(agent, 1.0), pool=two_nodes(), settings=EngineSettings(max_bypass=0)) as harness:
        running = await harness.submit([task_of("running") for _ in range(10)], 1)
        await harness.until_started(running, 10)
        large = await harness.submit([task_of("large") for _ in range(16)], 2)
        small = await harness.submit([task_of("small")], 3)
        await settle()
        assert agent.begun["small"] == 0, "it may not overtake"
        await harness.engine.abort(AbortRequest(selector=harness.selector(large)))
        await harness.until_started(small, 1)
        agent.gate.set()


async def test_watches_end_with_the_engine() -> None:
    async with running_engine(spec_of(SolvingAgent())) as harness:
        frames = harness.engine.watch(EventFilter(), None)
        await anext(frames)
    with pytest.raises(StopAsyncIteration):
        await anext(frames)


async def test_a_task_deadline_ends_what_waits_and_what_runs() -> None:
    clock, agent = FakeClock(), GatedAgent()
    spec = spec_of(agent, resource=Resource(concurrency=1), batch_size=None)
    async with running_engine(spec, clock=clock) as harness:
        reply = await harness.submit([task_of("slow", repeat_times=3, task_deadline_seconds=60.0)])
        await harness.until_started(reply, 1)
        await clock.advance(61)
        (done,) = (await harness.done(reply)).values()
    assert (done.state, done.reason) == (TaskState.FAILED, "task_deadline_seconds (60) passed")
    assert done.outcomes == {Outcome.AGENT_TIMEOUT: 3}


async def test_the_eval_phase_has_its_own_timeout() -> None:
    class SlowScorer(SolvingAgent):
        async def eval(self, episode: Episode, result: AgentResult) -> Reward:
            await asyncio.Event().wait()
            return Reward(score=1.0)

    clock = FakeClock()
    async with running_engine(
        spec_of(SlowScorer(), run_timeout_seconds=5.0, eval_timeout_seconds=20.0), clock=clock
    ) as harness:
        reply = await harness.submit([task_of()])
        await harness.until_started(reply, 1)
        await settle()
        await clock.advance(10)
        assert harness.engine.submission(harness.selector(reply)).running_attempts == 1
        await clock.advance(11)
        (sample,) = await harness.samples(reply)
    assert (sample.phase, sample.error) == ("eval", "eval_timeout_seconds (20) passed")


async def test_draining_lets_samples_finish_and_takes_nothing_new() -> None:
    agent = GatedAgent()
    spec = spec_of(agent, resource=Resource(concurrency=1), batch_size=None)
    async with running_engine(spec) as harness:
        reply = await harness.submit([task_of("a"), task_of("waits")])
        await harness.until_started(reply, 1)
        draining = asyncio.ensure_future(harness.engine.drain(60.0))
        await settle()
        with pytest.raises(FailedPreconditionError, match="shutting down"):
            await harness.submit([task_of("late")])
        agent.gate.set()
        await draining
        states = [event.state for event in (await harness.done(reply)).values()]
        assert states == [TaskState.SUCCEEDED, TaskState.ABORTED], "what ran finishes, what waited ends too"
        assert agent.begun == {"a": 1}


async def test_draining_stops_what_does_not_finish() -> None:
    async with running_engine(spec_of(ScriptedAgent(hangs=hangs))) as harness:
        reply = await harness.submit([task_of("hangs")])
        await harness.until_started(reply, 1)
        await harness.engine.drain(0.01)
        (done,) = (await harness.done(reply)).values()
    assert (done.state, done.reason) == (TaskState.ABORTED, "the server is shutting down")
