"""Accepted work on fewer nodes than it was accepted for: after a restart, and when nodes are lost while it waits."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.domain.collecting import CollectRequest
from py_scheduler.domain.requests import AbortRequest, Delivery, SubmitReply, SubmitRequest
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AgentResult, Outcome, TaskState
from py_scheduler.domain.task import RetryPolicy, SubmissionKey
from py_scheduler.errors import AlreadyExistsError, EngineUnavailableError, ResourceExhaustedError, UnplaceableError
from py_scheduler.interfaces.task_scheduler import TaskScheduler
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.intake import Intake
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.staleness import StalenessSettings
from py_scheduler.scheduler.queue import admission
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.agents.ranking import RankingAgent
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, ScriptedAgent, SolvingAgent, gpu_spec, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.journal.journal_store import SurvivingJournal
from tests.support.steps.task_schedulers import engine_of

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from py_scheduler.domain.evaluator import BaseAgent, Episode, EvaluatorSpec
    from py_scheduler.domain.events import TaskDone

GPU = Resource(gpu=1.0)
WAITS_FOR_NODES = EngineSettings(has_fixed_nodes=False)


def pool_of(nodes: int, gpus: int = 8) -> PlacementPool:
    return PlacementPool(
        [NodeResource(node_ip=f"n{n}", gpus=list(range(gpus)), cpu=64, memory_gb=64) for n in range(nodes)]
    )


def lose(harness: Harness, pool: PlacementPool, *nodes: str) -> None:
    for node in nodes:
        pool.remove_node(node)
    harness.engine.nodes_have_changed()


def on_gpus(handler: BaseAgent, evaluator_id: str, **changes: Any) -> EvaluatorSpec:
    changes = {"resource": Resource(gpu=16, concurrency=16), "batch_size": None} | changes
    return spec_of(handler, evaluator_id, run_resource=GPU, eval_resource=GPU, **changes)


def reasons_of(harness: Harness, reply: SubmitReply) -> list[str]:
    return [batch.reason for batch in harness.engine.submission(harness.selector(reply)).waiting]


# Calls that are sent again


async def test_a_submit_sent_again_is_answered_as_before_whatever_has_room_by_then(tmp_path: Path) -> None:
    """On fewer nodes than one batch wants, under lower limits, and by a server that takes nothing new."""
    tasks = [task_of(str(n), "nobody's") for n in range(16)]
    async with running_engine(gpu_spec(GatedAgent(), 1.0), pool=pool_of(2), journal=SqliteJournal(tmp_path)) as harness:
        first = await harness.submit(tasks, 7, request_id="r")
        assert "nobody's" in first.warnings[0]
    limits = EngineSettings(max_queued_tasks=1, max_queued_samples=1)
    async with running_engine(
        gpu_spec(GatedAgent(), 1.0),
        spec_of(SolvingAgent(), "nobody's"),
        pool=pool_of(1),
        journal=SqliteJournal(tmp_path),
        settings=limits,
    ) as harness:
        assert await harness.submit(tasks, 7, request_id="r") == first, "its warning too, although it holds no more"
        with pytest.raises(AlreadyExistsError, match="'r'"):
            await harness.submit(tasks[1:], 7, request_id="r")
        with pytest.raises(ResourceExhaustedError):
            await harness.submit([task_of()], 7, request_id="new")
        with pytest.raises(UnplaceableError):
            await harness.submit([task_of()] * 16, 7, request_id="too large")
        harness.engine._admission.stop()
        assert await harness.submit(tasks, 7, request_id="r") == first


async def test_every_other_call_sent_again_is_answered_as_before_on_fewer_nodes(tmp_path: Path) -> None:
    tasks = tuple(task_of(str(n)) for n in range(16))
    request = SubmitRequest(request_id="s", key=SubmissionKey(1), tasks=tasks, delivery=Delivery.COLLECT)
    abort: AbortRequest
    async with running_engine(
        gpu_spec(SolvingAgent(), 1.0), pool=pool_of(2), journal=SqliteJournal(tmp_path)
    ) as harness:
        await harness.engine.submit(request)
        collect = CollectRequest(request_id="c", batch_id=1)
        collected = await harness.engine.results.collect(collect)
        assert len(collected.results) == 16
        other = await harness.submit([task_of()], 2)
        abort = AbortRequest(selector=harness.selector(other), request_id="a")
        aborted = await harness.engine.abort(abort)
        await harness.engine.results.discard(harness.selector(other), "d")
    async with running_engine(
        gpu_spec(SolvingAgent(), 1.0), pool=pool_of(1), journal=SqliteJournal(tmp_path)
    ) as harness:
        assert await harness.engine.results.collect(collect) == collected
        assert await harness.engine.abort(abort) == aborted
        before = harness.engine.last_sequence
        await harness.engine.results.discard(harness.selector(other), "d")
        assert harness.engine.last_sequence == before


async def test_a_run_that_was_begun_on_more_nodes_gives_what_it_gave_and_a_new_one_is_refused() -> None:
    tasks = [task_of(str(n)) for n in range(16)]
    journal = SurvivingJournal()
    engine = engine_of(gpu_spec(SolvingAgent(), 1.0), pool=pool_of(2), journal=journal)
    async with TaskScheduler(engine) as scheduler:
        first = await scheduler.run_all(tasks, batch_id=1)
    engine = engine_of(gpu_spec(SolvingAgent(), 1.0), pool=pool_of(1), journal=journal)
    async with TaskScheduler(engine) as scheduler:
        assert await scheduler.run_all(tasks, batch_id=1) == first
        with pytest.raises(UnplaceableError):
            await scheduler.run_all(tasks, batch_id=2)


# Nodes that go while a large submit is taken in


@pytest.mark.parametrize(("owner", "step"), [(Intake, "planning"), (Ledger, "preparing")])
@pytest.mark.parametrize("left", [0, 1])
async def test_a_large_submit_is_refused_when_its_nodes_go_before_it_is_decided(
    owner: type, step: str, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a small one that comes then. It has room for its 16 at a time when it arrives, and for 8 or none later."""
    going_on = asyncio.Event()
    begin = getattr(owner, step)

    def stepping(*arguments: Any) -> Generator[bool | None, None, Any]:
        going_on.set()
        yield True
        return (yield from begin(*arguments))

    monkeypatch.setattr(owner, step, stepping)
    agent, pool = GatedAgent(), pool_of(2)
    async with running_engine(on_gpus(agent, "agent"), pool=pool) as harness:
        call = asyncio.create_task(harness.submit([task_of()] * 2_000, 1))
        await going_on.wait()
        lose(harness, pool, *("n0", "n1")[left:])
        with pytest.raises(UnplaceableError):
            await call
        assert harness.engine.ledger.open_tasks == 0
        assert not harness.engine.has_taken_in("default", "request-0")


async def test_a_large_submit_that_was_decided_when_its_nodes_go_ends_with_the_reason() -> None:
    agent, pool = GatedAgent(), pool_of(2)
    async with running_engine(on_gpus(agent, "agent"), pool=pool) as harness:
        call = asyncio.create_task(harness.submit([task_of()] * 2_000, 1))
        while not harness.engine.ledger.open_tasks:  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
            await asyncio.sleep(0)
        lose(harness, pool, "n0", "n1")
        for event in (await harness.done(await call)).values():
            assert event.state is TaskState.FAILED
            assert "no node that is left can hold a sample of evaluator 'agent'" in event.reason


# Tasks that come back


async def test_after_a_restart_a_batch_wants_no_more_than_the_nodes_that_are_left_hold() -> None:
    journal, agent = SurvivingJournal(), GatedAgent()
    async with running_engine(gpu_spec(GatedAgent(), 1.0), pool=pool_of(2), journal=journal) as harness:
        reply = await harness.submit([task_of(str(n)) for n in range(16)], 7)
        await harness.until_started(reply, 16)
    async with running_engine(gpu_spec(agent, 1.0), pool=pool_of(1), journal=journal) as harness:
        await settle()
        assert agent.inside == 8
        agent.gate.set()
        done = await harness.done(reply)
    assert {event.state for event in done.values()} == {TaskState.SUCCEEDED}
    assert agent.peak == 8
    assert set(agent.begun.values()) == {1}


async def test_a_batch_in_the_queue_wants_less_when_nodes_are_lost_and_says_how_much() -> None:
    holder, agent, pool = GatedAgent(), GatedAgent(), pool_of(2)
    specs = [on_gpus(agent, "large"), on_gpus(holder, "holder", resource=GPU)]
    async with running_engine(*specs, pool=pool) as harness:
        held = await harness.submit([task_of(task_type="holder")], 0)
        await harness.until_started(held, 1)
        reply = await harness.submit([task_of(str(n), "large") for n in range(16)], 1)
        await settle()
        assert "needs 16 tokens" in reasons_of(harness, reply)[0]
        lose(harness, pool, next(node.node_ip for node in pool.nodes() if min(node.gpu_free) == 1.0))
        await settle()
        assert "needs 8 tokens" in reasons_of(harness, reply)[0]
        assert (await harness.engine.explain_task(reply.task_ids[0], "default")).waits[0].wanted_tokens == 8
        holder.gate.set()
        await harness.until_started(reply, 8)
        await settle()
        assert agent.inside == 8
        agent.gate.set()
        assert {event.state for event in (await harness.done(reply)).values()} == {TaskState.SUCCEEDED}


async def test_where_nodes_come_and_go_a_batch_waits_for_all_that_it_wants_and_says_so() -> None:
    agent, pool, journal = GatedAgent(), pool_of(1), SurvivingJournal()
    async with running_engine(gpu_spec(GatedAgent(), 1.0), pool=pool_of(2), journal=journal) as harness:
        reply = await harness.submit([task_of(str(n)) for n in range(16)], 7)
    async with running_engine(gpu_spec(agent, 1.0), pool=pool, journal=journal, settings=WAITS_FOR_NODES) as harness:
        await settle()
        (reason,) = reasons_of(harness, reply)
        assert "needs 16 tokens" in reason
        assert "the nodes hold 8 even when empty: it waits until there are more" in reason
        lose(harness, pool, "n0")
        await settle()
        assert reasons_of(harness, reply) == ["no node is left in the pool: it waits until one is back"]
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 16
        for node in pool_of(2).nodes():
            pool.add_node(NodeResource(node_ip=node.node_ip, gpus=node.gpu_ids, cpu=64, memory_gb=64))
        harness.engine.nodes_have_changed()
        await harness.until_started(reply, 16)
        agent.gate.set()
        await harness.done(reply)


@settings(max_examples=25, deadline=None)
@given(
    shapes=st.lists(
        st.tuples(st.integers(1, 5), st.integers(1, 4), st.sampled_from([None, 1, 2])), min_size=1, max_size=5
    ),
    share=st.sampled_from([0.33, 1.0, 2.0]),
    batch_size=st.sampled_from([None, 1, 3]),
    left=st.integers(1, 2),
)
def test_whatever_was_accepted_ends_on_the_nodes_that_are_left(
    shapes: list[tuple[int, int, int | None]], share: float, batch_size: int | None, left: int
) -> None:
    """shapes: how many tasks, of how many samples, in sub-tasks of how many."""

    def spec(agent: BaseAgent) -> EvaluatorSpec:
        sample = Resource(gpu=share)
        budget = Resource(gpu=16.0, concurrency=64)
        return spec_of(agent, resource=budget, run_resource=sample, eval_resource=sample, batch_size=batch_size)

    async def restarted() -> None:
        journal = SurvivingJournal()
        replies = []
        async with running_engine(spec(GatedAgent()), pool=pool_of(8, gpus=2), journal=journal) as harness:
            for batch_id, (count, samples, size) in enumerate(shapes):
                tasks = [task_of(repeat_times=samples, max_samples_per_subtask=size) for _ in range(count)]
                try:
                    replies.append(await harness.submit(tasks, batch_id))
                except UnplaceableError:
                    continue
        async with running_engine(spec(SolvingAgent()), pool=pool_of(left, gpus=2), journal=journal) as harness:
            async with asyncio.timeout(10):
                for reply in replies:
                    assert {done.state for done in (await harness.done(reply)).values()} == {TaskState.SUCCEEDED}

    asyncio.run(restarted())


# What is left of a batch whose tokens are of a node that went


@pytest.mark.parametrize("left", [1, 0])
async def test_a_token_of_a_node_that_went_is_used_for_no_other_attempt(left: int) -> None:
    """24 samples on 16 tokens of two nodes; what runs when nodes go may finish, the rest runs on what is left."""
    gate = asyncio.Event()
    begun: list[str] = []

    async def gated(episode: Episode) -> AgentResult:
        assert episode.token is not None
        begun.append(episode.token.node_ip)
        await gate.wait()
        return AgentResult()

    pool = pool_of(2)
    async with running_engine(on_gpus(ScriptedAgent(agent=gated), "agent"), pool=pool) as harness:
        reply = await harness.submit([task_of("agent")] * 24, 1)
        await harness.until_started(reply, 16)
        lose(harness, pool, *["n0", "n1"][: 2 - left])
        gate.set()
        states = Counter(event.state for event in (await harness.done(reply)).values())
        assert states[TaskState.SUCCEEDED] == (24 if left else 16)
        assert states[TaskState.FAILED] == (0 if left else 8)
        assert begun[16:] == ["n1"] * (8 if left else 0)
        assert harness.engine._admission.room.permits_out == 0


# What no node can hold


def is_refused(done: TaskDone, evaluator_id: str) -> None:
    assert done.state is TaskState.FAILED
    assert done.outcomes == {Outcome.INFRA_OTHER: done.planned_samples}
    assert f"no node that is left can hold a sample of evaluator {evaluator_id!r} (short of " in done.reason
    assert "gpu on 1 node" in done.reason
    assert "add a node" in done.reason


def with_cores(agent: BaseAgent, **changes: Any) -> tuple[PlacementPool, EvaluatorSpec, EvaluatorSpec]:
    """A node of cores alone beside one with GPUs, and an evaluator for each."""
    pool = PlacementPool(
        [
            NodeResource(node_ip="gpus", gpus=[0, 1], cpu=64, memory_gb=64),
            NodeResource(node_ip="cores", gpus=[], cpu=64, memory_gb=64),
        ]
    )
    cores = spec_of(ScriptedAgent(), "cores", run_resource=Resource(cpu=1), resource=Resource(cpu=64, concurrency=64))
    return pool, on_gpus(agent, "gpus", resource=Resource(gpu=2, concurrency=2), **changes), cores


async def test_what_waits_ends_with_its_reason_and_what_runs_may_finish() -> None:
    agent = GatedAgent()
    pool, gpus, cores = with_cores(agent)
    async with running_engine(gpus, cores, pool=pool) as harness:
        running = await harness.submit([task_of(task_type="gpus")] * 2, 1)
        await harness.until_started(running, 2)
        waiting = await harness.submit([task_of(task_type="gpus", retry=RetryPolicy(max_retries=5))] * 3, 2)
        lose(harness, pool, "gpus")
        done = await harness.done(waiting)
        for event in done.values():
            is_refused(event, "gpus")
        agent.gate.set()
        assert {event.state for event in (await harness.done(running)).values()} == {TaskState.SUCCEEDED}
        other = await harness.submit([task_of(task_type="cores")], 3)
        assert {event.state for event in (await harness.done(other)).values()} == {TaskState.SUCCEEDED}
        with pytest.raises(UnplaceableError):
            await harness.submit([task_of(task_type="gpus")], 4)


@pytest.mark.parametrize("leased_at_once", [1, 3, 1_000])
async def test_what_was_let_in_is_not_refused_however_many_turns_it_takes_to_call_it_leased(
    leased_at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of its tokens are out when the node goes. What waits behind it is refused."""
    monkeypatch.setattr(admission, "_LEASED_AT_ONCE", leased_at_once)
    agent = GatedAgent()
    pool = pool_of(1)
    async with running_engine(on_gpus(agent, "agent"), pool=pool) as harness:
        running = await harness.submit([task_of()] * 8, 1)
        waiting = await harness.submit([task_of()] * 3, 2)
        while pool.free_tokens_for(GPU):  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
            await asyncio.sleep(0)
        lose(harness, pool, "n0")
        for event in (await harness.done(waiting)).values():
            assert event.state is TaskState.FAILED
        agent.gate.set()
        assert {event.state for event in (await harness.done(running)).values()} == {TaskState.SUCCEEDED}


async def test_what_comes_back_to_be_tried_again_ends_too_and_what_waits_for_that() -> None:
    """A retry at once, one after a backoff, and one whose backoff runs when the node goes."""

    async def fails(episode: Episode) -> AgentResult:
        await gates[episode.sample.task.prompt].wait()
        if episode.sample.task.prompt == "agent":
            raise ValueError("its own fault")
        raise EngineUnavailableError("nobody answers")

    gates = {prompt: asyncio.Event() for prompt in ("agent", "late", "early")}
    clock = FakeClock()
    pool, gpus, cores = with_cores(ScriptedAgent(agent=fails, late=fails, early=fails), batch_size=1)
    wide = EngineSettings(retry_backoff_seconds=2.0)
    pool.add_node(NodeResource(node_ip="more", gpus=[0, 1], cpu=64, memory_gb=64))
    async with running_engine(gpus, cores, pool=pool, clock=clock, settings=wide) as harness:
        retry = RetryPolicy(max_retries=3)
        tasks = [task_of(prompt, "gpus", retry=retry) for prompt in ("agent", "late", "early")]
        reply = await harness.submit(tasks, 1)
        await harness.until_started(reply, 3)
        gates["early"].set()
        await settle()
        lose(harness, pool, "gpus", "more")
        gates["agent"].set()
        gates["late"].set()
        await settle()
        await clock.advance(10.0)
        done = await harness.done(reply)
        for event in done.values():
            is_refused(event, "gpus")
        assert harness.engine._admission.room.permits_out == 0
        assert clock.live_timers == 0


async def test_samples_that_were_played_count_and_their_group_is_scored_after_the_last_is_refused() -> None:
    gate = asyncio.Event()

    async def second_fails(episode: Episode) -> AgentResult:
        if episode.sample.sample_no == 1:
            await gate.wait()
            raise ValueError("its own fault")
        return AgentResult()

    agent = RankingAgent(group=second_fails)
    pool, gpus, cores = with_cores(agent)
    async with running_engine(gpus, cores, pool=pool) as harness:
        retry = RetryPolicy(max_retries=1)
        reply = await harness.submit([task_of("group", "gpus", repeat_times=2, retry=retry)], 1)
        await harness.until_started(reply, 2)
        await settle()
        lose(harness, pool, "gpus")
        gate.set()
        (done,) = (await harness.done(reply)).values()
    assert agent.asked == [("group", [0, 1])]
    assert agent.outcomes[0][1] is Outcome.INFRA_OTHER
    assert done.state is TaskState.PARTIAL
    assert "no node that is left can hold a sample of evaluator 'gpus'" in done.reason


async def test_what_is_held_back_as_too_stale_ends_too() -> None:
    agent = GatedAgent()
    pool, gpus, cores = with_cores(agent, batch_size=1)
    limits = EngineSettings(staleness={"default": StalenessSettings(max_staleness=0, step_size=1)})
    async with running_engine(gpus, cores, pool=pool, settings=limits) as harness:
        first = await harness.submit([task_of(task_type="gpus")], 1)
        await harness.until_started(first, 1)
        held = await harness.submit([task_of(task_type="gpus")] * 2, 1)
        assert "max_staleness" in reasons_of(harness, held)[0]
        lose(harness, pool, "gpus")
        for event in (await harness.done(held)).values():
            is_refused(event, "gpus")
        agent.gate.set()
        await harness.done(first)


async def test_a_node_that_only_drains_may_be_resumed_so_what_wants_it_waits() -> None:
    agent = GatedAgent()
    pool, gpus, cores = with_cores(agent, batch_size=1)
    async with running_engine(gpus, cores, pool=pool) as harness:
        pool.drain_node("gpus")
        harness.engine.nodes_have_changed()
        pool.resume_node("gpus")
        reply = await harness.submit([task_of(task_type="gpus")] * 3, 1)
        await harness.until_started(reply, 2)
        pool.drain_node("gpus")
        harness.engine.nodes_have_changed()
        await settle()
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 3
        pool.resume_node("gpus")
        harness.engine.nodes_have_changed()
        agent.gate.set()
        assert {event.state for event in (await harness.done(reply)).values()} == {TaskState.SUCCEEDED}


async def test_what_waited_for_a_node_that_drained_ends_when_that_is_removed_instead() -> None:
    agent = GatedAgent()
    pool, gpus, cores = with_cores(agent, batch_size=1)
    async with running_engine(gpus, cores, pool=pool) as harness:
        running = await harness.submit([task_of(task_type="gpus")] * 2, 1)
        await harness.until_started(running, 2)
        waiting = await harness.submit([task_of(task_type="gpus")], 2)
        pool.drain_node("gpus")
        harness.engine.nodes_have_changed()
        await settle()
        assert harness.engine.submission(harness.selector(waiting)).open_tasks == 1
        lose(harness, pool, "gpus")
        for event in (await harness.done(waiting)).values():
            is_refused(event, "gpus")
        agent.gate.set()
        await harness.done(running)
