"""A disk that is slower than what is to be written: memory stays bounded, and all goes on when it has caught up."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.domain.requests import SubmissionSelector
from py_scheduler.domain.results import Outcome
from py_scheduler.domain.task import Task
from py_scheduler.errors import ResourceExhaustedError
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import settle
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import Harness, running_engine, samples_in, task_of
from tests.support.journal.journal_store import SlowJournal

SAMPLES = 400
AT_ONCE = 4
MOST_BYTES = 20_000
OF_A_SAMPLE = 2_000
"""More than the events of one take."""


async def committed_bit_by_bit(harness: Harness, journal: SlowJournal, reply: asyncio.Task[object]) -> list[int]:
    """Until all is done; how many bytes waited meanwhile, each time that nothing more happened."""
    log, waited = harness.engine._event_log, []
    while not reply.done() or log.committed_sequence < journal.last_sequence:
        await settle()
        waited.append(log.uncommitted_bytes)
        journal.commit(min(log.committed_sequence + 10, journal.last_sequence))
    return waited


@pytest.mark.parametrize(
    "tasks", [[task_of()] * SAMPLES, [task_of(repeat_times=SAMPLES)]], ids=["many batches", "one batch"]
)
async def test_what_waits_for_the_disk_is_bounded_and_everything_runs_all_the_same(tasks: list[Task]) -> None:
    journal = SlowJournal()
    settings = EngineSettings(max_running_samples=AT_ONCE, max_uncommitted_bytes=MOST_BYTES)
    async with running_engine(spec_of(SolvingAgent()), journal=journal, settings=settings) as harness:
        reply = asyncio.create_task(harness.submit(tasks))
        await settle()
        journal.commit(1)
        submitted = await reply
        done = asyncio.create_task(harness.records_until_done(submitted))
        waited = await committed_bit_by_bit(harness, journal, done)
        assert max(waited) > MOST_BYTES / 2, "the disk was behind"
        assert max(waited) < MOST_BYTES + AT_ONCE * OF_A_SAMPLE
        outcomes = [sample.outcome for sample in samples_in(await done)]
        assert outcomes == [Outcome.SOLVED] * SAMPLES


async def test_while_the_disk_is_behind_submits_are_refused_and_it_is_told_why_tasks_wait() -> None:
    journal = SlowJournal()
    settings = EngineSettings(max_running_samples=AT_ONCE, max_uncommitted_bytes=MOST_BYTES)
    async with running_engine(spec_of(SolvingAgent()), journal=journal, settings=settings) as harness:
        reply = asyncio.create_task(harness.submit([task_of()] * SAMPLES))
        await settle()
        journal.commit(1)
        submitted = await reply
        await settle()
        with pytest.raises(ResourceExhaustedError, match="max_uncommitted_bytes is 20000: send") as refused:
            await harness.submit([task_of()], 2)
        assert refused.value.retry_after_seconds
        selector = SubmissionSelector(submission_id=submitted.submission_id)
        waiting = harness.engine.submission(selector).waiting
        assert {batch.reason for batch in waiting} == {
            "the journal's disk is behind: nothing is admitted until it has caught up"
        }
        done = asyncio.create_task(harness.records_until_done(submitted))
        await committed_bit_by_bit(harness, journal, done)
        again = asyncio.create_task(harness.submit([task_of()], 2))
        await settle()
        journal.commit(journal.last_sequence)
        await again
