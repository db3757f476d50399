"""What a client does or leaves undone with its streams, and what the server keeps for it."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc
from py_scheduler.client import SchedulerClient
from py_scheduler.commands.token import new_token
from py_scheduler.domain.events import AttemptEnded
from py_scheduler.domain.results import Outcome, SampleDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.domain.trajectory import Trajectory
from py_scheduler.errors import CursorExpiredError, InvalidArgumentError, ResourceExhaustedError
from tests.contract.conftest import serve, whole_server
from tests.support.servers.fake_engine import FakeEngine
from tests.support.servers.grpc_calls import tasks
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from pathlib import Path

    from tests.contract.conftest import Served

CONFIG = """
[server]
listen = "127.0.0.1:0"
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Echo"
resource = { concurrency = 64 }
"""


def echo(count: int) -> list[Task]:
    return [Task(config=TaskConfig(task_type="echo"), prompt="x" * 100) for _ in range(count)]


def large_sample(task_id: str, tokens: int = 200_000) -> SampleDone:
    trajectory = Trajectory(
        token_id_bytes=bytes(4 * tokens), log_prob_bytes=bytes(4 * tokens), loss_mask_bytes=bytes(tokens)
    )
    return SampleDone(task_id=task_id, sample_no=0, attempt_no=1, outcome=Outcome.SOLVED, trajectory=trajectory)


async def rolled_out(client: SchedulerClient, batch_id: int, count: int) -> tuple[str, bytes, bytes]:
    """A submission that is done: its id, the cursor before its first event, and that after its last."""
    submission = await client.submit(echo(count), batch_id)
    done, cursor = 0, submission.cursor
    async for frame in client.watch(submission_id=submission.submission_id, cursor=cursor):
        done += sum(type(record.event).__name__ == "TaskDone" for record in frame.records)
        cursor = frame.cursor
        if done == count:
            break
    return submission.submission_id, submission.cursor, cursor


async def read_out(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


# Acknowledging


async def test_what_was_acknowledged_is_dropped_and_who_asks_for_it_is_told_the_oldest() -> None:
    async with whole_server(CONFIG) as address, SchedulerClient(address) as client, asyncio.timeout(30):
        first, start, end = await rolled_out(client, 1, 20)
        second, second_start, _ = await rolled_out(client, 2, 20)
        oldest = await client.ack(end, submission_id=first)
        assert oldest == 62, "after three events a task, and the one that took them in"
        with pytest.raises(CursorExpiredError) as caught:
            await anext(client.watch(submission_id=first, cursor=start))
        assert caught.value.oldest_sequence == oldest
        assert (await anext(client.watch(submission_id=second, cursor=second_start))).records


async def test_what_one_reader_has_not_acknowledged_stays_whatever_others_did() -> None:
    async with whole_server(CONFIG) as address, SchedulerClient(address) as client, asyncio.timeout(30):
        first, start, _ = await rolled_out(client, 1, 20)
        second, _, end = await rolled_out(client, 2, 20)
        assert await client.ack(end, submission_id=second) == 1
        assert (await anext(client.watch(submission_id=first, cursor=start))).records
        everything = await anext(client.watch())
        assert await client.ack(everything.cursor) > 100, "a whole namespace at once"


async def test_another_namespace_keeps_its_events() -> None:
    async with (
        whole_server(CONFIG) as address,
        SchedulerClient(address, namespace="other") as other,
        SchedulerClient(address) as client,
        asyncio.timeout(30),
    ):
        theirs, start, _ = await rolled_out(other, 1, 5)
        await rolled_out(client, 1, 5)
        frame = await anext(client.watch())
        assert await client.ack(frame.cursor) == 1
        assert (await anext(other.watch(submission_id=theirs, cursor=start))).records


async def test_an_acknowledgement_may_be_repeated_and_needs_a_cursor_of_its_filter(
    served: Served, client: SchedulerClient
) -> None:
    await client.submit(tasks(1), 7)
    frame = await anext(client.watch(submission_id="s-7"))
    for _ in range(2):
        await client.ack(frame.cursor, submission_id="s-7")
    assert [through for _, through in served.engine.acknowledged] == [1, 1]
    for cursor, submission_id in ((b"", "s-7"), (b"x", "s-7"), (frame.cursor, "s-8")):
        with pytest.raises(InvalidArgumentError, match="cursor"):
            await client.ack(cursor, submission_id=submission_id)


async def test_the_quota_of_retained_bytes_is_freed_by_acknowledging(tmp_path: Path) -> None:
    secret, line = new_token("alice", ["default"])
    (tmp_path / "tokens.toml").write_text(line.replace(" }", ", max_retained_bytes = 2_000 }"))
    config = CONFIG.replace("[[evaluator]]", f'tokens_file = "{tmp_path / "tokens.toml"}"\n[[evaluator]]')
    async with whole_server(config) as address, SchedulerClient(address, token=secret) as client, asyncio.timeout(30):
        submission_id, _, end = await rolled_out(client, 1, 20)
        with pytest.raises(ResourceExhaustedError, match=r"max_retained_bytes \(2000\).*AckEvents") as caught:
            await client.submit(echo(1), 2)
        assert caught.value.retry_after_seconds
        await client.ack(end, submission_id=submission_id)
        await client.submit(echo(1), 2)


# Slow and vanished consumers


async def test_a_slow_consumer_is_cut_with_its_cursor_and_goes_on_without_a_gap() -> None:
    served = await serve(FakeEngine(), stalled_stream_seconds=0.5)
    engine = served.engine
    async with SchedulerClient(served.address) as client, asyncio.timeout(60):
        await client.submit(tasks(60), 7)
        frames = client.watch()
        first = await anext(frames)
        for number in range(60):
            await engine.finish(f"s-7-{number}", sample=large_sample(f"s-7-{number}"))
        await engine.until(lambda: engine.open_watches == 0)
        assert served.server.open_streams == 0, "whoever reads nothing holds no subscription"
        sequences = [record.sequence for record in first.records]
        async for frame in frames:
            sequences += [record.sequence for record in frame.records]
            if len(sequences) == engine.last_sequence:
                break
    assert sequences == list(range(1, engine.last_sequence + 1))
    await served.server.stop()


async def test_the_status_of_a_cut_says_to_resume() -> None:
    served = await serve(FakeEngine(), stalled_stream_seconds=0.3)
    async with grpc.aio.insecure_channel(served.address) as channel, asyncio.timeout(60):
        stub: Any = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        call = stub.WatchEvents(service.WatchEventsRequest())
        await call.read()
        for number in range(40):
            sample = large_sample(f"s-7-{number}")
            await served.engine.finish(f"s-7-{number}", sample=sample)
        await served.engine.until(lambda: served.engine.open_watches == 0)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await asyncio.create_task(read_out(call))
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "nothing was read for 0.3 s: resume from the last cursor" in (caught.value.details() or "")
    await served.server.stop()


async def test_streams_beyond_the_limit_are_refused_with_the_time_to_come_back() -> None:
    served = await serve(FakeEngine(), max_streams=3)
    async with SchedulerClient(served.address, reconnect_seconds=0.0) as client, asyncio.timeout(20):
        watches = [client.watch() for _ in range(3)]
        for watch in watches:
            await anext(watch)
        with pytest.raises(ResourceExhaustedError, match=r"max_streams \(3\)") as caught:
            await anext(client.watch())
        assert caught.value.retry_after_seconds
        await client.submit(tasks(1), 7)
        await watches[0].aclose()
        await served.engine.until(lambda: served.engine.open_watches == 2)
        await anext(client.watch())
    await served.server.stop()


# cancel_on_disconnect


async def test_a_submission_ends_with_its_client_if_that_was_asked_for() -> None:
    served = await serve(FakeEngine(), disconnect_grace_seconds=0.1)
    async with SchedulerClient(served.address) as client, asyncio.timeout(20):
        await client.submit(tasks(1), 7)
        await client.submit(tasks(1), 8)
        guarded = client.watch(submission_id="s-7", cancel_on_disconnect=True)
        free = client.watch(submission_id="s-8")
        await anext(guarded)
        await anext(free)
        await free.aclose()
        await guarded.aclose()
        await asyncio.sleep(0)
        await eventually(lambda: served.engine.aborts, pause_seconds=0.01)
    (abort,) = served.engine.aborts
    assert abort.selector.submission_id == "s-7"
    assert "cancel_on_disconnect" in abort.reason
    await served.server.stop()


async def test_a_client_that_comes_back_within_the_grace_keeps_its_submission() -> None:
    served = await serve(FakeEngine(), disconnect_grace_seconds=3600.0)
    engine = served.engine
    async with SchedulerClient(served.address) as client, asyncio.timeout(20):
        await client.submit(tasks(1), 7)
        first = client.watch(submission_id="s-7", cancel_on_disconnect=True)
        await anext(first)
        await first.aclose()
        await engine.until(lambda: engine.open_watches == 0)
        guard = served.server._servicer.watches.guard
        assert len(guard._timers) == 1
        second = client.watch(submission_id="s-7", cancel_on_disconnect=True)
        await anext(second)
        assert not guard._timers
    await served.server.stop()
    assert not engine.aborts
    assert not guard._timers, "the end of the server is not the client's leaving"


async def test_only_a_submission_can_be_guarded(served: Served, client: SchedulerClient) -> None:
    with pytest.raises(InvalidArgumentError, match="cancel_on_disconnect: needs a filter with a submission_id"):
        await anext(client.watch(cancel_on_disconnect=True))


# Many failures under many watchers


async def test_five_thousand_failing_tasks_under_streaming_watchers() -> None:
    config = CONFIG.replace(":Echo", ":Failing")
    async with whole_server(config) as address, SchedulerClient(address) as client, asyncio.timeout(90):
        submission = await client.submit(echo(5_000), 7)

        async def failures() -> int:
            ended = done = 0
            async for frame in client.watch(submission_id=submission.submission_id, cursor=submission.cursor):
                ended += sum(isinstance(record.event, AttemptEnded) for record in frame.records)
                done += sum(type(record.event).__name__ == "TaskDone" for record in frame.records)
                if done == 5_000:
                    return ended
            raise AssertionError("the stream ended")

        assert await asyncio.gather(*[failures() for _ in range(4)]) == [5_000] * 4
        view = await client.get_submission(7)
        assert (view.failed_tasks, view.open_tasks) == (5_000, 0)
