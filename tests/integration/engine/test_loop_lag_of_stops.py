"""However much is stopped or admitted at the same moment, the loop is given back within 50 ms."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest

from py_scheduler.app.runners import NodesOfRay
from py_scheduler.domain.requests import AbortRequest
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import TaskState
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.ledger.commands import LeaseAttempts
from py_scheduler.scheduler.ledger.staleness import StalenessSettings
from py_scheduler.scheduler.queue import admission
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import GoingClock, settle
from tests.support.handlers import GatedAgent, StubbornAgent, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.journal.journal_store import SurvivingJournal
from tests.support.loop_lag import LIMIT_SECONDS, LoopLag

if TYPE_CHECKING:
    from py_scheduler.domain.events import Event
    from py_scheduler.domain.requests import SubmitReply
    from py_scheduler.domain.task import Task
    from py_scheduler.scheduler.ledger.commands import Command
    from py_scheduler.scheduler.ledger.records import NewTasks

MOST_SAMPLES = 65_536
MANY_AT_ONCE = Resource(concurrency=8_000)
ROOMY = EngineSettings(max_running_samples=8_000, stop_grace_seconds=5.0)


def of_single_samples(samples: int, prompt: str = "", **config: Any) -> Task:
    return task_of(prompt, repeat_times=samples, max_samples_per_subtask=1, **config)


def abort_of(harness: Harness, reply: SubmitReply) -> AbortRequest:
    return AbortRequest(selector=harness.selector(reply), request_id="a", wait=True, timeout_seconds=60.0)


async def all_done(harness: Harness) -> None:
    while harness.engine.ledger.open_tasks:  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
        await asyncio.sleep(0)


async def test_an_abort_of_a_task_of_very_many_sub_tasks_while_the_loop_goes_on() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        reply = await harness.submit([of_single_samples(MOST_SAMPLES)], 1)
        await harness.until_started(reply, 1)
        with LoopLag() as lag:
            aborted = await harness.engine.abort(abort_of(harness, reply))
        assert lag.worst_seconds < LIMIT_SECONDS
        assert aborted.aborted_tasks == 1
        (done,) = (await harness.done(reply)).values()
        assert done.state is TaskState.ABORTED
        assert sum(done.outcomes.values()) == MOST_SAMPLES


@pytest.mark.parametrize("turns", [1, 3, 6])
async def test_a_task_whose_sub_tasks_were_half_ended_ends_whole_after_a_restart(turns: int) -> None:
    journal = SurvivingJournal()
    async with running_engine(spec_of(GatedAgent()), max_running_samples=1, journal=journal) as harness:
        reply = await harness.submit([of_single_samples(20_000)], 1)
        await harness.until_started(reply, 1)
        call = asyncio.create_task(harness.engine.abort(abort_of(harness, reply)))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert harness.engine.ledger.open_tasks, "it is under way"
    with pytest.raises(asyncio.CancelledError):
        await call
    async with running_engine(spec_of(GatedAgent()), max_running_samples=1, journal=journal) as harness:
        await harness.engine.abort(abort_of(harness, reply))
        (done,) = (await harness.done(reply)).values()
        assert done.state is TaskState.ABORTED
        assert sum(done.outcomes.values()) == 20_000


@pytest.mark.parametrize("tasks", [1, 1_500])
async def test_an_abort_of_very_many_samples_that_run_while_the_loop_goes_on(tasks: int) -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent, resource=MANY_AT_ONCE), settings=ROOMY) as harness:
        reply = await harness.submit([of_single_samples(1_500 // tasks)] * tasks, 1)
        await harness.until_started(reply, 1_500)
        with LoopLag() as lag:
            aborted = await harness.engine.abort(abort_of(harness, reply))
        assert lag.worst_seconds < LIMIT_SECONDS
        assert (aborted.aborted_tasks, aborted.still_stopping) == (tasks, ())


async def test_limits_of_very_many_attempts_that_come_together_while_the_loop_goes_on() -> None:
    agent, clock = GatedAgent(), GoingClock()
    async with running_engine(spec_of(agent), settings=ROOMY, clock=clock) as harness:
        reply = await harness.submit([task_of(attempt_timeout_seconds=90.0)] * 1_500, 1)
        await harness.until_started(reply, 1_500)
        with LoopLag() as lag:
            clock.now += 200.0
            harness.engine._supervisor._ladder._deadlines._expire()
            await all_done(harness)
        assert lag.worst_seconds < LIMIT_SECONDS


async def test_very_many_handlers_that_ignore_their_stop_are_given_up_while_the_loop_goes_on() -> None:
    agent, clock = StubbornAgent(), GoingClock()
    async with running_engine(spec_of(agent, resource=MANY_AT_ONCE), settings=ROOMY, clock=clock) as harness:
        reply = await harness.submit([of_single_samples(1_500, "stubborn")], 1)
        await harness.until_started(reply, 1_500)
        call = asyncio.create_task(harness.engine.abort(abort_of(harness, reply)))
        while len(harness.engine._supervisor._ladder._deadlines._heap) < 1_500:  # noqa: ASYNC110 -- all are told to stop
            await asyncio.sleep(0)
        with LoopLag() as lag:
            clock.now += 60.0
            harness.engine._supervisor._ladder._deadlines._expire()
            await all_done(harness)
            await asyncio.sleep(0)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert len(harness.engine._admission.room.stranded) == 1_500
        assert (await call).still_stopping == reply.task_ids
        agent.free.set()
        await settle()
        assert harness.engine._admission.room.stranded == ()


async def test_very_many_submits_of_one_deadline_end_together_and_none_of_them_begins() -> None:
    agent, clock = GatedAgent(), GoingClock()
    async with running_engine(spec_of(agent), max_running_samples=1, clock=clock) as harness:
        for step in range(3_000):
            await harness.submit([task_of(f"{step}", task_deadline_seconds=3.0)], step)
        with LoopLag() as lag:
            clock.now += 600.0
            harness.engine._stops._task_deadlines._expire()
            await all_done(harness)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert agent.begun == {"0": 1}


async def test_a_batch_of_very_many_samples_is_called_leased_in_several_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_LEASED_AT_ONCE", 3)
    agent, turns = GatedAgent(), []
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        record = harness.engine._recorder.record

        def note(command: Command, namespace: str, made: NewTasks | None = None) -> list[Event]:
            if isinstance(command, LeaseAttempts):
                turns.append(len(command.attempts))
            return record(command, namespace, made)

        monkeypatch.setattr(harness.engine._recorder, "record", note)
        reply = await harness.submit([of_single_samples(10)], 1)
        await settle()
        view = harness.engine.submission(harness.selector(reply))
        assert (view.queued_attempts, view.leased_attempts, view.running_attempts) == (0, 9, 1)
        assert turns == [3, 3, 3, 1]
        agent.gate.set()


async def test_the_gate_passes_very_much_that_was_aborted_while_the_loop_goes_on() -> None:
    agent = GatedAgent()
    settings = EngineSettings(staleness={"default": StalenessSettings(max_staleness=0, step_size=1)})
    async with running_engine(spec := spec_of(agent), settings=settings) as harness:
        first = await harness.submit([task_of()], 1)
        await harness.until_started(first, 1)
        reply = await harness.submit([task_of()], 2)
        gate = harness.engine._gate
        assert gate is not None
        ((_, held),) = gate.held("default")
        await harness.engine.abort(abort_of(harness, reply))
        for _ in range(100_000):  # A submit of so many takes long.
            gate.hold(spec, held.attempts, 0.0)
        with LoopLag() as lag:
            request = AbortRequest(selector=harness.selector(first), request_id="first", wait=True)
            await harness.engine.abort(request)
            while gate.held("default"):  # noqa: ASYNC110 -- gives the loop back
                await asyncio.sleep(0)
        assert lag.worst_seconds < LIMIT_SECONDS


async def test_a_task_of_which_many_samples_were_refused_is_left_out_of_the_queue_once() -> None:
    gpu = Resource(gpu=1.0)
    pool = PlacementPool([NodeResource(node_ip="gone", gpus=[0], cpu=64, memory_gb=64)])
    agent = GatedAgent()
    spec = spec_of(agent, resource=gpu, run_resource=gpu, eval_resource=gpu)
    async with running_engine(spec, pool=pool) as harness:
        first = await harness.submit([task_of()], 1)
        await harness.until_started(first, 1)
        await harness.submit([of_single_samples(300)], 2)
        pool.remove_node("gone")
        with mock.patch.object(harness.engine._admission, "leave_out") as leave_out:
            harness.engine.nodes_have_changed()
            await settle()
        assert leave_out.call_count == 1
        agent.gate.set()


async def test_nodes_of_ray_that_go_together_are_told_of_once() -> None:
    names = [f"n{number}" for number in range(100)]
    nodes = [NodeResource(node_ip=name, gpus=[0], cpu=8, memory_gb=8) for name in names]
    pool, told = PlacementPool(nodes), Counter[int]()
    engine = mock.Mock()
    engine.nodes_have_changed.side_effect = lambda: told.update([len(pool.nodes())])
    changed = NodesOfRay(pool, nodes, (), engine).changed
    for name in names[1:]:
        changed(name, False)
    await settle()
    changed(names[1], True)
    await settle()
    assert told == {1: 1, 2: 1}
