"""What thousands of streams, and very large messages, cost a server in a process of its own."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import time
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import ResourceExhaustedError
from py_scheduler.wire.events import MAX_FRAME_BYTES
from tests.faults import measured
from tests.support.servers.served_process import ROOT, served_process
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from tests.support.servers.served_process import ServedProcess

pytestmark = [pytest.mark.slow]

STREAMS = 10_000
ROUNDS = 4
STREAM_LEAVES_BYTES = 10
UNREAD = 200
CONFIG = """
[server]
listen = "127.0.0.1:0"
{more}
[[evaluator]]
evaluator_id = "large"
handler = "tests.support.agents.app_handlers:Large"
resource = {{ concurrency = 2 }}
[[evaluator]]
evaluator_id = "napping"
handler = "tests.support.agents.app_handlers:Napping"
resource = {{ concurrency = 1 }}
"""


def config_of(folder: Path, more: str = "") -> Path:
    file = folder / "scheduler.toml"
    file.write_text(CONFIG.format(more=more))
    return file


def resident_bytes(process: ServedProcess) -> int:
    status = Path(f"/proc/{process.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmRSS"))


@asynccontextmanager
async def holding(address: str, count: int, what: str = "hold") -> AsyncIterator[asyncio.subprocess.Process]:
    """A client of its own process, with so many streams open or broken off inside the block."""
    holder = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.support.servers.stream_holder", address, str(count), what),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert holder.stdout is not None
        assert int(await holder.stdout.readline()) == count
        yield holder
    finally:
        if holder.returncode is None:
            holder.kill()
        await holder.communicate()


async def test_ten_thousand_idle_streams_fit_into_500_mb_and_one_more_is_refused(tmp_path: Path) -> None:
    async with served_process(config_of(tmp_path)) as server:
        before = resident_bytes(server)
        async with holding(server.address, STREAMS):
            used = resident_bytes(server)
            assert used < 500e6, f"{used / 1e6:.0f} MB; {(used - before) / STREAMS:.0f} bytes a stream"
            async with SchedulerClient(server.address, reconnect_seconds=0.0) as client:
                with pytest.raises(ResourceExhaustedError, match="max_streams"):
                    await anext(client.watch())
                await client.server_info()


@pytest.mark.timeout(300)
async def test_ten_thousand_streams_that_were_broken_off_leave_nothing(tmp_path: Path) -> None:
    """Not one object of Python for a stream, of whatever type, and of all memory at most ten bytes each. They are
    broken off as soon as something came, so that for many the server has not yet heard that it is sent.
    """
    async with (
        measured_process(config_of(tmp_path), tmp_path / "measurements") as server,
        holding(server.address, STREAMS, "leave") as client,
        asyncio.timeout(280),
    ):
        assert client.stdin is not None
        assert client.stdout is not None
        files_open = open_files(server)
        rounds = []
        for _ in range(ROUNDS):
            client.stdin.write(b"again\n")
            assert int(await client.stdout.readline()) == STREAMS
            await eventually(lambda: open_files(server) <= files_open, pause_seconds=0.05)
            rounds.append(await measure(server, tmp_path / "measurements"))
    first, last = rounds[0], rounds[-1]
    more = {kind: count - first["objects"].get(kind, 0) for kind, count in last["objects"].items()}
    assert sum(more.values()) < 100, {kind: count for kind, count in more.items() if count}
    assert last["blocks"] - first["blocks"] < 1_000
    held = [holds["malloc_bytes"] for holds in rounds]
    grown = median_slope(held) / STREAMS
    assert grown <= STREAM_LEAVES_BYTES, f"{grown:.1f} bytes a stream; {held}"


@asynccontextmanager
async def measured_process(config: Path, report: Path) -> AsyncIterator[ServedProcess]:
    environment = {measured.VARIABLE: str(report), **measured.EXACT_MALLOC}
    async with served_process(config, "tests.faults.measured", environment) as server:
        yield server


async def measure(server: ServedProcess, report: Path) -> dict[str, Any]:
    """What a measured process holds now."""
    lines = lines_of(report)
    server.process.send_signal(signal.SIGUSR1)
    await eventually(lambda: len(lines_of(report)) > len(lines), pause_seconds=0.05)
    answer: dict[str, Any] = json.loads(lines_of(report)[-1])
    return answer


def open_files(server: ServedProcess) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def lines_of(file: Path) -> list[str]:
    """Those that are written to their end."""
    return file.read_text().split("\n")[:-1] if file.exists() else []


def median_slope(values: Sequence[float]) -> float:
    """By how much each is more than the one before: of every pair of them, the one in the middle (Theil and Sen)."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)


@pytest.mark.timeout(200)
async def test_streams_that_nobody_reads_hold_two_copies_of_a_frame_each_and_are_cut(tmp_path: Path) -> None:
    """One for Python and one for gRPC, until the client reads or goes. Until then they count in `max_streams` too, so
    that many of them are no way around the bound; the subscription and its events are let go with the cut.
    """
    config = config_of(tmp_path, f"max_streams = {UNREAD + 1}\nstalled_stream_seconds = 3.0")
    report = tmp_path / "measurements"
    async with (
        measured_process(config, report) as server,
        SchedulerClient(server.address, reconnect_seconds=0.0) as client,
        # So that the client's own buffers do not grow to take in many frames of each stream.
        grpc.aio.insecure_channel(server.address, options=[("grpc.http2.bdp_probe", 0)]) as channel,
        asyncio.timeout(180),
    ):
        stub: Any = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        unread = [stub.WatchEvents(service.WatchEventsRequest()) for _ in range(UNREAD)]
        await asyncio.gather(*[call.read() for call in unread])
        large = Task(config=TaskConfig(task_type="large"), prompt="20000")
        submission = await client.submit([large] * 100, 7)
        await read_to_the_end(client, submission.submission_id, 100)
        holds = await measure_until(server, report, "_Stream", at_most=0)
        watches = [client.watch() for _ in range(2)]
        await anext(watches[0])
        with pytest.raises(ResourceExhaustedError, match="max_streams"):
            await anext(watches[1])
        with pytest.raises(grpc.aio.AioRpcError, match=r"nothing was read for 3 s: resume") as caught:
            await read_out(unread.pop())
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        for call in unread:
            call.cancel()
        await watches[0].aclose()
        without = await measure_until(server, report, "_ServicerContext", at_most=UNREAD // 100)
    each = (holds["malloc_bytes"] - without["malloc_bytes"]) / UNREAD
    assert MAX_FRAME_BYTES < each < 2.02 * MAX_FRAME_BYTES, f"{each / 2**20:.2f} MiB"


async def measure_until(server: ServedProcess, report: Path, kind: str, at_most: int) -> dict[str, Any]:
    """What a process holds once there are no more objects of a type."""
    while True:
        holds = await measure(server, report)
        if holds["objects"].get(kind, 0) <= at_most:
            return holds


async def read_to_the_end(client: SchedulerClient, submission_id: str, tasks: int) -> None:
    async for frame in client.watch(submission_id=submission_id):
        tasks -= sum(isinstance(record.event, TaskDone) for record in frame.records)
        if not tasks:
            return


async def read_out(call: Any) -> None:
    """Raises the status that it ends with."""
    while await call.read() is not grpc.aio.EOF:
        pass


async def test_a_client_that_is_killed_frees_its_streams_within_a_second(tmp_path: Path) -> None:
    async with (
        served_process(config_of(tmp_path, "max_streams = 50")) as server,
        holding(server.address, 50) as client,
        SchedulerClient(server.address) as other,
    ):
        with pytest.raises(ResourceExhaustedError):
            await anext(other.watch())
        client.send_signal(signal.SIGKILL)
        await client.wait()
        await eventually(lambda: may_watch(other), pause_seconds=0.02, within_seconds=1.0)


async def may_watch(client: SchedulerClient) -> bool:
    """Whether another watch is not one too many."""
    try:
        await anext(client.watch())
    except ResourceExhaustedError:
        return False
    return True


async def test_a_result_of_60_mb_does_not_delay_health(tmp_path: Path) -> None:
    """Near the limit of a message. The reader is another process, so that its own work is not measured."""
    tokens = 6_600_000
    reader_code = (
        "import asyncio, sys\n"
        "from py_scheduler.client import SchedulerClient\n"
        "async def main():\n"
        "    async with SchedulerClient(sys.argv[1]) as client:\n"
        "        async for frame in client.watch(submission_id=sys.argv[2]):\n"
        "            if any(type(record.event).__name__ == 'TaskDone' for record in frame.records):\n"
        "                return\n"
        "asyncio.run(main())\n"
    )
    async with served_process(config_of(tmp_path)) as server, grpc.aio.insecure_channel(server.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        async with SchedulerClient(server.address) as client:
            submission = await client.submit([Task(config=TaskConfig(task_type="large"), prompt=str(tokens))], 7)
            watch = client.watch(submission_id=submission.submission_id)
            async for frame in watch:
                ended = [record.event for record in frame.records if isinstance(record.event, AttemptEnded)]
                if ended:
                    assert len(ended[0].samples[0].trajectory) == tokens
                    break
            await watch.aclose()
        seconds: list[float] = []
        for _ in range(3):
            reader = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-c", reader_code, server.address, submission.submission_id),
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
            )
            reading = asyncio.create_task(reader.wait())
            while not reading.done():
                begun = time.monotonic()
                await health.Check(health_pb2.HealthCheckRequest())
                seconds.append(time.monotonic() - begun)
                await asyncio.sleep(0.002)
            assert reading.result() == 0
    seconds.sort()
    assert len(seconds) > 200
    p99 = seconds[int(len(seconds) * 0.99)]
    assert p99 < 0.1, f"p99 {p99 * 1e3:.0f} ms, at most {seconds[-1] * 1e3:.0f} ms"


async def test_a_silent_watch_survives_keepalives(tmp_path: Path) -> None:
    """Ten minutes of the default settings, two hundred times as fast: a ping after each 0.3 s of silence, for 3 s."""
    async with (
        served_process(config_of(tmp_path, "keepalive_seconds = 0.3")) as server,
        SchedulerClient(server.address, reconnect_seconds=0.0) as client,
    ):
        watch = client.watch()
        await anext(watch)
        reading = asyncio.create_task(anext(watch))
        done, _ = await asyncio.wait([reading], timeout=3.0)
        assert not done, "nothing happens, and nobody ends it"
        submission = await client.submit([Task(config=TaskConfig(task_type="large"), prompt="1")], 7)
        frame = await reading
        assert frame.records[0].event.submission_id == submission.submission_id


async def test_a_handler_that_blocks_the_loop_is_named_and_health_says_so(tmp_path: Path) -> None:
    config = config_of(tmp_path, "loop_blocked_seconds = 0.5")
    async with (
        served_process(config) as server,
        asyncio.timeout(60),
        SchedulerClient(server.address) as client,
        grpc.aio.insecure_channel(server.address) as channel,
    ):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        await client.submit([Task(config=TaskConfig(task_type="napping"), prompt="2.0")], 7)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()
    log = config.with_suffix(".log").read_text()
    assert "the event loop stands still since" in log
    assert "in handler Napping.run (" in log
    assert "of evaluator 'napping'" in log
