"""Pulling results from an engine: what a collect waits for, what it stops, and what it leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.domain.collecting import CollectRequest
from py_scheduler.domain.evaluator import Episode
from py_scheduler.domain.events import AbortRequested
from py_scheduler.domain.requests import AbortRequest, EventFilter, SubmissionSelector
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult, TaskState
from py_scheduler.domain.task import RetryPolicy, Task
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError, ResourceExhaustedError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.collecting import collect, drain, schedule, view
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, ScriptedAgent, StubbornAgent, hangs, raises, spec_of
from tests.support.harness import Harness, running_engine, task_of

AT_ONCE = EngineSettings(retry_backoff_seconds=0.0)


class KeptJournal(MemoryJournal):
    """Outlives its engine, as a durable one does."""

    @property
    def is_durable(self) -> bool:
        return True


def hanging(count: int) -> list[Task]:
    return [task_of("hangs") for _ in range(count)]


async def aborts(harness: Harness, after_sequence: int) -> list[AbortRequested]:
    """The aborts that the log has so far."""
    async for frame in harness.engine.watch(EventFilter(), after_sequence):
        if frame.through_sequence == harness.engine.last_sequence:
            return [record.event for record in frame.records if isinstance(record.event, AbortRequested)]
    raise AssertionError("the stream ended")


async def until_collectable(harness: Harness, count: int, batch_id: int | str = 0) -> None:
    while view(harness.engine, batch_id).collectable_tasks < count:
        await settle()


async def until_running(harness: Harness, count: int) -> None:
    while view(harness.engine).running_attempts < count:
        await settle()


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
        assert [(result.state, result.completed_runs, result.total_runs) for result in reply.results] == [
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
        assert (failed.ok, failed.completed_runs) == (False, 0)
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
        assert (result.state, result.completed_runs, result.total_runs) == (TaskState.PARTIAL, 3, 4)
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
            assert (result.task_id, result.completed_runs, result.total_runs) == (submitted.task_ids[0], 2, 4)
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


# One call after another


async def test_two_schedules_under_one_batch_id_give_five_results_with_five_ids() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        await schedule(harness.engine, [task_of() for _ in range(2)], 7)
        await schedule(harness.engine, [task_of() for _ in range(3)], 7)
        reply = await collect(harness.engine, 7)
        assert len({result.task_id for result in reply.results}) == 5


async def test_a_drained_batch_id_is_used_again_at_once_by_another_submission() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        first = await schedule(harness.engine, [task_of()], 7)
        await collect(harness.engine, 7)
        assert not view(harness.engine, 7).has_step
        second = await schedule(harness.engine, [task_of(), task_of()], 7)
        reply = await collect(harness.engine, 7)
        assert first.submission_id != second.submission_id
        assert {result.task_id for result in reply.results} == set(second.task_ids)


async def test_the_same_request_id_gives_the_same_set_until_it_is_acknowledged() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        await schedule(harness.engine, [task_of()], 7)
        first = await collect(harness.engine, 7, request_id="r", acknowledge=False)
        await schedule(harness.engine, [task_of()], 7)
        again = await collect(harness.engine, 7, request_id="r", acknowledge=False)
        assert again == first
        with pytest.raises(AlreadyExistsError, match="another submission"):
            await collect(harness.engine, 8, request_id="r")
        await harness.engine.ack_results("default", "r")
        await harness.engine.ack_results("default", "r")
        assert len((await collect(harness.engine, 7)).results) == 1


async def test_a_call_that_was_repeated_while_it_waited_is_answered_once() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent)) as harness:
        await schedule(harness.engine, [task_of()])
        twins = [asyncio.create_task(collect(harness.engine, request_id="r", acknowledge=False)) for _ in range(2)]
        await settle()
        agent.gate.set()
        one, other = [await twin for twin in twins]
        assert one == other
        assert len(one.results) == 1


async def test_a_twin_that_is_answered_late_stops_nothing_that_was_scheduled_since() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), spec_of(ScriptedAgent(), "quick")) as harness:
        await schedule(harness.engine, [task_of("late")])
        twins = [
            asyncio.create_task(collect(harness.engine, request_id="r", acknowledge=False, max_num=1)) for _ in range(2)
        ]
        await settle()
        await schedule(harness.engine, [task_of(task_type="quick")])
        assert await twins[0] == await twins[1]
        later = await schedule(harness.engine, [task_of("late")])
        assert await collect(harness.engine, request_id="r", acknowledge=False) == await twins[0]
        agent.gate.set()
        (result,) = (await collect(harness.engine)).results
        assert result.task_id in later.task_ids


async def test_a_call_that_is_given_up_has_taken_nothing() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent)) as harness:
        await schedule(harness.engine, [task_of()])
        waiting = asyncio.create_task(collect(harness.engine))
        await settle()
        waiting.cancel()
        await asyncio.wait([waiting])
        agent.gate.set()
        assert len((await collect(harness.engine)).results) == 1


async def test_draining_takes_what_is_there_and_waits_for_nothing() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), spec_of(ScriptedAgent(), "quick")) as harness:
        await schedule(harness.engine, [task_of(task_type="quick"), task_of("late")])
        await until_collectable(harness, 1)
        reply = await drain(harness.engine)
        assert (len(reply.results), reply.is_timed_out) == (1, False)
        assert not reply.unfinished[0].is_stopped
        agent.gate.set()
        assert len((await collect(harness.engine)).results) == 1


async def test_discarding_forgets_results_and_counts_and_lets_the_rest_go_on() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), spec_of(ScriptedAgent(), "quick")) as harness:
        await schedule(harness.engine, [*(task_of(task_type="quick") for _ in range(3)), task_of("late")])
        await until_collectable(harness, 3)
        assert view(harness.engine).kept_bytes > 0
        await harness.engine.discard_submission(SubmissionSelector(batch_id=0))
        now = view(harness.engine)
        assert (now.scheduled_tasks, now.collectable_tasks, now.kept_bytes, now.open_tasks) == (1, 0, 0, 1)
        agent.gate.set()
        assert len((await collect(harness.engine)).results) == 1


@pytest.mark.parametrize("keep_partial", [True, False])
async def test_after_an_abort_what_was_completed_can_be_drained(*, keep_partial: bool) -> None:
    runs = iter(range(100))

    async def half_hangs(_: Episode) -> AgentResult:
        if next(runs) >= 1:
            await asyncio.Event().wait()
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(half=half_hangs), resource=Resource(concurrency=1))) as harness:
        await schedule(harness.engine, [task_of(), task_of("half", repeat_times=2)])
        await until_collectable(harness, 1)
        await until_running(harness, 1)
        selector = SubmissionSelector(batch_id=0)
        await harness.engine.abort(AbortRequest(selector=selector, wait=True, keep_partial=keep_partial))
        reply = await drain(harness.engine)
        assert [(result.completed_runs, result.total_runs) for result in reply.results] == (
            [(1, 1), (1, 2)] if keep_partial else [(1, 1)]
        )
        assert not view(harness.engine).has_step


# What is kept


async def test_a_submission_that_is_watched_keeps_nothing() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        reply = await harness.submit([task_of()])
        await harness.done(reply)
        now = view(harness.engine)
        assert (now.collectable_tasks, now.kept_bytes, now.has_step) == (0, 0, False)
        assert (await collect(harness.engine)).results == ()


async def test_beyond_max_kept_bytes_tasks_to_be_collected_are_refused_until_some_are_acknowledged() -> None:
    settings = EngineSettings(max_kept_bytes=1_000)
    async with running_engine(spec_of(ScriptedAgent()), settings=settings) as harness:
        await schedule(harness.engine, [task_of()])
        await until_collectable(harness, 1)
        with pytest.raises(ResourceExhaustedError, match="max_kept_bytes is 1000"):
            await schedule(harness.engine, [task_of()], 1)
        await harness.submit([task_of()], 2)
        await collect(harness.engine, request_id="r", acknowledge=False)
        with pytest.raises(ResourceExhaustedError):
            await schedule(harness.engine, [task_of()], 1)
        await harness.engine.ack_results("default", "r")
        await schedule(harness.engine, [task_of()], 1)


async def test_a_thousand_drained_batches_leave_nothing() -> None:
    settings = EngineSettings(retained_submissions=10)
    async with running_engine(spec_of(ScriptedAgent()), settings=settings) as harness:
        for step in range(1_000):
            await schedule(harness.engine, [task_of(), task_of()], step)
            assert len((await collect(harness.engine, step)).results) == 2
        ledger = harness.engine._ledger
        assert (ledger.results.kept_bytes, ledger.open_tasks) == (0, 0)
        assert len(ledger._submissions) == len(ledger._requests) == 10


async def test_a_restart_keeps_what_was_not_acknowledged_and_nothing_else() -> None:
    journal = KeptJournal()
    agent = GatedAgent()
    specs = (spec_of(agent), spec_of(ScriptedAgent(), "quick"))
    async with running_engine(*specs, journal=journal) as harness:
        quick = [task_of(task_type="quick") for _ in range(4)]
        await schedule(harness.engine, [*quick, task_of("late")])
        await until_collectable(harness, 4)
        await collect(harness.engine, request_id="acknowledged", min_num=1, max_num=1, clear_unfinished=False)
        told = await collect(
            harness.engine, request_id="told", min_num=1, max_num=1, clear_unfinished=False, acknowledge=False
        )
        history = harness.engine.history
    agent.gate.set()
    async with running_engine(*specs, journal=journal) as harness:
        assert harness.engine.history.running_seconds == history.running_seconds
        assert await collect(harness.engine, request_id="told", acknowledge=False) == told
        rest = await collect(harness.engine)
        assert len(rest.results) == 3
        ids = {result.task_id for result in (*told.results, *rest.results)}
        assert len(ids) == 4


# History and requests


async def test_steps_are_counted_when_a_training_batch_was_returned_whole() -> None:
    clock = FakeClock()
    async with running_engine(spec_of(ScriptedAgent(hangs=hangs)), clock=clock) as harness:
        steps = []

        async def after(batch_id: int | str, tasks: list[Task], **wishes: Any) -> None:
            await schedule(harness.engine, tasks, batch_id)
            waiting = asyncio.create_task(collect(harness.engine, batch_id, **wishes))
            await settle()
            await clock.advance(100)
            await waiting
            steps.append(harness.engine.history.completed_steps)

        await after(1, [task_of(), task_of()])
        await after("1/eval", [task_of(is_eval=True)])
        await after(2, [task_of(), *hanging(1)], timeout_seconds=10)
        await after(3, [task_of(), task_of()], min_num=1, max_num=1)
        assert steps == [1, 1, 1, 1]
        assert len((await collect(harness.engine, 3)).results) == 1
        assert harness.engine.history.completed_steps == 2
        assert harness.engine.history.finished_subtasks == 5


async def test_every_fault_of_a_request_is_named() -> None:
    async with running_engine(spec_of(ScriptedAgent())) as harness:
        with pytest.raises(InvalidArgumentError) as caught:
            await harness.engine.collect(
                CollectRequest(request_id="", batch_id=1, submission_id="s", max_num=0, timeout_seconds=-1)
            )
        assert {violation.field for violation in caught.value.violations} == {
            "request_id",
            "submission_id",
            "max_num",
            "timeout_seconds",
        }


async def test_a_retried_subtask_gives_one_result_with_its_last_attempt() -> None:
    runs = iter(range(100))

    async def fails_once(_: Episode) -> AgentResult:
        if next(runs) == 1:
            raise RuntimeError("the second run of the first attempt")
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(once=fails_once)), settings=AT_ONCE) as harness:
        retry = RetryPolicy(max_retries=2)
        await schedule(harness.engine, [task_of("once", repeat_times=3, max_samples_per_subtask=None, retry=retry)])
        (result,) = (await collect(harness.engine)).results
        assert (result.ok, result.message) == (True, "")
        assert [(sample.sample_no, sample.attempt_no) for sample in result.samples] == [(0, 2), (1, 2), (2, 2)]
