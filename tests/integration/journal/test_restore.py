"""A second engine on what the first one's journal holds, as after a crash."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import EventFilter
from py_scheduler.domain.results import AttemptState, TaskState
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, ScriptedAgent, SolvingAgent, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.journal.journal_store import Store, SurvivingJournal

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.domain.events import EventRecord
    from py_scheduler.domain.requests import SubmitReply


async def records_of(harness: Harness, reply: SubmitReply) -> list[EventRecord]:
    return await harness.records_until_done(reply)


async def test_what_was_accepted_runs_after_a_restart_and_what_ran_is_tried_again() -> None:
    journal, first = SurvivingJournal(), GatedAgent()
    async with running_engine(spec_of(first, batch_size=4), journal=journal, max_running_samples=2) as harness:
        reply = await harness.submit([task_of(str(n), repeat_times=2) for n in range(10)], request_id="once")
        await harness.until_started(reply, 2)
        before = harness.engine.last_sequence

    second = ScriptedAgent()
    async with running_engine(spec_of(second, batch_size=4), journal=journal) as harness:
        again = await harness.submit([task_of(str(n), repeat_times=2) for n in range(10)], request_id="once")
        assert again == reply, "the same request is answered as before, and runs nothing anew"
        records = await records_of(harness, reply)
    assert [r.sequence for r in records] == list(range(1, len(records) + 1))
    assert len(records) > before
    done = [r.event for r in records if isinstance(r.event, TaskDone)]
    assert sorted(event.task_id for event in done) == sorted(reply.task_ids)
    assert {event.state for event in done} == {TaskState.SUCCEEDED}
    interrupted = [r.event for r in records if isinstance(r.event, AttemptEnded) and r.event.next_attempt_no]
    assert [(e.state, e.next_attempt_no, e.is_counted) for e in interrupted] == [(AttemptState.LOST, 2, False)] * 2
    assert sum(second.begun.values()) == 20


async def test_a_finished_store_is_only_read() -> None:
    journal = SurvivingJournal()
    async with running_engine(spec_of(SolvingAgent()), journal=journal) as harness:
        reply = await harness.submit([task_of() for _ in range(3)])
        first = await records_of(harness, reply)
    async with running_engine(spec_of(SolvingAgent()), journal=journal) as harness:
        await settle()
        assert harness.engine.last_sequence == len(first)
        frame = await anext(harness.engine.watch(EventFilter(), None))
        assert [r.sequence for r in frame.records] == [r.sequence for r in first]
        assert harness.engine.submission(harness.selector(reply)).succeeded_tasks == 3


async def test_a_task_deadline_goes_on_counting() -> None:
    journal, clock = SurvivingJournal(), FakeClock()
    async with running_engine(spec_of(GatedAgent()), journal=journal, clock=clock) as harness:
        reply = await harness.submit([task_of("slow", task_deadline_seconds=60.0)])
        await harness.until_started(reply, 1)
    await clock.advance(50)
    async with running_engine(spec_of(GatedAgent()), journal=journal, clock=clock) as harness:
        await settle()
        await clock.advance(11)
        (done,) = (await harness.done(reply)).values()
    assert done.reason == "task_deadline_seconds (60) passed"


@pytest.mark.parametrize("jumped_seconds", [3_600.0, -3_600.0])
async def test_a_task_deadline_goes_on_counting_wherever_the_wall_clock_jumps(jumped_seconds: float) -> None:
    journal, clock = Store(), FakeClock()
    async with running_engine(spec_of(GatedAgent()), journal=journal, clock=clock) as harness:
        reply = await harness.submit([task_of("slow", task_deadline_seconds=60.0)])
        await harness.until_started(reply, 1)
        await harness.engine._checkpoints.take()
    clock.jumped_seconds = jumped_seconds
    await clock.advance(50)
    async with running_engine(spec_of(GatedAgent()), journal=journal, clock=clock) as harness:
        await clock.advance(9)
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 1, "not early"
        await clock.advance(2)
        (done,) = (await harness.done(reply)).values()
    assert done.reason == "task_deadline_seconds (60) passed"


async def test_after_a_boot_a_task_deadline_counts_by_the_wall_clock() -> None:
    journal, clock = SurvivingJournal(), FakeClock()
    async with running_engine(spec_of(GatedAgent()), journal=journal, clock=clock) as harness:
        reply = await harness.submit([task_of("slow", task_deadline_seconds=60.0)])
    clock.boot_id = b"the next"
    clock.jumped_seconds = 50.0 + clock.now
    clock.now = 0.0
    async with running_engine(spec_of(GatedAgent()), journal=journal, clock=clock) as harness:
        await clock.advance(9)
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 1
        await clock.advance(2)
        (done,) = (await harness.done(reply)).values()
    assert done.reason == "task_deadline_seconds (60) passed"


async def test_a_start_that_is_cancelled_while_the_store_is_opened_leaves_it_free(tmp_path: Path) -> None:
    begun, may_open = threading.Event(), threading.Event()

    class SlowJournal(SqliteJournal):
        def open(self) -> None:
            begun.set()
            may_open.wait(10)
            super().open()

    async def start() -> None:
        async with running_engine(spec_of(SolvingAgent()), journal=SlowJournal(tmp_path)):
            raise AssertionError("it was cancelled before")

    starting = asyncio.create_task(start())
    await asyncio.to_thread(begun.wait)
    starting.cancel()
    await settle()
    may_open.set()
    with pytest.raises(asyncio.CancelledError):
        await starting
    SqliteJournal(tmp_path).open()


async def test_a_drained_engine_leaves_what_waits_to_the_next_one() -> None:
    journal, agent = SurvivingJournal(), GatedAgent()
    async with running_engine(spec_of(agent), journal=journal, max_running_samples=1) as harness:
        reply = await harness.submit([task_of("runs"), task_of("waits")])
        await harness.until_started(reply, 1)
        draining = asyncio.ensure_future(harness.engine.drain(60.0))
        await settle()
        agent.gate.set()
        await draining
        assert harness.engine.submission(harness.selector(reply)).open_tasks == 1
    async with running_engine(spec_of(SolvingAgent()), journal=journal) as harness:
        assert {event.state for event in (await harness.done(reply)).values()} == {TaskState.SUCCEEDED}
