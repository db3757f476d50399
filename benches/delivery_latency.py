"""How long an event is under way from the server to a watcher, beside a bare grpc.aio stream in the same run.

    python benches/delivery_latency.py [--events 5000] [--rate 100] [--wait-ms 2] [--journal on|off] [--json out.json]

Two servers at once: the service, and bare grpc.aio that streams messages of the same size. In turn a task is submitted
and its event awaited, and the bare server is asked for a message and that awaited; so one thing is under way at a time,
and both meet the same machine. What is printed, each as p50 and p99, by the clock that all processes share:

    delivery      from the commit of the event (with a journal: in its thread) until the client's iterator has yielded
                  it, beside the bare stream: from the write until the client has read it. These have the goal: p50
                  within 1.25 times and p99 within 1.5 times.
    from its end  the same, from the end of the handler: with its report, the ledger and the commit. Stricter than
                  the goal, and what this benchmark called delivery before.
    commit        from the journal's `append` until it is done, beside a write and fdatasync of as many bytes to the
                  same disk; in turn with the others.
    end to end    from `submit` until the event, less the handler's waiting.
    hand-overs    where the time of delivery went.

The handler waits before it ends, and the bare server before it writes, so that the answer of the call that asked is not
under way at the same time; `--wait-ms 0` puts the two on one another. Where the machine has other work, `chrt -r 1`
before the command keeps that from coming between.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from bisect import bisect_left
from contextlib import AsyncExitStack, aclosing
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import msgspec

from benches._grpc_echo import HEAR, SAY, Saying, stamp_of
from benches._server_process import server_process
from benches._stamped_server import Stamps
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc
from py_scheduler.client import SchedulerClient
from py_scheduler.client.connection import Connection
from py_scheduler.client.submissions import Submissions
from py_scheduler.domain.events import AttemptEnded
from py_scheduler.domain.requests import EventKind
from py_scheduler.domain.task import Task, TaskConfig

if TYPE_CHECKING:
    from collections.abc import Iterable
    from io import FileIO

HERE = Path(__file__).parent
GOAL_P50, GOAL_P99 = 1.25, 1.5
WARM_UP = 100
CONFIG = """
[server]
listen = "127.0.0.1:0"
log_level = "warning"
[journal]
state_dir = "{state_dir}"
[[evaluator]]
evaluator_id = "stamp"
handler = "benches.noop_agent:StampingAgent"
handler_args = {{ wait_seconds = {wait_seconds} }}
resource = {{ concurrency = 64 }}
"""


class Latency(msgspec.Struct, frozen=True):
    """Microseconds, of one way."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> Latency:
        ordered = sorted(seconds)
        return cls(1e6 * ordered[len(ordered) // 2], 1e6 * ordered[int(len(ordered) * 0.99)])


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """hand_overs: from the commit on, each since the one before."""

    journal: bool
    events: int
    rate: float
    wait_ms: float
    frame_bytes: int
    commit_bytes: int
    delivery: Latency
    bare: Latency
    from_its_end: Latency
    commit: Latency
    bare_commit: Latency
    end_to_end: Latency
    hand_overs: dict[str, Latency]


class Heard(msgspec.Struct):
    """One event as the client saw it. received: when its frame had been read, not yet decoded."""

    sequence: int
    ended: float
    received: float
    yielded: float
    submitted: float = 0.0


class _Connection(Connection):
    """Notes when it has read a frame."""

    received = 0.0

    async def read(self, call: Any) -> Any:
        message = await super().read(call)
        self.received = time.monotonic()
        return message


class _Client(SchedulerClient):
    """A client whose watches are measured."""

    def __init__(self, target: str) -> None:
        super().__init__(target)
        self._connection = self.measured = _Connection(target)
        self._submissions = Submissions(self.measured)


# The measurement


class _Measurement:
    """One run. Whatever it asks for it awaits before it asks for more."""

    def __init__(self, client: _Client, bare: grpc.aio.Channel, disk: FileIO | None, wait_ms: float) -> None:
        self._client = client
        self._say: Any = bare.unary_unary(SAY)
        hear: Any = bare.unary_stream(HEAR)
        self._messages: Any = hear(b"")
        self._disk = disk
        self._wait_seconds = wait_ms / 1e3
        self.frame_bytes = self.commit_bytes = 100
        self.forget()

    def forget(self) -> None:
        """What was measured until now."""
        self.heard: list[Heard] = []
        self.bare: list[float] = []
        self.bare_commits: list[float] = []

    async def run(self, count: int, rate: float) -> None:
        frames = self._client.watch(kinds=[EventKind.ATTEMPT_ENDED])
        async with aclosing(frames):
            await anext(frames)  # With all that there was before.
            begun = time.monotonic()
            for number in range(count):
                await self._one_event(frames, number)
                await self._one_message()
                self._one_commit()
                await asyncio.sleep(max(0.0, begun + (number + 1) / rate - time.monotonic()))

    async def _one_event(self, frames: Any, number: int) -> None:
        arrival = asyncio.ensure_future(self._arrival(frames))
        submitted = time.monotonic()
        await self._client.submit([Task(config=TaskConfig(task_type="stamp"))], number)
        heard = await arrival
        heard.submitted = submitted
        self.heard.append(heard)

    async def _arrival(self, frames: Any) -> Heard:
        async for frame in frames:
            now = time.monotonic()
            for record in frame.records:
                assert isinstance(record.event, AttemptEnded)
                (sample,) = record.event.samples
                assert sample.reward is not None
                return Heard(record.sequence, sample.reward.score, self._client.measured.received, now)
        raise AssertionError("the stream ended")

    async def _one_message(self) -> None:
        arrival = asyncio.ensure_future(self._message())
        await self._say(msgspec.json.encode(Saying(self.frame_bytes, self._wait_seconds)))
        self.bare.append(await arrival)

    async def _message(self) -> float:
        message = await self._messages.read()
        return time.monotonic() - stamp_of(message)

    def _one_commit(self) -> None:
        if self._disk is not None:
            content = bytes(self.commit_bytes)
            begun = time.monotonic()
            self._disk.write(content)
            os.fdatasync(self._disk.fileno())
            self.bare_commits.append(time.monotonic() - begun)


async def _frame_bytes(channel: grpc.aio.Channel) -> int:
    """Of a frame with one event, as it is on the wire."""
    stub = scheduler_service_pb2_grpc.SchedulerServiceStub(channel)
    kinds = [service.EVENT_KIND_ATTEMPT_ENDED]
    call = stub.WatchEvents(service.WatchEventsRequest(filter=service.EventFilter(kinds=kinds)))
    async for message in call:
        if message.events:
            call.cancel()
            return int((message.ByteSize() - len(message.cursor)) / len(message.events) + len(message.cursor))
    raise AssertionError("the stream ended")


def _written_bytes(pid: int) -> int:
    """What a process has written to disks so far, in whole pages."""
    lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("write_bytes"))


async def measure(events: int, rate: float, wait_ms: float, *, journal: bool) -> Report:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, stamps_file = folder / "scheduler.toml", folder / "stamps.json"
        config.write_text(CONFIG.format(state_dir=folder / "state", wait_seconds=wait_ms / 1e3))
        serve = [str(HERE / "_stamped_server.py"), str(stamps_file), "serve", "--config", str(config)]
        async with (
            asyncio.timeout(120 + 4 * events / rate),
            server_process(serve if journal else [*serve, "--no-journal"]) as server,
            server_process([str(HERE / "_grpc_echo.py")]) as echo,
            _Client(server.address) as client,
            grpc.aio.insecure_channel(server.address) as channel,
            grpc.aio.insecure_channel(echo.address) as bare,
            AsyncExitStack() as stack,
        ):
            print(f"server: pid {server.pid}, {server.address}")
            written = _written_bytes(server.pid)
            disk = stack.enter_context((folder / "bare").open("wb", buffering=0)) if journal else None
            run = _Measurement(client, bare, disk, wait_ms)
            await run.run(WARM_UP, rate)
            run.forget()
            run.frame_bytes = await _frame_bytes(channel)
            # That a task was taken, and how it ended; at once, if it does not wait.
            commits = WARM_UP * (2 if wait_ms else 1)
            run.commit_bytes = (_written_bytes(server.pid) - written) // commits
            await run.run(events, rate)
        stamps = msgspec.json.decode(stamps_file.read_bytes(), type=Stamps)
    return _report(run, stamps, journal=journal, rate=rate, wait_ms=wait_ms)


def _report(run: _Measurement, stamps: Stamps, *, journal: bool, rate: float, wait_ms: float) -> Report:
    assert len(stamps.committed) == len(stamps.published), "each commit was told once"
    ways = [_way(heard, stamps) for heard in run.heard]
    names = list(ways[0])
    delivered = [heard.yielded - way["commit"] for heard, way in zip(run.heard, ways, strict=True)]
    return Report(
        journal=journal,
        events=len(run.heard),
        rate=rate,
        wait_ms=wait_ms,
        frame_bytes=run.frame_bytes,
        commit_bytes=run.commit_bytes,
        delivery=Latency.of(delivered),
        bare=Latency.of(run.bare),
        from_its_end=Latency.of(heard.yielded - heard.ended for heard in run.heard),
        commit=Latency.of(way["commit"] - way["append"] for way in ways),
        bare_commit=Latency.of(run.bare_commits or [0.0]),
        end_to_end=Latency.of(heard.yielded - heard.submitted - wait_ms / 1e3 for heard in run.heard),
        hand_overs={
            f"{before} → {name}": Latency.of(way[name] - way[before] for way in ways)
            for before, name in pairwise(names[1:])
        },
    )


def _way(heard: Heard, stamps: Stamps) -> dict[str, float]:
    """When an event was where."""
    appended = stamps.appended[bisect_left(stamps.appended, (heard.sequence, 0.0))][1]
    index = bisect_left(stamps.published, (heard.sequence, 0.0))
    published = stamps.published[index][1]
    return {
        "append": appended,
        "commit": stamps.committed[index],
        "publish": published,
        "wake": stamps.read[bisect_left(stamps.read, published)],
        "write": stamps.written[bisect_left(stamps.written, published)],
        "read": heard.received,
        "yield": heard.yielded,
    }


def show(report: Report) -> None:
    p50, p99 = report.delivery.p50 / report.bare.p50, report.delivery.p99 / report.bare.p99
    goals = f"{p50:.2f} and {p99:.2f} times the bare stream (goal {GOAL_P50} and {GOAL_P99}: " + (
        "reached)" if p50 <= GOAL_P50 and p99 <= GOAL_P99 else "not reached)"
    )
    end50, end99 = report.from_its_end.p50 / report.bare.p50, report.from_its_end.p99 / report.bare.p99
    print(
        f"{report.events} events of {report.frame_bytes} bytes, at most {report.rate:g} a second, "
        f"the journal {'on' if report.journal else 'off'}; µs, p50 and p99"
    )
    _line("bare stream", report.bare)
    _line("delivery", report.delivery, goals)
    _line("from its end", report.from_its_end, f"{end50:.2f} and {end99:.2f} times the bare stream")
    if report.journal:
        _line("commit", report.commit)
        _line("bare commit", report.bare_commit, f"write and fdatasync of {report.commit_bytes} bytes")
    _line("end to end", report.end_to_end)
    for name, latency in report.hand_overs.items():
        _line(f"  {name}", latency)


def _line(name: str, latency: Latency, remark: str = "") -> None:
    print(f"  {name:<20}{latency.p50:8.0f}{latency.p99:9.0f}  {remark}".rstrip())


def main() -> None:
    parser = argparse.ArgumentParser(description="From an event to its watcher, beside a bare stream.")
    parser.add_argument("--events", type=int, default=5_000)
    parser.add_argument("--rate", type=float, default=100.0, help="events a second at most; default: %(default)s")
    parser.add_argument("--wait-ms", type=float, default=2.0, help="before a handler ends; default: %(default)s")
    parser.add_argument("--journal", choices=("on", "off", "both"), default="both", help="default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the reports there as well")
    options = parser.parse_args()
    reports = []
    for journal in {"on": (True,), "off": (False,), "both": (False, True)}[options.journal]:
        reports.append(asyncio.run(measure(options.events, options.rate, options.wait_ms, journal=journal)))
        show(reports[-1])
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")


if __name__ == "__main__":
    main()
