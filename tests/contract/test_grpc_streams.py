"""Watches and rollouts over a real channel, and each way a stream can end."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import numpy as np
import pytest

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.generation import WeightSpan
from py_scheduler.domain.requests import (
    EventKind,
    TasksAcceptedNotice,
)
from py_scheduler.domain.results import Outcome, Reward, SampleDone
from py_scheduler.domain.trajectory import Trajectory, Turn
from py_scheduler.errors import (
    CursorExpiredError,
    CursorMismatchError,
    FailedPreconditionError,
    InvalidArgumentError,
    ServerError,
    UnplaceableError,
)
from tests.contract.conftest import serve
from tests.support.servers.fake_engine import FakeEngine
from tests.support.servers.grpc_calls import tasks

if TYPE_CHECKING:
    from tests.contract.conftest import Served


# Streams


async def test_a_watch_sees_what_was_and_what_happens(served: Served, client: SchedulerClient) -> None:
    submission = await client.submit(tasks(2), 7)
    frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
    first = await anext(frames)
    (record,) = first.records
    assert record.event == TasksAcceptedNotice(
        submission_id="s-7", batch_id=7, task_ids=submission.task_ids, unix_seconds=1.0
    )
    await served.engine.finish("s-7-0")
    kinds: list[str] = []
    async for frame in frames:
        kinds.extend(type(record.event).__name__ for record in frame.records)
        if len(kinds) == 3:
            break
    assert kinds == ["AttemptStarted", "AttemptEnded", "TaskDone"]
    await frames.aclose()


async def test_a_sample_arrives_with_numpy_arrays(served: Served, client: SchedulerClient) -> None:
    sample = SampleDone(
        task_id="s-7-0",
        sample_no=0,
        attempt_no=1,
        outcome=Outcome.WRONG_ANSWER,
        reward=Reward(score=0.25, details={"answer": "4", "tries": [1, 2]}),
        trajectory=Trajectory(
            token_id_bytes=np.array([5, -1, 2**31 - 1], "<i4").tobytes(),
            log_prob_bytes=np.array([0, -1.5, -0.25], "<f4").tobytes(),
            loss_mask_bytes=b"\0\1\1",
            turns=(Turn(start=0, end=1, source="environment", text="é"), Turn(start=1, end=3, source="student")),
            weight_spans=(WeightSpan("v1", 1, 3),),
        ),
        error="handler said \ud800",
    )
    submission = await client.submit(tasks(1), 7)
    await served.engine.finish("s-7-0", sample=sample)
    async for frame in client.watch(cursor=submission.cursor, submission_id="s-7", kinds=[EventKind.ATTEMPT_ENDED]):
        if frame.records:
            break
    event = frame.records[0].event
    assert isinstance(event, AttemptEnded)
    (arrived,) = event.samples
    assert arrived.trajectory == sample.trajectory
    assert arrived.trajectory.token_ids.tolist() == [5, -1, 2**31 - 1]
    assert arrived.trajectory.log_probs.tolist() == [0, -1.5, -0.25]
    assert arrived.reward == sample.reward
    assert arrived.error == "handler said ?"


async def test_an_event_is_encoded_once_for_all_watchers(served: Served, client: SchedulerClient) -> None:
    await client.submit(tasks(1), 7)
    first, second = client.watch(), client.watch()
    frame = await anext(first)
    encoded = served.engine.records[0].encoded
    assert encoded is not None
    assert (await anext(second)).records == frame.records
    assert served.engine.records[0].encoded is encoded
    await first.aclose()
    await second.aclose()


async def test_a_client_that_goes_away_frees_its_subscription(served: Served, client: SchedulerClient) -> None:
    frames = [client.watch() for _ in range(20)]
    for stream in frames:
        await anext(stream)
    assert (served.engine.open_watches, served.server.open_streams) == (20, 20)
    for stream in frames:
        await stream.aclose()
    await served.engine.until(lambda: not served.engine.open_watches)
    assert served.server.open_streams == 0


async def test_a_cursor_belongs_to_its_filter_and_its_store(served: Served, client: SchedulerClient) -> None:
    submission = await client.submit(tasks(1), 7)
    await client.submit(tasks(1), 8)
    narrower = client.watch(submission_id="s-7", kinds=[EventKind.TASK_DONE], cursor=submission.cursor)
    await anext(narrower)
    await narrower.aclose()
    with pytest.raises(CursorMismatchError):
        await anext(client.watch(submission_id="s-8", cursor=submission.cursor))
    with pytest.raises(InvalidArgumentError, match="not a cursor"):
        await anext(client.watch(cursor=b"nonsense"))
    served.engine.store_epoch = bytes(16)
    with pytest.raises(CursorExpiredError):
        await anext(client.watch(submission_id="s-7", cursor=submission.cursor))


async def test_a_compacted_cursor_is_told_the_oldest_sequence(served: Served, client: SchedulerClient) -> None:
    submission = await client.submit(tasks(1), 7)
    await served.engine.finish("s-7-0")
    served.engine.oldest_sequence = 3
    with pytest.raises(CursorExpiredError) as caught:
        await anext(client.watch(submission_id="s-7", cursor=submission.cursor))
    assert caught.value.oldest_sequence == 3


async def test_a_broken_connection_is_resumed_without_gap_or_repetition() -> None:
    engine = FakeEngine()
    served = await serve(engine)
    port = served.address.rpartition(":")[2]
    sequences: list[int] = []
    client = SchedulerClient(served.address)
    async with client:
        submission = await client.submit(tasks(40), 7)
        frames = client.watch(submission_id="s-7", cursor=submission.cursor)
        for number in range(40):
            await engine.finish(f"s-7-{number}")
            while len(sequences) < 1 + 3 * (number + 1):
                sequences.extend(record.sequence for record in (await anext(frames)).records)
            if number % 10 == 5:
                await served.server.stop()
                await engine.finish("s-9-0")
                served = await serve(engine, listen=f"127.0.0.1:{port}")
        await frames.aclose()
    await served.server.stop()
    assert len(sequences) == len(set(sequences)) == 121
    assert sequences == sorted(sequences)


async def test_a_stopping_server_ends_its_streams_after_the_last_event(served: Served, client: SchedulerClient) -> None:
    await client.submit(tasks(1), 7)
    frames = client.watch()
    last = await anext(frames)
    await served.engine.finish("s-7-0")
    stopping = asyncio.create_task(served.server.stop())
    with pytest.raises(ServerError) as caught:  # noqa: PT012 - it ends by raising
        while True:
            last = await anext(frames)
    assert caught.value.code == "UNAVAILABLE"
    assert last.through_sequence == served.engine.last_sequence
    await stopping
    assert served.engine.open_watches == 0


async def test_closing_the_client_ends_its_watches(served: Served, client: SchedulerClient) -> None:
    frames = client.watch()
    await anext(frames)
    reading = asyncio.create_task(anext(frames))
    await asyncio.sleep(0)
    await client.close()
    with pytest.raises(FailedPreconditionError, match="closed"):
        await reading


async def test_large_frames_are_cut_into_several(served: Served, client: SchedulerClient) -> None:
    count = 200_000
    trajectory = Trajectory(
        token_id_bytes=bytes(4 * count), log_prob_bytes=bytes(4 * count), loss_mask_bytes=bytes(count)
    )
    await client.submit(tasks(5), 7)
    for number in range(5):
        sample = SampleDone(
            task_id=f"s-7-{number}", sample_no=0, attempt_no=1, outcome=Outcome.SOLVED, trajectory=trajectory
        )
        await served.engine.finish(f"s-7-{number}", sample=sample)
    events = frames = 0
    async for frame in client.watch():
        events, frames = events + len(frame.records), frames + 1
        if events == 16:
            break
    assert frames >= 5


# Rollouts


async def test_a_rollout_ends_when_its_tasks_are_done(served: Served, client: SchedulerClient) -> None:
    await client.submit(tasks(2), 7)
    rollout = client.rollout(tasks(3), batch_id=7)
    reading = asyncio.create_task(anext(rollout))
    await served.engine.until(lambda: len(served.engine.submits) == 2)
    await served.engine.finish("s-7-0", "s-7-3", "s-7-4", "s-7-1", "s-7-2")
    events = [await reading, *[event async for event in rollout]]
    assert [(type(event).__name__, event.task_id) for event in events] == [
        (kind, task_id) for task_id in ("s-7-3", "s-7-4", "s-7-2") for kind in ("SampleDone", "TaskDone")
    ]


async def test_a_rollout_of_many_chunks_whose_tasks_end_before_their_submit_returns() -> None:
    served = await serve(FakeEngine(finish_at_once=True))
    try:
        async with SchedulerClient.connect(served.address) as client, asyncio.timeout(30):
            events = [event async for event in client.rollout(iter(tasks(4_500)), batch_id=7)]
        assert len({event.task_id for event in events if isinstance(event, TaskDone)}) == 4_500
        assert len(events) == 9_000
    finally:
        await served.server.stop()


@pytest.mark.parametrize("abort_on_exit", [False, True])
async def test_a_rollout_left_early(served: Served, client: SchedulerClient, *, abort_on_exit: bool) -> None:
    rollout = client.rollout(tasks(3), batch_id=7, abort_on_exit=abort_on_exit)
    reading = asyncio.create_task(anext(rollout))
    await served.engine.until(lambda: bool(served.engine.submits))
    await served.engine.finish("s-7-1")
    await reading
    await rollout.aclose()
    assert [sorted(abort.task_ids) for abort in served.engine.aborts] == ([["s-7-0", "s-7-2"]] if abort_on_exit else [])
    await served.engine.until(lambda: not served.engine.open_watches)


async def test_a_rollout_whose_submit_is_refused(served: Served, client: SchedulerClient) -> None:
    served.engine.fail_with = UnplaceableError("never")
    with pytest.raises(UnplaceableError):
        await anext(client.rollout(tasks(1), batch_id=7))
