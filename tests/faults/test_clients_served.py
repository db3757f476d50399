"""Clients that are killed, that read too slowly, and that say how long they have, of a served process."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc
from py_scheduler.client import PlacementClient, SchedulerClient
from py_scheduler.domain.collecting import CollectRequest
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.leases import LeaseState
from py_scheduler.domain.requests import Delivery
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import TaskState
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.errors import ServerError
from py_scheduler.wire.collecting import encode_collect_request
from py_scheduler.wire.tasks import encode_submission_chunks
from tests.support.servers.served_process import ROOT, served_process
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tests.support.servers.served_process import ServedProcess

pytestmark = [pytest.mark.slow]

CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
{server}
[journal]
state_dir = "state"
[scheduler]
stop_grace_seconds = {grace}
[cluster.layout]
"10.0.0.1" = {{ gpus = [0], cpu = 16, memory_gb = 16 }}
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.agents.app_handlers:{handler}"
handler_args = {arguments}
resource = {{ gpu = 1.0, concurrency = 4 }}
run_resource = {{ gpu = 0.25 }}
"""


def config_of(folder: Path, handler: str, arguments: str = "{}", *, server: str = "", grace: float = 5.0) -> Path:
    config = folder / "scheduler.toml"
    config.write_text(CONFIG.format(folder=folder, handler=handler, arguments=arguments, server=server, grace=grace))
    return config


def tasks(count: int, prompt: str = "") -> list[Task]:
    return [Task(config=TaskConfig(task_type="agent"), prompt=prompt)] * count


async def read_until_done(client: SchedulerClient, submission_id: str, count: int) -> list[TaskDone]:
    done: list[TaskDone] = []
    async with aclosing(client.watch(submission_id=submission_id)) as frames:
        async for frame in frames:
            done += [record.event for record in frame.records if isinstance(record.event, TaskDone)]
            if len(done) >= count:
                return done
    raise AssertionError("the stream ended")


# Killed


@asynccontextmanager
async def trainer(address: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, list[str]]]:
    """A client in a process of its own, and its submissions: one that is to end with it, and one that is not."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.servers.disconnecting_client", address),
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        yield process, (await process.stdout.readline()).decode().split()
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


async def test_what_a_killed_client_has_asked_to_end_with_it_ends_and_nothing_else(tmp_path: Path) -> None:
    config = config_of(tmp_path, "Gated", f'{{ gate = "{tmp_path}/gate" }}', server="disconnect_grace_seconds = 0.2")
    async with (
        served_process(config),
        SchedulerClient(f"unix:{tmp_path}/s.sock") as client,
        asyncio.timeout(60),
    ):
        async with trainer(f"unix:{tmp_path}/s.sock") as (process, (guarded, free)):
            assert (await client.get_submission(submission_id=guarded)).running_attempts == 1
            process.send_signal(signal.SIGKILL)
            await process.wait()
            (done,) = await read_until_done(client, guarded, 1)
            assert (done.state, "cancel_on_disconnect" in done.reason) == (TaskState.ABORTED, True)
            assert (await client.get_submission(submission_id=free)).running_attempts == 1
        (tmp_path / "gate").touch()
        assert [done.state for done in await read_until_done(client, free, 1)] == [TaskState.SUCCEEDED]


async def test_a_guard_ends_with_its_server_and_the_work_goes_on_at_the_next(tmp_path: Path) -> None:
    """Although its client died too: only a stream can be seen to break, and what was acknowledged is never lost."""
    config = config_of(tmp_path, "Gated", f'{{ gate = "{tmp_path}/gate" }}', server="disconnect_grace_seconds = 0.2")
    async with SchedulerClient(f"unix:{tmp_path}/s.sock", reconnect_seconds=30.0) as client, asyncio.timeout(60):
        async with served_process(config) as served, trainer(f"unix:{tmp_path}/s.sock") as (process, (guarded, _)):
            served.process.kill()
            await served.process.wait()
            process.kill()
            await process.wait()
        (tmp_path / "gate").touch()
        async with served_process(config):
            assert [done.state for done in await read_until_done(client, guarded, 1)] == [TaskState.SUCCEEDED]


# Slow


async def test_who_was_cut_for_not_reading_catches_up_from_the_journal_with_what_others_have_read(
    tmp_path: Path,
) -> None:
    """160 MB of events, of which a server keeps 128 in memory at most: all of what an uninterrupted stream has."""
    config = config_of(tmp_path, "Large", server="stalled_stream_seconds = 0.5")
    path = f"unix:{tmp_path}/s.sock"
    async with (
        served_process(config) as served,
        SchedulerClient(path) as prompt,
        SchedulerClient(path, reconnect_seconds=0.0) as late,
        asyncio.timeout(100),
    ):
        frames = late.watch()
        cursor = (await anext(frames)).cursor
        submission = await prompt.submit(tasks(900, "20000"), 1)
        before = resident_bytes(served)
        read: list[tuple[int, str, int]] = []
        async with aclosing(prompt.watch(cursor=cursor)) as steady:
            while sum(kind == "TaskDone" for _, kind, _ in read) < 900:
                read += told_by(await anext(steady))
        assert resident_bytes(served) - before < 250e6, "160 MB were produced, and one stream has read nothing"
        caught_up: list[tuple[int, str, int]] = []
        with pytest.raises(ServerError, match=r"nothing was read for 0\.5 s"):  # noqa: PT012 - it ends by raising
            async for frame in frames:
                caught_up += told_by(frame)
                cursor = frame.cursor
        assert len(caught_up) < len(read)
        async with aclosing(late.watch(cursor=cursor)) as again:
            while len(caught_up) < len(read):
                caught_up += told_by(await anext(again))
        assert caught_up == read
        assert {event.state for event in await read_until_done(prompt, submission.submission_id, 900)} == {
            TaskState.SUCCEEDED
        }


def told_by(frame: Any) -> list[tuple[int, str, int]]:
    """Of each event its sequence, its kind and how many tokens it brought."""
    return [
        (
            record.sequence,
            type(record.event).__name__,
            sum(len(sample.trajectory) for sample in record.event.samples)
            if isinstance(record.event, AttemptEnded)
            else 0,
        )
        for record in frame.records
    ]


def resident_bytes(served: ServedProcess) -> int:
    lines = Path(f"/proc/{served.process.pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))


# Deadlines: what waits for a client answers before the client has given up, and leaves nothing behind


async def test_an_abort_answers_by_its_callers_deadline_with_what_has_not_stopped(tmp_path: Path) -> None:
    config = config_of(tmp_path, "Deaf", grace=60.0)
    async with served_process(config), SchedulerClient(f"unix:{tmp_path}/s.sock") as client, asyncio.timeout(60):
        submission = await client.submit(tasks(1), 1)
        await until_running(client, 1)
        begun = time.monotonic()
        reply = await client.abort(1, timeout_seconds=2.0)
        assert time.monotonic() - begun < 2.0
        assert reply.still_stopping == submission.task_ids


async def test_a_lease_request_answers_by_its_callers_deadline_with_the_reason_and_then_gives_up_its_place(
    tmp_path: Path,
) -> None:
    config = config_of(tmp_path, "Gated", f'{{ gate = "{tmp_path}/gate" }}')
    path = f"unix:{tmp_path}/s.sock"
    async with (
        served_process(config),
        PlacementClient(path) as placement,
        SchedulerClient(path) as client,
        asyncio.timeout(60),
    ):
        held = await placement.acquire(Resource(gpu=1.0))
        begun = time.monotonic()
        pending = await placement.acquire(Resource(gpu=1.0), timeout_seconds=2.0, ttl_seconds=1.0)
        assert time.monotonic() - begun < 2.0
        assert (pending.state, bool(pending.reason)) == (LeaseState.PENDING, True)
        # Nobody asks for it any more: after its ttl it is in nobody's way.
        await placement.release(held)
        (tmp_path / "gate").touch()
        submission = await client.submit(tasks(4), 1)
        assert len(await read_until_done(client, submission.submission_id, 4)) == 4


async def test_who_gives_up_a_collect_has_taken_nothing_and_stopped_nothing(tmp_path: Path) -> None:
    """The deadline is gRPC's own, much earlier than the request's timeout, at which it would stop what is left."""
    config = config_of(tmp_path, "Gated", f'{{ gate = "{tmp_path}/gate" }}')
    path = f"unix:{tmp_path}/s.sock"
    async with (
        served_process(config),
        SchedulerClient(path) as client,
        grpc.aio.insecure_channel(path) as channel,
        asyncio.timeout(60),
    ):
        submission = await client.submit(tasks(2), 1, delivery=Delivery.COLLECT)
        await until_running(client, 2)
        stub: Any = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        request = encode_collect_request(CollectRequest(request_id="given up", batch_id=1, timeout_seconds=600.0))
        begun = time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.CollectResults(request, timeout=1.0).read()
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert time.monotonic() - begun < 20.0
        view = await client.get_submission(1)
        assert (view.running_attempts, view.unacknowledged_tasks) == (2, 0)
        (tmp_path / "gate").touch()
        reply = await client.collect(1, request_id="given up")
        assert sorted(result.task_id for result in reply.results) == sorted(submission.task_ids)


async def test_a_call_whose_deadline_has_passed_does_nothing_or_all_of_it(tmp_path: Path) -> None:
    """Submits with hopeless deadlines: each is in with all of its tasks, once, or not at all; asked again it is in."""
    config = config_of(tmp_path, "Echo")
    path = f"unix:{tmp_path}/s.sock"
    async with (
        served_process(config),
        SchedulerClient(path) as client,
        grpc.aio.insecure_channel(path) as channel,
        asyncio.timeout(60),
    ):
        stub: Any = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        await stub.GetServerInfo(service.GetServerInfoRequest())
        codes = set()
        for number in range(100):
            key = SubmissionKey(number)
            (chunk,) = encode_submission_chunks(tasks(20), key, f"r{number}", max_tasks=20, max_bytes=1 << 20)
            try:
                await stub.SubmitTasks(chunk.request, timeout=0.0005 * (number % 10))
            except grpc.aio.AioRpcError as error:
                codes.add(error.code())
        assert codes == {grpc.StatusCode.DEADLINE_EXCEEDED}
        for number in range(100):
            submission = await client.submit(tasks(20), number, request_id=f"r{number}")
            assert len(await read_until_done(client, submission.submission_id, 20)) == 20
            assert (await client.get_submission(number)).scheduled_tasks == 20


async def until_running(client: SchedulerClient, count: int) -> None:
    async def is_so() -> bool:
        return (await client.get_submission(1)).running_attempts == count

    await eventually(is_so, pause_seconds=0.01)
