"""However large a call is, it gives the loop back within 50 ms: whoever else calls meanwhile is answered."""

from __future__ import annotations

import asyncio
from contextlib import contextmanager
from typing import TYPE_CHECKING
from unittest import mock

import pytest

from py_scheduler.domain.events import AttemptStarted
from py_scheduler.domain.leases import AcquireRequest, LeaseState, LeaseTerms, PlacementDemand
from py_scheduler.domain.requests import AbortRequest, SubmissionSelector
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import TaskState
from py_scheduler.errors import AlreadyExistsError
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.ledger.staleness import StalenessSettings
from py_scheduler.scheduler.ledger.state import LedgerState
from py_scheduler.scheduler.queue import explanations
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, GoingClock, settle
from tests.support.handlers import GatedAgent, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.journal.journal_store import SurvivingJournal
from tests.support.loop_lag import LIMIT_SECONDS, LoopLag

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
    from py_scheduler.domain.events import AttemptRef
    from py_scheduler.domain.requests import SubmitReply

GPU = Resource(gpu=1.0)


def on_a_gpu(agent: BaseAgent, evaluator_id: str = "agent") -> EvaluatorSpec:
    return spec_of(agent, evaluator_id, resource=GPU, run_resource=GPU, eval_resource=GPU, batch_size=1)


def pool_of(*nodes: str) -> PlacementPool:
    return PlacementPool([NodeResource(node_ip=node, gpus=[0], cpu=64, memory_gb=64) for node in nodes])


async def all_done(harness: Harness, submission_id: str, but: int = 0) -> None:
    submission = harness.engine.ledger.submission(submission_id)
    assert submission is not None
    while len(submission.open_tasks) > but:  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
        await asyncio.sleep(0)


# Tasks that come


async def test_what_is_aborted_before_it_came_to_wait_never_runs() -> None:
    """A submit of many tasks lets them wait in slices."""
    agent = GatedAgent()
    async with running_engine(on_a_gpu(agent), pool=pool_of("node")) as harness:
        call = asyncio.create_task(harness.submit([task_of()] * 20_000, 1))
        while not harness.engine.ledger.open_submissions():  # noqa: ASYNC110 -- gives the loop back, nothing tells of it
            await asyncio.sleep(0)
        (submission,) = harness.engine.ledger.open_submissions()
        queue = harness.engine._admission.reasons._queue
        assert len(queue) < 20_000, "it is under way"
        selector = SubmissionSelector(submission_id=submission.submission_id)
        assert (await harness.engine.abort(AbortRequest(selector=selector, request_id="a"))).aborted_tasks == 20_000
        reply = await call
        assert {event.state for event in (await harness.done(reply)).values()} == {TaskState.ABORTED}
        agent.gate.set()
        after = await harness.submit([task_of()], 2)
        assert {event.state for event in (await harness.done(after)).values()} == {TaskState.SUCCEEDED}
        assert len(queue) == 0


# Nodes that go


async def test_what_no_node_is_left_for_ends_while_the_loop_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    agent, pool = GatedAgent(), pool_of("gone")
    async with running_engine(on_a_gpu(agent), pool=pool) as harness:
        reply = await harness.submit([task_of()] * 20_000, 1)
        await harness.until_started(reply, 1)
        pool.remove_node("gone")
        with LoopLag() as lag:
            harness.engine.nodes_have_changed()
            await all_done(harness, reply.submission_id, but=1)
        assert lag.worst_seconds < LIMIT_SECONDS
        harness.engine.nodes_have_changed()
        agent.gate.set()
        done = (await harness.done(reply)).values()
    assert sorted(event.state for event in done) == [TaskState.FAILED] * 19_999 + [TaskState.SUCCEEDED]
    (reason,) = {event.reason for event in done if event.reason}
    assert "(none is left)" in reason
    assert [record.message for record in caplog.records if "no node that is left" in record.message] == [reason]


async def test_the_refusals_of_many_evaluators_on_many_nodes_take_few_turns() -> None:
    agent, pool = GatedAgent(), pool_of("gone")
    for number in range(2_000):
        pool.add_node(NodeResource(node_ip=f"cpu{number}", gpus=[], cpu=64, memory_gb=64))
    specs = [on_a_gpu(agent, f"gpu{number}") for number in range(6)]
    async with running_engine(*specs, pool=pool) as harness:
        tasks = [task_of(task_type=f"gpu{number % 6}") for number in range(2_000)]
        reply = await harness.submit(tasks, 1)
        await harness.until_started(reply, 1)
        pool.remove_node("gone")
        with LoopLag() as lag:
            harness.engine.nodes_have_changed()
            await all_done(harness, reply.submission_id, but=1)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert lag.turns < 200, "several are ended in each"
        agent.gate.set()
        await harness.done(reply)


async def test_a_node_that_comes_back_ends_the_refusals_and_what_is_left_runs() -> None:
    agent, pool = GatedAgent(), pool_of("gone")
    async with running_engine(on_a_gpu(agent), pool=pool) as harness:
        reply = await harness.submit([task_of()] * 2_000, 1)
        await harness.until_started(reply, 1)
        pool.remove_node("gone")
        harness.engine.nodes_have_changed()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        left = len(harness.engine.ledger.open_submissions()[0].open_tasks)
        assert 1 < left < 2_000, "it is under way"
        pool.add_node(NodeResource(node_ip="new", gpus=[0], cpu=64, memory_gb=64))
        harness.engine.nodes_have_changed()
        await settle()
        assert harness.engine.submission(harness.selector(reply)).open_tasks == left
        agent.gate.set()
        done = await harness.done(reply)
    assert sum(event.state is TaskState.SUCCEEDED for event in done.values()) == left


async def test_a_fault_while_refusing_is_reported_and_the_next_change_refuses_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    agent, pool, reported = GatedAgent(), pool_of("gone"), []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context.get("exception")))
    async with running_engine(on_a_gpu(agent), pool=pool) as harness:
        reply = await harness.submit([task_of()] * 3, 1)
        await harness.until_started(reply, 1)
        fault = RuntimeError("once")
        with monkeypatch.context() as patch:
            patch.setattr(harness.engine._refusals, "_refuse_waiting", mock.Mock(side_effect=fault))
            pool.remove_node("gone")
            harness.engine.nodes_have_changed()
            await settle()
        assert reported == [fault]
        harness.engine.nodes_have_changed()
        await settle()
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 1, "the one that runs"
        agent.gate.set()
        await harness.done(reply)


# Whoever asks why something waits


async def test_four_explanations_and_a_lease_before_a_long_queue_while_the_loop_goes_on() -> None:
    agent = GatedAgent()
    async with running_engine(on_a_gpu(agent), pool=pool_of("node")) as harness:
        replies = [
            await harness.submit([task_of()] * 20_000, step, namespace=("default", "b")[step]) for step in range(2)
        ]
        await harness.until_started(replies[0], 1)
        while len(harness.engine._admission.reasons._queue) < 39_990:  # noqa: ASYNC110 -- a submit goes on in slices
            await asyncio.sleep(0)
        demand = PlacementDemand(budget=GPU, per_sample=GPU, max_tokens=1)
        terms = LeaseTerms(batch_id=2, demand=demand, ttl_seconds=60.0)
        with LoopLag() as lag:
            async with asyncio.TaskGroup() as calls:
                asked = [calls.create_task(harness.engine.explain_task(replies[1].task_ids[-1], "b")) for _ in range(4)]
                acquired = calls.create_task(harness.engine.leases.acquire(AcquireRequest(request_id="l", terms=terms)))
        assert lag.worst_seconds < LIMIT_SECONDS
        assert lag.turns > 3
        waits = [task.result().waits[0] for task in asked]
        assert all(39_990 < wait.ahead_in_all < 40_000 for wait in waits)
        assert {len(wait.ahead) for wait in waits} == {20}
        lease = acquired.result()
        assert lease.state is LeaseState.PENDING
        assert "are ahead of it" in lease.reason
        agent.gate.set()


async def test_looks_at_what_is_held_as_too_stale_while_the_loop_goes_on() -> None:
    agent, pool = GatedAgent(), pool_of(*map(str, range(300)))
    specs = [on_a_gpu(agent, f"gpu{number}") for number in range(4)]
    settings = EngineSettings(staleness={"default": StalenessSettings(max_staleness=0, step_size=1)})
    async with running_engine(*specs, pool=pool, settings=settings) as harness:
        reply = await harness.submit([task_of(task_type=f"gpu{number % 4}") for number in range(2_000)], 1)
        await harness.until_started(reply, 1)
        gate = harness.engine._gate
        assert gate is not None
        while len(held := [batch for _, batch in gate.held("default")]) < 1_999:  # noqa: ASYNC110 -- a submit goes on in slices
            await asyncio.sleep(0)
        for number in range(300_000):  # A submit of so many takes long.
            gate.hold(specs[number % 4], held[number % len(held)].attempts, 0.0)
        with LoopLag() as lag:
            explanation = await harness.engine.explain_task(reply.task_ids[-1], "default")
            view = harness.engine.submission(harness.selector(reply))
        assert lag.worst_seconds < LIMIT_SECONDS
        (wait,) = explanation.waits
        assert (wait.ahead_in_all, len(wait.ahead)) == (1_998, 20)
        assert [batch.task_ids for batch in view.waiting] == [(task_id,) for task_id in reply.task_ids[1:101]]
        agent.gate.set()


async def test_a_view_of_what_waits_for_one_of_many_nodes_while_the_loop_goes_on() -> None:
    agent, pool = GatedAgent(), pool_of("gpu")
    for number in range(2_000):
        pool.add_node(NodeResource(node_ip=f"cpu{number}", gpus=[], cpu=64, memory_gb=64))
    specs = [on_a_gpu(agent, f"gpu{number}") for number in range(4)]
    async with running_engine(*specs, pool=pool) as harness:
        reply = await harness.submit([task_of(task_type=f"gpu{number % 4}") for number in range(200)], 1)
        await harness.until_started(reply, 1)
        with LoopLag() as lag:
            view = harness.engine.submission(harness.selector(reply))
        assert lag.worst_seconds < LIMIT_SECONDS
        assert len(view.waiting) == 100
        assert all("short of gpu on 2001 nodes" in batch.reason for batch in view.waiting)
        agent.gate.set()


async def test_a_view_looks_at_no_more_of_what_was_aborted_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    agent = GatedAgent()
    async with running_engine(on_a_gpu(agent), pool=pool_of("node")) as harness:
        first = await harness.submit([task_of()] * 2, 1)
        await harness.until_started(first, 1)
        reply = await harness.submit([task_of()] * 20, 2)
        await harness.engine.abort(abort_of(harness, reply, "a", *reply.task_ids[:10]))
        assert len(harness.engine.submission(harness.selector(reply)).waiting) == 10
        monkeypatch.setattr(explanations, "_MOST_LOOKED_AT", 14)
        assert len(harness.engine.submission(harness.selector(reply)).waiting) == 4
        agent.gate.set()


async def test_what_is_being_refused_is_not_told_to_wait_nor_to_be_ahead() -> None:
    """Its submissions may be forgotten before the queue hears of its end."""
    agent, pool = GatedAgent(), pool_of("gone")
    settings = EngineSettings(retained_submissions=5)
    async with running_engine(on_a_gpu(agent), pool=pool, settings=settings) as harness:
        replies = [await harness.submit([task_of()] * (100 if step else 1), step) for step in range(100)]
        await harness.until_started(replies[0], 1)
        pool.remove_node("gone")
        harness.engine.nodes_have_changed()
        ledger, last, told = harness.engine.ledger, replies[-1].task_ids[-1], 0
        while (task := ledger.task(last)) is not None:
            before = ledger.open_tasks
            explanation = await harness.engine.explain_task(last, task.submission.key.namespace)
            for wait in explanation.waits:
                told += 1
                assert wait.ahead_in_all < before
                assert len(wait.ahead) <= wait.ahead_in_all
            await asyncio.sleep(0)
        assert told
        agent.gate.set()


async def test_a_pending_lease_is_not_told_of_what_was_aborted_behind_a_head() -> None:
    agent = GatedAgent()
    async with running_engine(on_a_gpu(agent), pool=pool_of("node")) as harness:
        first = await harness.submit([task_of()] * 2, 1)
        await harness.until_started(first, 1)
        await harness.submit([task_of(is_eval=True)], 1)
        aborted = await harness.submit([task_of()] * 100, 2)
        await harness.engine.abort(abort_of(harness, aborted))
        demand = PlacementDemand(budget=GPU, per_sample=GPU, max_tokens=1)
        terms = LeaseTerms(batch_id=3, demand=demand, ttl_seconds=60.0)
        lease = await harness.engine.leases.acquire(AcquireRequest(request_id="l", terms=terms))
        assert "; 2 batches are ahead of it" in lease.reason
        agent.gate.set()


# Stops


def abort_of(harness: Harness, reply: SubmitReply, request_id: str = "a", *task_ids: str) -> AbortRequest:
    return AbortRequest(selector=harness.selector(reply), request_id=request_id, task_ids=task_ids, wait=True)


async def test_an_abort_of_many_tasks_while_the_loop_goes_on() -> None:
    agent = GatedAgent()
    async with running_engine(on_a_gpu(agent), pool=pool_of("node")) as harness:
        reply = await harness.submit([task_of()] * 20_000, 1)
        (first,) = await harness.until_started(reply, 1)
        later = await harness.submit([task_of()], 2)
        with LoopLag() as lag:
            aborted = await harness.engine.abort(abort_of(harness, reply))
        assert lag.worst_seconds < LIMIT_SECONDS
        assert lag.turns > 3
        assert (aborted.aborted_tasks, aborted.still_stopping) == (20_000, ())
        assert {event.state for event in (await harness.done(reply)).values()} == {TaskState.ABORTED}
        started = [record.event for record in await harness.records_until_done(reply)]
        assert [event.task_id for event in started if isinstance(event, AttemptStarted)] == [first], "and no other one"
        agent.gate.set()
        assert {event.state for event in (await harness.done(later)).values()} == {TaskState.SUCCEEDED}


async def test_an_abort_goes_on_without_its_call_and_is_answered_as_one_whoever_asks_again() -> None:
    agent = GatedAgent()
    async with running_engine(on_a_gpu(agent), pool=pool_of("node")) as harness:
        reply = await harness.submit([task_of()] * 20_000, 1)
        left = asyncio.create_task(harness.engine.abort(abort_of(harness, reply)))
        await asyncio.sleep(0)
        later = await harness.submit([task_of()], 1)
        assert harness.engine.submission(harness.selector(reply)).open_tasks > 10_000, "it is under way"
        with pytest.raises(AlreadyExistsError, match="under way"):
            await harness.engine.abort(abort_of(harness, reply, "a", reply.task_ids[0]))
        left.cancel()
        again = await harness.engine.abort(abort_of(harness, reply))
        assert again.aborted_tasks == 20_000
        assert await harness.engine.abort(abort_of(harness, reply)) == again
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 1, "what came since"
        agent.gate.set()
        await harness.done(later)


@pytest.mark.parametrize("turns", [1, 2, 10])
async def test_what_an_abort_stopped_ends_also_when_the_process_ends_in_between(turns: int) -> None:
    journal, tasks = SurvivingJournal(), [task_of()] * 20_000
    async with running_engine(on_a_gpu(GatedAgent()), pool=pool_of("node"), journal=journal) as harness:
        reply = await harness.submit(tasks, 1)
        call = asyncio.create_task(harness.engine.abort(abort_of(harness, reply)))
        for _ in range(turns):
            await asyncio.sleep(0)
        assert harness.engine.submission(harness.selector(reply)).open_tasks > 1_000
    with pytest.raises(asyncio.CancelledError):
        await call
    agent = GatedAgent()
    async with running_engine(on_a_gpu(agent), pool=pool_of("node"), journal=journal) as harness:
        # Answered before or not: sent again it has the same effect.
        aborted = await harness.engine.abort(abort_of(harness, reply))
        assert aborted.still_stopping == ()
        assert {event.state for event in (await harness.done(reply)).values()} == {TaskState.ABORTED}
        assert agent.begun == {}


# Batches of which some tasks end


def in_fours(agent: BaseAgent) -> EvaluatorSpec:
    return spec_of(agent, resource=GPU, run_resource=GPU, eval_resource=GPU, batch_size=4)


@contextmanager
def asked_of_attempts() -> Iterator[list[AttemptRef]]:
    """Each attempt of which the ledger is asked whether it waits, as often as it is."""
    asked: list[AttemptRef] = []
    is_waiting = LedgerState.is_waiting

    def count(ledger: LedgerState, ref: AttemptRef) -> bool:
        asked.append(ref)
        return is_waiting(ledger, ref)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LedgerState, "is_waiting", count)
        yield asked


@pytest.mark.parametrize("submissions", [1, 500])
async def test_deadlines_that_come_together_while_the_loop_goes_on(submissions: int) -> None:
    agent, clock = GatedAgent(), GoingClock()
    async with running_engine(in_fours(agent), pool=pool_of("node"), clock=clock) as harness:
        tasks = [task_of(task_deadline_seconds=3.0)] * (8_000 // submissions)
        replies = [await harness.submit(tasks, step) for step in range(submissions)]
        await settle()
        with LoopLag() as lag:
            clock.now += 3.0
            harness.engine._stops._task_deadlines._expire()
            while harness.engine.ledger.open_tasks:  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
                await asyncio.sleep(0)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert lag.turns > 3
        agent.gate.set()
        assert {event.state for event in (await harness.done(replies[0])).values()} == {TaskState.FAILED}
        assert len(harness.engine._admission.reasons._queue) == 0


async def test_what_ends_asks_of_each_attempt_of_its_batches_a_few_times() -> None:
    agent, clock = GatedAgent(), FakeClock()
    async with running_engine(in_fours(agent), pool=pool_of("node"), clock=clock) as harness:
        reply = await harness.submit([task_of(task_deadline_seconds=3.0)] * 1_000, 1)
        await settle()
        with asked_of_attempts() as asked:
            await harness.engine.abort(abort_of(harness, reply, "one", reply.task_ids[-1]))
            await settle()
        assert len(asked) < 40, "of its batch and of the heads"
        with asked_of_attempts() as asked:
            await clock.advance(3.0)
        assert len(asked) < 4 * 1_000
        agent.gate.set()


async def test_a_batch_of_which_some_tasks_passed_their_deadline_wants_less_although_it_stands_behind_others() -> None:
    agent, clock = GatedAgent(), FakeClock()
    async with running_engine(in_fours(agent), pool=pool_of("node"), clock=clock) as harness:
        first = await harness.submit([task_of()] * 8, 1)
        await harness.until_started(first, 1)
        await harness.submit([task_of(), task_of(), *[task_of(task_deadline_seconds=3.0)] * 2], 2)
        await settle()
        queue = harness.engine._admission.reasons._queue
        assert [entry.shape for entry in queue.entries()] == [("agent", 4)] * 2
        await clock.advance(3.0)
        assert [entry.shape for entry in queue.entries()] == [("agent", 4), ("agent", 2)]
        agent.gate.set()
