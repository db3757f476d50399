"""Pulling results from an engine: what a collect waits for, what it stops, and what it leaves."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.domain.evaluator import Episode
from py_scheduler.domain.events import AbortRequested
from py_scheduler.domain.requests import EventFilter
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult, TaskState
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, ScriptedAgent, StubbornAgent, hangs, raises, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.trainers.collecting import collect, hanging, schedule, until_collectable, view

AT_ONCE = EngineSettings(retry_backoff_seconds=0.0)


async def aborts(harness: Harness, after_sequence: int) -> list[AbortRequested]:
    """The aborts that the log has so far."""
    async for frame in harness.engine.watch(EventFilter(), after_sequence):
        if frame.through_sequence == harness.engine.last_sequence:
            return [record.event for record in frame.records if isinstance(record.event, AbortRequested)]
    raise AssertionError("the stream ended")


# How much is waited for


async def test_without_min_num_all_are_waited_for_and_come_in_the_order_in_which_they_ended() -> None:
    gates = {name: asyncio.Event() for name in ("first", "second", "third")}

    async def waits(episode: Episode) -> AgentResult:
        await gates[episode.sample.task.prompt].wait()
        return AgentResult(metrics={"reward": 1.0})

    async with running_engine(spec_of(ScriptedAgent(**dict.fromkeys(gates, waits)))) as harness:
        submitted = await schedule(harness.engine, [task_of(name) for name in gates])
        waiting = asyncio.create_task(collect(harness.engine))
        for name in ("third", "first", "second"):
            await settle()
            assert not waiting.done()
            gates[name].set()
        reply = await waiting
        first, second, third = submitted.task_ids
        assert [result.task_id for result in reply.results] == [third, first, second]
        assert [(result.state, result.succeeded_samples, result.planned_samples) for result in reply.results] == [
            (TaskState.SUCCEEDED, 1, 1)
        ] * 3
        assert all(result.metrics["reward"] == 1.0 and result.samples for result in reply.results)
        assert not view(harness.engine).has_step


async def test_a_batch_that_nobody_knows_is_empty_at_once() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        reply = await collect(harness.engine, 99)
        assert (reply.results, reply.is_timed_out) == ((), False)
        assert "99" in reply.warnings[0]


async def test_min_num_above_what_is_left_is_clamped_with_a_warning() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        await schedule(harness.engine, [task_of(), task_of()])
        reply = await collect(harness.engine, min_num=5)
        assert len(reply.results) == 2
        assert "min_num is 5" in reply.warnings[0]


async def test_ten_ready_and_eight_wanted_leaves_two_for_the_next_call() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        await schedule(harness.engine, [task_of() for _ in range(10)])
        await until_collectable(harness, 10)
        first = await collect(harness.engine, min_num=8, max_num=8)
        second = await collect(harness.engine)
        ids = [result.task_id for result in (*first.results, *second.results)]
        assert (len(first.results), len(second.results), len(set(ids))) == (8, 2, 10)


async def test_failed_tasks_count_as_done_and_say_why() -> None:
    """A wait ends after all terminal results, whatever they are, and never counts more than there are."""
    async with running_engine(spec_of(ScriptedAgent(bad=raises))) as harness:
        await schedule(harness.engine, [task_of(), task_of("bad"), task_of()])
        reply = await collect(harness.engine)
        by_state = {result.state: result for result in reply.results}
        assert len(reply.results) == 3
        failed = by_state[TaskState.FAILED]
        assert (failed.ok, failed.succeeded_samples) == (False, 0)
        assert failed.message.startswith("0/1 runs completed successfully. ValueError: the handler is broken")
        assert failed.samples[0].error


async def test_a_group_that_lacks_a_run_is_never_passed_off_as_whole() -> None:
    runs = iter(range(100))

    async def second_fails(_: Episode) -> AgentResult:
        if next(runs) == 1:
            raise RuntimeError("one of four")
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(mixed=second_fails))) as harness:
        task = task_of("mixed", repeat_times=4, max_samples_per_subtask=None, keeps_partial=True)
        await schedule(harness.engine, [task])
        (result,) = (await collect(harness.engine)).results
        assert (result.state, result.succeeded_samples, result.planned_samples) == (TaskState.PARTIAL, 3, 4)
        assert result.message.startswith("3/4 runs completed successfully. RuntimeError: one of four")
        assert [sample.is_scored for sample in result.samples] == [True, False, True, True]


async def test_after_enough_the_rest_is_given_wait_after_min_and_then_stopped_without_restarts() -> None:
    clock = FakeClock()
    async with running_engine(spec_of(ScriptedAgent(hangs=hangs)), clock=clock) as harness:
        submitted = await schedule(harness.engine, [task_of(), task_of(), *hanging(1)])
        waiting = asyncio.create_task(collect(harness.engine, min_num=2, timeout_seconds=600))
        await settle()
        await clock.advance(29.9)
        assert not waiting.done()
        await clock.advance(0.2)
        reply = await waiting
        assert len(reply.results) == 2
        assert not reply.is_timed_out
        (left,) = reply.unfinished
        assert (left.task_id, left.is_stopped) == (submitted.task_ids[2], True)
        assert "wait_after_min_seconds (30) passed" in left.reason
        assert [event.restarts_runners for event in await aborts(harness, submitted.before_sequence)] == [False]
        assert not view(harness.engine).has_step


async def test_what_ends_within_wait_after_min_comes_too() -> None:
    clock, agent = FakeClock(), GatedAgent()
    async with running_engine(spec_of(agent), spec_of(ScriptedAgent(), "quick"), clock=clock) as harness:
        await schedule(harness.engine, [task_of(task_type="quick"), task_of("late")])
        waiting = asyncio.create_task(collect(harness.engine, min_num=1, wait_after_min_seconds=5))
        await settle()
        await clock.advance(4)
        agent.gate.set()
        assert len((await waiting).results) == 2


# Timeouts


async def test_at_its_timeout_it_names_what_never_finished_and_stops_it_with_restarts() -> None:
    clock = FakeClock()
    async with running_engine(
        spec_of(ScriptedAgent(hangs=hangs), resource=Resource(concurrency=256)), clock=clock
    ) as harness:
        submitted = await schedule(harness.engine, [*(task_of() for _ in range(125)), *hanging(3)])
        waiting = asyncio.create_task(collect(harness.engine, request_id="r", acknowledge=False, timeout_seconds=60))
        await settle()
        await clock.advance(59)
        assert not waiting.done()
        await clock.advance(1)
        reply = await waiting
        assert reply.is_timed_out
        assert await collect(harness.engine, request_id="r") == reply
        assert len(reply.results) == 125
        assert [task.task_id for task in reply.unfinished] == list(submitted.task_ids[125:])
        assert all("timeout_seconds (60) passed" in task.reason for task in reply.unfinished)
        assert [event.restarts_runners for event in await aborts(harness, submitted.before_sequence)] == [True]


async def test_with_clear_off_the_rest_goes_on_and_a_later_call_gets_it() -> None:
    clock, agent = FakeClock(), GatedAgent()
    async with running_engine(spec_of(agent), spec_of(ScriptedAgent(), "quick"), clock=clock) as harness:
        await schedule(harness.engine, [task_of(task_type="quick"), task_of("late")])
        waiting = asyncio.create_task(collect(harness.engine, timeout_seconds=10, clear_unfinished=False))
        await settle()
        await clock.advance(10)
        reply = await waiting
        assert len(reply.results) == 1
        (left,) = reply.unfinished
        assert (left.is_stopped, left.reason) == (
            False,
            "0/1 runs completed successfully. 1 of 1 unfinished sub-tasks are running.",
        )
        agent.gate.set()
        assert [result.ok for result in (await collect(harness.engine)).results] == [True]


@pytest.mark.parametrize("include_partial", [True, False])
async def test_of_tasks_that_are_stopped_those_with_completed_runs_come_if_that_is_wanted(
    *, include_partial: bool
) -> None:
    clock, runs = FakeClock(), iter(range(100))

    async def half_hangs(_: Episode) -> AgentResult:
        if next(runs) >= 2:
            await asyncio.Event().wait()
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(half=half_hangs, hangs=hangs)), clock=clock) as harness:
        task = task_of("half", repeat_times=4, max_samples_per_subtask=2)
        submitted = await schedule(harness.engine, [task, *hanging(1)])
        await settle()
        waiting = asyncio.create_task(collect(harness.engine, timeout_seconds=5, include_partial=include_partial))
        await settle()
        await clock.advance(5)
        reply = await waiting
        named = [task.task_id for task in reply.unfinished]
        if include_partial:
            (result,) = reply.results
            assert (result.task_id, result.succeeded_samples, result.planned_samples) == (submitted.task_ids[0], 2, 4)
            assert result.message == "2/4 runs completed successfully. timeout_seconds (5) passed"
            assert named == [submitted.task_ids[1]]
        else:
            assert reply.results == ()
            assert named == list(submitted.task_ids)
        assert not view(harness.engine).has_step


async def test_a_handler_that_ignores_its_stop_does_not_hold_the_call() -> None:
    clock, agent = FakeClock(), StubbornAgent()
    async with running_engine(spec_of(agent), clock=clock) as harness:
        await schedule(harness.engine, [task_of("stubborn")])
        waiting = asyncio.create_task(collect(harness.engine, timeout_seconds=5))
        await settle()
        await clock.advance(5)
        assert not waiting.done()
        await clock.advance(5)
        assert len((await waiting).unfinished) == 1
        agent.free.set()
        await settle()
