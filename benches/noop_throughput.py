"""What the scheduler itself costs: no-op tasks between a client process and a server process.

    python -m benches.noop_throughput [--tasks 100000] [--journal on|off|both] [--json out.json] [--profile out.prof]

Prints tasks per second, the server's CPU time per task, and how many times longer it took than bare grpc.aio moving the
same frames in the same run. With `--journal both` it does so twice, one after the other, for the price of the journal,
whose files are in a temporary folder on whatever disk that is. The result is asserted before anything is reported:
every task has one TaskDone, SUCCEEDED, of an id of its own, and one solved sample.

To see where the time goes: `--profile out.prof` runs the server under cProfile (several times slower; read it with
`python -m pstats out.prof`); py-spy on the server, whose pid is printed, disturbs it little.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import msgspec

from benches._grpc_echo import Traffic, echo_seconds
from benches._server_process import server_process
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc
from py_scheduler.client import SchedulerClient
from py_scheduler.client.submissions import Rollouts, Submissions
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import Outcome, SampleDone, TaskState
from py_scheduler.domain.task import Task, TaskConfig

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from py_scheduler.client import RolloutEvent
    from py_scheduler.client.connection import Connection
    from py_scheduler.domain.requests import WatchedFrame
    from py_scheduler.wire.tasks import SubmitChunk

HERE = Path(__file__).parent
GOAL_TASKS_PER_SECOND = 25_000
WARM_UP_TASKS = 2_000
ECHO_RUNS = 3


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """One run. echo_ratio: elapsed seconds over those of the best bare echo of the same frames."""

    journal: bool
    tasks: int
    elapsed_seconds: float
    tasks_per_second: float
    server_cpu_us_per_task: float
    client_cpu_us_per_task: float
    first_event_seconds: float
    submit_calls: int
    stream_frames: int
    bytes_sent: int
    bytes_received: int
    echo_seconds: float
    echo_ratio: float
    profiled: bool


class MeasuredSubmissions(Submissions):
    """Notes the sizes of what it sends and receives: submits in bytes, stream frames in events."""

    def __init__(self, connection: Connection) -> None:
        super().__init__(connection)
        self.submits: list[tuple[int, int]] = []
        self.frames: list[int] = []

    async def submit_chunk(self, chunk: SubmitChunk) -> service.SubmitTasksResponse:
        reply = await super().submit_chunk(chunk)
        self.submits.append((chunk.request.ByteSize(), reply.ByteSize()))
        return reply

    async def watch(self, *asked: Any, **options: Any) -> AsyncGenerator[WatchedFrame, None]:
        async for frame in super().watch(*asked, **options):
            self.frames.append(len(frame.records))
            yield frame


class MeasuredClient(SchedulerClient):
    """A client whose rollouts are measured."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self.measured = MeasuredSubmissions(self._connection)
        self._rollouts = Rollouts(self.measured)


class Rollout(msgspec.Struct, frozen=True):
    """What one rollout brought, as it came, and when."""

    batches: list[list[RolloutEvent]]
    elapsed_seconds: float
    first_event_seconds: float


async def roll_out(client: SchedulerClient, count: int, batch_id: int) -> Rollout:
    """The tasks are made beforehand, as a trainer has them; sending them is part of the time."""
    config = TaskConfig(task_type="noop")
    tasks = [Task(config=config, client_key=str(number)) for number in range(count)]
    batches = []
    first = 0.0
    started = time.perf_counter()
    async for batch in client.rollout_batches(tasks, batch_id=batch_id):
        first = first or time.perf_counter() - started
        batches.append(batch)
    return Rollout(batches, time.perf_counter() - started, first)


def check(rollout: Rollout, count: int) -> None:
    """Raises AssertionError unless every task ended once, and well."""
    events = [event for batch in rollout.batches for event in batch]
    done = [event for event in events if isinstance(event, TaskDone)]
    samples = [event for event in events if isinstance(event, SampleDone)]
    assert len(done) == count, f"{len(done)} TaskDone for {count} tasks"
    assert Counter(event.state for event in done) == {TaskState.SUCCEEDED: count}
    assert len({event.task_id for event in done}) == count
    assert {event.client_key for event in done} == {str(number) for number in range(count)}
    assert {event.task_id for event in samples} == {event.task_id for event in done}
    assert Counter(sample.outcome for sample in samples) == {Outcome.SOLVED: count}


async def mean_event_bytes(address: str) -> float:
    """Bytes of a frame per event, over the first frames that the server still has."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
        kinds = [service.EVENT_KIND_ATTEMPT_ENDED, service.EVENT_KIND_TASK_DONE]
        call = stub.WatchEvents(service.WatchEventsRequest(filter=service.EventFilter(kinds=kinds)))
        size = events = 0
        async for message in call:
            size += message.ByteSize()
            events += len(message.events)
            if events >= WARM_UP_TASKS:
                break
        call.cancel()
    return size / events


async def measure(count: int, profile: Path | None, *, journal: bool) -> Report:
    with tempfile.TemporaryDirectory() as state_dir:
        return await _measure(count, profile, ["--state-dir", state_dir] if journal else ["--no-journal"])


async def _measure(count: int, profile: Path | None, journal: list[str]) -> Report:
    profiler = ["-m", "cProfile", "-o", str(profile)] if profile else []
    serve = [*profiler, "-m", "py_scheduler.cli", "serve", "--config", str(HERE / "noop.toml"), *journal]
    async with server_process(serve) as server, MeasuredClient(server.address) as client:
        print(f"server: pid {server.pid}, {server.address}")
        check(await roll_out(client, WARM_UP_TASKS, batch_id=0), WARM_UP_TASKS)
        event_bytes = await mean_event_bytes(server.address)
        client.measured.submits.clear()
        client.measured.frames.clear()
        server_cpu, client_cpu = server.cpu_seconds(), time.process_time()
        rollout = await roll_out(client, count, batch_id=1)
        server_cpu, client_cpu = server.cpu_seconds() - server_cpu, time.process_time() - client_cpu
        check(rollout, count)
        traffic = Traffic(client.measured.submits, [round(event_bytes * events) for events in client.measured.frames])
    async with server_process([str(HERE / "_grpc_echo.py")]) as echo:
        echo_best = min([await echo_seconds(echo.address, traffic) for _ in range(ECHO_RUNS)])
    return Report(
        journal="--no-journal" not in journal,
        tasks=count,
        elapsed_seconds=rollout.elapsed_seconds,
        tasks_per_second=count / rollout.elapsed_seconds,
        server_cpu_us_per_task=server_cpu / count * 1e6,
        client_cpu_us_per_task=client_cpu / count * 1e6,
        first_event_seconds=rollout.first_event_seconds,
        submit_calls=len(traffic.submits),
        stream_frames=len(traffic.watch),
        bytes_sent=sum(sent for sent, _ in traffic.submits),
        bytes_received=sum(received for _, received in traffic.submits) + sum(traffic.watch),
        echo_seconds=echo_best,
        echo_ratio=rollout.elapsed_seconds / echo_best,
        profiled=profile is not None,
    )


def show(report: Report) -> None:
    reached = "reached" if report.tasks_per_second >= GOAL_TASKS_PER_SECOND else "not reached"
    print(
        f"{report.tasks} no-op tasks, all succeeded, in {report.elapsed_seconds:.2f} s, "
        f"the journal {'on' if report.journal else 'off'}\n"
        f"  {report.tasks_per_second:,.0f} tasks/s (goal {GOAL_TASKS_PER_SECOND:,}: {reached})\n"
        f"  CPU a task: server {report.server_cpu_us_per_task:.1f} µs, client {report.client_cpu_us_per_task:.1f} µs\n"
        f"  first event after {1e3 * report.first_event_seconds:.0f} ms\n"
        f"  {report.submit_calls} submits, {report.stream_frames} stream frames, "
        f"{report.bytes_sent / 2**20:.1f} MiB out, {report.bytes_received / 2**20:.1f} MiB in\n"
        f"  bare grpc.aio moves the same frames in {report.echo_seconds:.3f} s: ratio {report.echo_ratio:.1f}"
        + ("\n  the server ran under cProfile: these figures are not its own" if report.profiled else "")
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="No-op tasks between a client and a server process.")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--journal", choices=("on", "off", "both"), default="on", help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the report there as well")
    parser.add_argument("--profile", type=Path, help="run the server under cProfile and write its figures there")
    options = parser.parse_args()
    reports = []
    for journal in {"on": (True,), "off": (False,), "both": (False, True)}[options.journal]:
        reports.append(asyncio.run(measure(options.tasks, options.profile, journal=journal)))
        show(reports[-1])
    if options.json:
        said = reports if options.journal == "both" else reports[0]
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(said)) + b"\n")


if __name__ == "__main__":
    main()
