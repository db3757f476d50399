"""However much is kept, whoever writes it down, hands it out or lets it go gives the loop back within 50 ms."""

from __future__ import annotations

import asyncio

from msgspec.structs import replace

from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.domain.collecting import CollectRequest, TaskResult
from py_scheduler.domain.events import EventRecord, TrainingResumed
from py_scheduler.domain.requests import Delivery, SubmissionSelector, SubmitRequest
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.scheduler.ledger.snapshots import submission_of
from tests.support.fake_clock import settle
from tests.support.handlers import GatedAgent, SolvingAgent, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.journal.journal_store import Store
from tests.support.loop_lag import LIMIT_SECONDS, LoopLag

MANY = 90_000


def to_collect(tasks: int, batch_id: int = 1) -> SubmitRequest:
    return SubmitRequest(
        request_id=f"submit {batch_id}",
        key=SubmissionKey(batch_id),
        tasks=(task_of(),) * tasks,
        delivery=Delivery.COLLECT,
    )


async def with_many_results(harness: Harness, many: int) -> str:
    """Runs one task, and has as many results as if it had been many, which would take long; the submission's id."""
    reply = await harness.engine.submit(to_collect(1))
    ledger = harness.engine.ledger
    submission = ledger.submission(reply.submission_id)
    assert submission is not None
    while submission.open_tasks:  # noqa: ASYNC110 -- gives the loop back
        await asyncio.sleep(0)
    kept = submission.kept
    (result,) = kept.collectable.values()
    (sample,) = result.samples
    for number in range(1, many):
        task_id = f"{reply.submission_id}-{number}"
        samples = (replace(sample, task_id=task_id, metrics={"number": 1.0}),)
        kept.collectable[task_id] = replace(result, task_id=task_id, samples=samples, metrics={"number": 1.0})
        kept.sizes[task_id] = kept.sizes[result.task_id]
    more = sum(kept.sizes.values()) - kept.size
    kept.size += more
    ledger.results.kept_bytes += more
    kept.scheduled_tasks = submission.next_task_no = many
    return reply.submission_id


async def collected(harness: Harness) -> tuple[TaskResult, ...]:
    request = CollectRequest(request_id="c", batch_id=1, timeout_seconds=5.0)
    return (await harness.engine.results.collect(request)).results


async def until_freed(harness: Harness) -> None:
    while harness.engine.results._released._work:  # noqa: ASYNC110 -- gives the loop back
        await asyncio.sleep(0)


async def test_a_checkpoint_of_many_open_tasks_while_they_go_on() -> None:
    agent, store = GatedAgent(), Store()
    async with running_engine(spec_of(agent, batch_size=1), journal=store, max_running_samples=1) as harness:
        reply = await harness.submit([task_of()] * 80_000, 1)
        await harness.until_started(reply, 1)
        with LoopLag() as lag:
            taking = asyncio.create_task(harness.engine._checkpoints.take())
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert not taking.done(), "it is under way"
            agent.gate.set()
            await taking
        assert lag.worst_seconds < LIMIT_SECONDS
        agent.gate.clear()
        written = submission_of(store.kept[reply.submission_id])
        assert store.kept[reply.submission_id].sequence > 1 + 1, "something went on meanwhile"
        assert len(written.open_tasks) + sum(written.done_tasks.values()) == 80_000
        assert [*written.open_tasks] == [*reply.task_ids[-len(written.open_tasks) :]]


async def test_many_results_are_written_down_handed_out_and_let_go_while_the_loop_goes_on() -> None:
    store = Store()
    async with running_engine(spec_of(SolvingAgent()), journal=store) as harness:
        await with_many_results(harness, MANY)
        with LoopLag() as lag:
            await harness.engine._checkpoints.take()
            assert len(await collected(harness)) == MANY
            await harness.engine._checkpoints.take()
        assert lag.worst_seconds < LIMIT_SECONDS
        assert len(store.kept) == MANY + 2, "the service's, the submission's and each result's"
        with LoopLag() as lag:
            await harness.engine.results.acknowledge("default", "c")
            await until_freed(harness)
            while len(store.kept) > 2:  # noqa: ASYNC110 -- so much was released that a checkpoint follows
                await asyncio.sleep(0)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert harness.engine.ledger.results.kept_bytes == 0


async def test_many_results_are_discarded_while_the_loop_goes_on() -> None:
    async with running_engine(spec_of(SolvingAgent())) as harness:
        submission_id = await with_many_results(harness, 150_000)
        with LoopLag() as lag:
            await harness.engine.results.discard(SubmissionSelector(submission_id=submission_id), "d")
            await until_freed(harness)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert harness.engine.ledger.results.kept_bytes == 0


async def test_a_collect_that_many_tasks_were_not_finished_for_while_the_loop_goes_on() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        await harness.engine.submit(to_collect(60_000))
        await settle()
        request = CollectRequest(request_id="c", batch_id=1, timeout_seconds=0.0, clear_unfinished=False)
        with LoopLag() as lag:
            reply = await harness.engine.results.collect(request)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert len(reply.unfinished) == 1_000
        assert reply.warnings == ("60000 tasks are unfinished: 1000 of them are named",)
        agent.gate.set()


async def test_a_journal_in_memory_lets_many_events_go_while_the_loop_goes_on() -> None:
    journal = MemoryJournal()
    event = TrainingResumed(epoch=0, unix_seconds=1.0)
    journal.append([EventRecord(sequence, "", event, 100) for sequence in range(1, 400_001)])
    with LoopLag() as lag:
        journal.discard_through(399_990)
        while journal.oldest_sequence < 399_991:  # noqa: ASYNC110 -- gives the loop back
            await asyncio.sleep(0)
    assert lag.worst_seconds < LIMIT_SECONDS
    assert journal.oldest_sequence == 399_991
    assert [record.sequence for record in await journal.read(399_995, 2)] == [399_996, 399_997]
