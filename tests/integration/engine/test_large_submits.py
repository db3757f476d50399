"""A submit of many tasks is taken in while the loop goes on, and keeps what a small one promises."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING
from unittest import mock

import grpc
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.adapters.sqlite_journal import SqliteJournal
from py_scheduler.api.server import ApiServer
from py_scheduler.config.tables import ServerSettings
from py_scheduler.domain.collecting import CollectRequest
from py_scheduler.domain.events import TasksAccepted
from py_scheduler.domain.requests import (
    AbortRequest,
    Delivery,
    EventFilter,
    SubmissionSelector,
    SubmitReply,
    SubmitRequest,
)
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
)
from py_scheduler.scheduler.settings import EngineSettings
from py_scheduler.scheduler.submits import as_it_is
from py_scheduler.wire.tasks import encode_submission_chunks
from tests.support.fake_clock import StepClock
from tests.support.handlers import GatedAgent, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.loop_lag import LIMIT_SECONDS, LoopLag
from tests.support.servers.grpc_calls import submit_raw

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.domain.task import BatchId

MANY = 20_000
"""Far more than one turn of the loop takes in."""
METADATA = {"text": "x" * 2_000, "numbers": list(range(300))}


def request_of(
    count: int,
    request_id: str,
    batch_id: BatchId = 1,
    *,
    prompt: str = "",
    delivery: Delivery = Delivery.WATCH,
    namespace: str = "default",
) -> SubmitRequest:
    tasks = tuple([task_of(prompt)] * count)
    key = SubmissionKey(batch_id, namespace)
    return SubmitRequest(request_id=request_id, key=key, tasks=tasks, delivery=delivery)


def started(harness: Harness, request: SubmitRequest) -> asyncio.Task[SubmitReply]:
    return asyncio.create_task(harness.engine.submit(request))


async def under_way(harness: Harness, *requests: SubmitRequest) -> list[asyncio.Task[SubmitReply]]:
    """Submits that have arrived in this order, none of which is decided."""
    calls = [started(harness, request) for request in requests]
    await asyncio.sleep(0)
    assert harness.engine.ledger.open_tasks == 0
    return calls


# How long it holds the loop


@pytest.mark.parametrize(("kind", "is_durable"), [("samples", False), ("tasks", True), ("metadata", True)])
async def test_a_submit_while_the_loop_goes_on(kind: str, is_durable: bool, tmp_path: Path) -> None:
    config = TaskConfig(task_type="agent", repeat_times=5 if kind == "samples" else 1)
    if kind == "metadata":
        tasks = tuple([Task(config=config, metadata=METADATA) for _ in range(15_000)])
    else:
        tasks = tuple([Task(config=config, client_key=str(number)) for number in range(100_000)])
    journal = SqliteJournal(tmp_path) if is_durable else None
    agent = GatedAgent()
    async with running_engine(spec_of(agent), journal=journal, max_running_samples=1) as harness:
        with LoopLag() as lag:
            reply = await harness.submit(tasks, 1)
            while harness.engine._enqueueing._work:  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
                await asyncio.sleep(0)
        assert lag.worst_seconds < LIMIT_SECONDS
        assert lag.turns > 20
        assert len(reply.task_ids) == len(set(reply.task_ids)) == len(tasks)
        assert harness.engine.ledger.open_samples == len(tasks) * config.repeat_times
        assert harness.engine.submission(harness.selector(reply)).queued_attempts >= len(tasks) - 1


async def test_over_a_channel_while_the_loop_goes_on() -> None:
    agent = GatedAgent()
    tasks = [Task(config=TaskConfig(task_type="agent"), client_key=str(number)) for number in range(100_000)]
    (chunk,) = encode_submission_chunks(tasks, SubmissionKey(1), "r", len(tasks), 1 << 30)
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        server = ApiServer(harness.engine, "0", ServerSettings(listen="127.0.0.1:0"))
        address = server.bind()
        await server.start()
        try:
            raw = chunk.request.SerializeToString()
            taking_in = mock.patch.object(harness.engine, "submit_as_read", wraps=harness.engine.submit_as_read)
            with taking_in as taken, LoopLag() as lag:
                reply = await asyncio.to_thread(submit_raw, address, raw)
            assert taken.call_args.kwargs == {"size": len(raw)}
            assert lag.worst_seconds < LIMIT_SECONDS
            assert lag.turns > 20
            assert len(service.SubmitTasksResponse.FromString(reply).task_ids) == len(tasks)
            again = await asyncio.to_thread(submit_raw, address, raw)
            assert again == reply
            with pytest.raises(grpc.RpcError) as raised:
                await asyncio.to_thread(submit_raw, address, raw + b"\x2a\x02\x12\xff")
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        finally:
            await server.stop()
        assert harness.engine.ledger.open_tasks == len(tasks)


# What it promises


async def test_who_asks_again_meanwhile_waits_and_is_answered_the_same() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        request = request_of(MANY, "r")
        first, again = await under_way(harness, request, request)
        assert await first == await again
        assert await harness.engine.submit(request) == await first
        assert harness.engine.ledger.open_tasks == MANY
        agent.gate.set()


async def test_other_content_under_its_id_is_refused_meanwhile() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        first, other, small = await under_way(
            harness, request_of(MANY, "r"), request_of(MANY, "r", prompt="other"), request_of(1, "r")
        )
        await first
        for refused in (other, small):
            with pytest.raises(AlreadyExistsError, match="'r' was used for other tasks"):
                await refused
        assert harness.engine.ledger.open_tasks == MANY
        agent.gate.set()


async def test_what_arrives_in_a_namespace_is_decided_in_that_order() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        counts = (MANY, 1, 2 * MANY, 3)
        calls = [started(harness, request_of(count, str(number))) for number, count in enumerate(counts)]
        await asyncio.sleep(0)
        elsewhere = await harness.engine.submit(request_of(1, "elsewhere", namespace="b"))
        assert not calls[0].done(), "another namespace's does not wait for it"
        replies = [await call for call in calls]
        assert [reply.before_sequence for reply in replies] == sorted(reply.before_sequence for reply in replies)
        assert elsewhere.before_sequence < replies[0].before_sequence
        submission_id = replies[0].submission_id
        first_no = 0
        for reply, count in zip(replies, counts, strict=True):
            assert reply.task_ids == tuple(f"{submission_id}-{number}" for number in range(first_no, first_no + count))
            first_no += count
        agent.gate.set()


async def test_two_at_once_do_not_pass_a_limit_together() -> None:
    agent = GatedAgent()
    settings = EngineSettings(max_running_samples=1, max_queued_tasks=2 * MANY - 1)
    async with running_engine(spec_of(agent), settings=settings) as harness:
        one, other = await under_way(harness, request_of(MANY, "a"), request_of(MANY, "b", namespace="b"))
        results = await asyncio.gather(one, other, return_exceptions=True)
        assert {type(result) for result in results} == {SubmitReply, ResourceExhaustedError}
        assert harness.engine.ledger.open_tasks == MANY
        agent.gate.set()


def waiting(harness: Harness, request: SubmitRequest, size: int) -> asyncio.Task[SubmitReply]:
    """A submit that came as a message of this size."""
    return asyncio.create_task(harness.engine.submit_as_read(request.key, as_it_is(request), size=size))


async def test_what_waits_in_line_is_bounded_in_bytes_for_each_namespace_and_for_all() -> None:
    agent = GatedAgent()
    settings = EngineSettings(max_running_samples=1, max_waiting_submit_bytes=1_000_000)
    async with running_engine(spec_of(agent), settings=settings) as harness:
        first = waiting(harness, request_of(MANY, "first"), 300_000)
        behind = waiting(harness, request_of(1, "behind"), 200_000)
        half = waiting(harness, request_of(1, "refused"), 1)
        other = waiting(harness, request_of(MANY, "b", namespace="b"), 400_000)
        beyond = waiting(harness, request_of(MANY, "c", namespace="c"), 400_000)
        with pytest.raises(ResourceExhaustedError, match=r"of 500000 bytes .* of namespace 'default'") as raised:
            await half
        assert raised.value.retry_after_seconds
        with pytest.raises(ResourceExhaustedError, match=r"900000 .* max_waiting_submit_bytes \(1000000\)"):
            await beyond
        await asyncio.gather(first, behind, other)
        await waiting(harness, request_of(MANY, "alone"), 5_000_000)
        assert harness.engine.ledger.open_tasks == 3 * MANY + 1
        agent.gate.set()


async def test_one_whose_size_is_not_known_counts_too() -> None:
    agent = GatedAgent()
    settings = EngineSettings(max_running_samples=1, max_waiting_submit_bytes=1_000_000)
    async with running_engine(spec_of(agent), settings=settings) as harness:
        calls = [started(harness, request_of(MANY if n == 0 else 1, str(n))) for n in range(100)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert [type(result) for result in results] == [SubmitReply] * 30 + [ResourceExhaustedError] * 70
        agent.gate.set()


async def test_a_fault_refuses_all_of_it_and_nothing_behind_it() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        good = request_of(MANY, "good")
        faulty = SubmitRequest(request_id="bad", key=good.key, tasks=(*good.tasks, task_of(repeat_times=0)))
        bad, behind = await under_way(harness, faulty, good)
        with pytest.raises(InvalidArgumentError, match=rf"tasks\[{MANY}\].config.repeat_times"):
            await bad
        assert len((await behind).task_ids) == MANY
        agent.gate.set()


async def test_a_call_that_is_given_up_loses_nothing() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        request = request_of(MANY, "r")
        (call,) = await under_way(harness, request)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert len((await harness.engine.submit(request)).task_ids) == MANY
        assert harness.engine.ledger.open_tasks == MANY
        agent.gate.set()


async def test_an_abort_after_a_submit_that_was_given_up_stops_all_of_it() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        (call,) = await under_way(harness, request_of(MANY, "r"))
        call.cancel()
        reply = await harness.engine.abort(AbortRequest(selector=SubmissionSelector(batch_id=1), request_id="a"))
        assert reply.aborted_tasks == MANY
        assert harness.engine.ledger.open_tasks == 0
        with pytest.raises(NotFoundError):
            await harness.engine.abort(AbortRequest(selector=SubmissionSelector(batch_id=2), request_id="b"))
        agent.gate.set()


async def test_an_abort_of_a_submission_waits_for_what_had_arrived_for_it() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        first = await harness.submit([task_of()], 1)
        more = started(harness, request_of(MANY, "r"))
        other = started(harness, request_of(MANY, "other", batch_id=2))
        await asyncio.sleep(0)
        reply = await harness.engine.abort(AbortRequest(selector=harness.selector(first), request_id="a"))
        assert reply.aborted_tasks == MANY + 1
        assert (await more).submission_id == first.submission_id
        assert len((await other).task_ids) == MANY
        assert harness.engine.ledger.open_tasks >= MANY
        agent.gate.set()


async def test_a_collect_waits_for_what_had_arrived_for_its_submission() -> None:
    agent = GatedAgent()
    agent.gate.set()
    async with running_engine(spec_of(agent)) as harness:
        (call,) = await under_way(harness, request_of(2_000, "r", delivery=Delivery.COLLECT))
        collected = await harness.engine.results.collect(
            CollectRequest(request_id="c", batch_id=1, timeout_seconds=60.0)
        )
        assert len(collected.results) == 2_000
        assert collected.submission_id == (await call).submission_id


async def test_an_engine_that_closes_takes_nothing_in_any_more() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        calls = await under_way(harness, request_of(MANY, "r"), request_of(1, "s"))
    for call in calls:
        with pytest.raises(FailedPreconditionError, match="has stopped"):
            await call
    assert harness.engine.ledger.open_tasks == 0


@pytest.mark.parametrize("is_durable", [False, True])
async def test_what_was_decided_when_the_engine_closes_is_answered_so(is_durable: bool, tmp_path: Path) -> None:
    """And what waits behind it in line is not. The engine closes without a drain, as at a fault."""
    agent = GatedAgent()
    journal = SqliteJournal(tmp_path) if is_durable else None
    async with running_engine(spec_of(agent), journal=journal, clock=StepClock(), max_running_samples=1) as harness:
        request = request_of(MANY, "r")
        call, behind = await under_way(harness, request, request_of(1, "s"))
        while not harness.engine.ledger.open_tasks:  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
            await asyncio.sleep(0)
        assert not call.done()
    reply = await call
    assert len(reply.task_ids) == MANY
    with pytest.raises(FailedPreconditionError, match="has stopped"):
        await behind
    if is_durable:
        async with running_engine(spec_of(agent), journal=SqliteJournal(tmp_path), max_running_samples=1) as harness:
            assert await harness.engine.submit(request) == reply


async def test_metadata_that_change_after_the_decision_are_written_as_they_were(tmp_path: Path) -> None:
    """By the caller, who has them too, or by a handler: the journal takes several turns to encode so many tasks."""
    agent = GatedAgent()
    tasks = tuple([Task(config=TaskConfig(task_type="agent"), metadata={"number": n}) for n in range(MANY)])
    request = SubmitRequest(request_id="r", key=SubmissionKey(1), tasks=tasks)
    async with running_engine(spec_of(agent), journal=SqliteJournal(tmp_path), max_running_samples=1) as harness:
        call = started(harness, request)
        while not harness.engine.ledger.open_tasks:  # noqa: ASYNC110 -- gives the loop back, and nothing tells of it
            await asyncio.sleep(0)
        tasks[-1].metadata["number"] = object()
        tasks[-2].metadata["number"] = "other"
        reply = await call
        assert len(reply.task_ids) == MANY
        assert (await harness.submit([task_of()], 2)).task_ids, "the journal works"
    for number in (1, 2):
        tasks[-number].metadata["number"] = MANY - number
    async with running_engine(spec_of(agent), journal=SqliteJournal(tmp_path), max_running_samples=1) as harness:
        assert await harness.engine.submit(request) == reply
        records = [harness.engine.ledger.open_task(task_id) for task_id in reply.task_ids]
        assert [record.task for record in records] == list(tasks)


async def test_one_that_drains_neither() -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), max_running_samples=1) as harness:
        (call,) = await under_way(harness, request_of(MANY, "r"))
        await harness.engine.drain(0.0)
        with pytest.raises(FailedPreconditionError, match="is shutting down"):
            await call


async def test_a_watcher_is_told_once_and_a_restart_keeps_all_of_it(tmp_path: Path) -> None:
    agent = GatedAgent()
    async with running_engine(spec_of(agent), journal=SqliteJournal(tmp_path), max_running_samples=1) as harness:
        request = request_of(MANY, "r")
        reply = await harness.engine.submit(request)
        event_filter = EventFilter(submission_id=reply.submission_id)
        async with aclosing(harness.engine.watch(event_filter, reply.before_sequence)) as frames:  # type: ignore[type-var]
            first = (await anext(frames)).records[0]
        assert isinstance(first.event, TasksAccepted)
        assert tuple(accepted.task_id for accepted in first.event.tasks) == reply.task_ids
        assert first.sequence == reply.before_sequence + 1
    async with running_engine(spec_of(agent), journal=SqliteJournal(tmp_path), max_running_samples=1) as harness:
        assert await harness.engine.submit(request) == reply
        assert harness.engine.ledger.open_tasks == MANY
        agent.gate.set()
        await harness.engine.abort(AbortRequest(selector=harness.selector(reply), request_id="a"))
