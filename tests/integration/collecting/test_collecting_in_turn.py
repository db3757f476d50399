"""One collect after another: what each hands out, what the engine keeps in between, and what a restart leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from py_scheduler.domain.collecting import CollectRequest
from py_scheduler.domain.evaluator import Episode
from py_scheduler.domain.requests import AbortRequest, SubmissionSelector
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AgentResult
from py_scheduler.domain.task import RetryPolicy, Task
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError, ResourceExhaustedError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, ScriptedAgent, hangs, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.journal.journal_store import SurvivingJournal
from tests.support.trainers.collecting import collect, drain, hanging, schedule, until_collectable, until_running, view

AT_ONCE = EngineSettings(retry_backoff_seconds=0.0)


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
        await harness.engine.results.acknowledge("default", "r")
        await harness.engine.results.acknowledge("default", "r")
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


async def test_a_call_that_only_stopped_tasks_is_told_so_again() -> None:
    """Its reply may have been lost on the way, and the tasks have left nothing else."""
    async with running_engine(spec_of(ScriptedAgent(hangs=hangs))) as harness:
        await schedule(harness.engine, hanging(2))
        first = await collect(harness.engine, request_id="r", acknowledge=False, timeout_seconds=0.0)
        assert ([task.is_stopped for task in first.unfinished], first.is_timed_out) == ([True, True], True)
        assert await collect(harness.engine, request_id="r") == first
        assert harness.engine.ledger.results.collected("default", "r") is None


async def test_a_call_that_breaks_while_it_stops_tasks_is_told_of_them_when_it_is_sent_again() -> None:
    """And stops nothing of what was scheduled since."""
    is_told, stays = asyncio.Event(), asyncio.Event()

    async def stubborn(_: Episode) -> AgentResult:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            is_told.set()
            await stays.wait()
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(stubborn=stubborn, hangs=hangs))) as harness:
        done, stopped = (await schedule(harness.engine, [task_of(), task_of("stubborn")])).task_ids
        await until_running(harness, 1)
        await until_collectable(harness, 1)
        first = asyncio.create_task(collect(harness.engine, request_id="r", timeout_seconds=0.0))
        await is_told.wait()
        first.cancel()
        await asyncio.wait([first])
        stays.set()
        await schedule(harness.engine, hanging(1))
        reply = await collect(harness.engine, request_id="r", timeout_seconds=0.0)
        assert [result.task_id for result in reply.results] == [done]
        assert [(task.task_id, task.is_stopped) for task in reply.unfinished] == [(stopped, True)]
        assert reply.is_timed_out
        assert view(harness.engine).open_tasks == 1
        assert harness.engine.results._leftovers == {}


async def test_a_call_that_took_and_stopped_nothing_leaves_nothing() -> None:
    async with running_engine(spec_of(ScriptedAgent(hangs=hangs))) as harness:
        await schedule(harness.engine, hanging(2))
        reply = await collect(
            harness.engine, request_id="r", acknowledge=False, timeout_seconds=0.0, clear_unfinished=False
        )
        assert [task.is_stopped for task in reply.unfinished] == [False, False]
        assert harness.engine.ledger.results.collected("default", "r") is None


async def test_what_another_call_took_meanwhile_is_not_told_to_be_without_a_result() -> None:
    """Of two tasks that a call stops one leaves a result, which another call takes while the first waits for the other
    task's handler.
    """
    has_run: set[str] = set()
    stays = asyncio.Event()

    async def half(episode: Episode) -> AgentResult:
        if episode.sample.task.prompt not in has_run:
            has_run.add(episode.sample.task.prompt)
            return AgentResult()
        await asyncio.Event().wait()
        raise AssertionError

    async def stubborn(_: Episode) -> AgentResult:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await stays.wait()
        return AgentResult()

    async with running_engine(spec_of(ScriptedAgent(half=half, stubborn=stubborn))) as harness:
        kept, _ = (await schedule(harness.engine, [task_of("half", repeat_times=2), task_of("stubborn")])).task_ids
        await until_running(harness, 2)
        first = asyncio.create_task(collect(harness.engine, timeout_seconds=0.0, include_partial=True))
        await until_collectable(harness, 1)
        other = await collect(harness.engine, timeout_seconds=0.0, clear_unfinished=False)
        assert [result.task_id for result in other.results] == [kept]
        stays.set()
        reply = await first
        assert reply.results == ()
        assert kept not in [task.task_id for task in reply.unfinished]
        assert len(reply.unfinished) == 1


async def test_a_submission_may_be_forgotten_while_a_call_waits_for_it() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), settings=EngineSettings(retained_submissions=0)) as harness:
        await schedule(harness.engine, [task_of()])
        first, second = (asyncio.create_task(collect(harness.engine)) for _ in range(2))
        await settle()
        agent.gate.set()
        assert sorted([len((await first).results), len((await second).results)]) == [0, 1]


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
        await harness.engine.results.discard(SubmissionSelector(batch_id=0))
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
        assert [(result.succeeded_samples, result.planned_samples) for result in reply.results] == (
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
        await harness.engine.results.acknowledge("default", "r")
        await schedule(harness.engine, [task_of()], 1)


async def test_a_thousand_drained_batches_leave_nothing() -> None:
    settings = EngineSettings(retained_submissions=10)
    async with running_engine(spec_of(ScriptedAgent()), settings=settings) as harness:
        for step in range(1_000):
            await schedule(harness.engine, [task_of(), task_of()], step)
            assert len((await collect(harness.engine, step)).results) == 2
        ledger = harness.engine._ledger
        assert (ledger.results.kept_bytes, ledger.open_tasks) == (0, 0)
        assert len(ledger._submissions) == len(ledger.requests._records) == 10


async def test_a_restart_keeps_what_was_not_acknowledged_and_nothing_else() -> None:
    journal = SurvivingJournal()
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
            await harness.engine.results.collect(
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
