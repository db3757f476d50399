"""Where a task's processor time goes: no-op tasks through the engine of a server, in this process and without gRPC.

    python -m benches.task_cost [--rounds 60] [--journal on|off|both] [--by part|function] [--count]

Each round submits TASKS tasks as they come from the wire and encodes every frame that a trainer would be sent. Printed
are the least and the median processor time of a task over all rounds: of the event loop's thread, and of all threads.
The least is what another process on the machine disturbs least. Then the same time by part: the loop is interrupted
after every millisecond of processor time and whatever Python code it is in, or has called, is charged.

`--count` counts Python calls and bytecodes instead, which nothing disturbs: for comparing two versions.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.app.building import build
from py_scheduler.config import load_config
from py_scheduler.domain.requests import EventFilter, EventKind
from py_scheduler.wire import requests as wire
from py_scheduler.wire.common.cursor import CursorCodec
from py_scheduler.wire.events import encode_frames

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

    from py_scheduler.scheduler.engine import Engine

HERE = Path(__file__).parent
PACKAGE = HERE.parent / "py_scheduler"
TASKS = 2_000
COUNTED_TASKS = 2_000
WARM_UP_ROUNDS = 3
KINDS = frozenset({EventKind.ATTEMPT_ENDED, EventKind.TASK_DONE})
"""What a trainer watches."""
SAMPLE_SECONDS = 0.001


class Cost(msgspec.Struct):
    """Of one round, in µs a task."""

    loop: float
    all_threads: float


def request_of(number: int) -> service.SubmitTasksRequest:
    request = service.SubmitTasksRequest(request_id=f"r{number}", default_config=task_pb2.TaskConfig(task_type="noop"))
    request.batch_id.step = number
    for task in range(TASKS):
        request.tasks.add(client_key=str(task))
    return request


class Bench:
    """An engine with one trainer that watches it."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._rounds = 0
        self._done = asyncio.Event()

    async def watch(self) -> None:
        """Encodes as a server does."""
        event_filter = EventFilter(kinds=KINDS)
        cursors = CursorCodec(self.engine.store_epoch, event_filter, self.engine.oldest_sequence)
        events = 0
        async for frame in self.engine.watch(event_filter, None):
            for _ in encode_frames(frame, cursors):
                await asyncio.sleep(0)
            events += len(frame.records)
            if events >= len(KINDS) * TASKS:
                assert events == len(KINDS) * TASKS
                events = 0
                self._done.set()

    async def round(self) -> Cost:
        """TASKS tasks, from their submit to the last event."""
        self._rounds += 1
        request = request_of(self._rounds)
        self._done.clear()
        loop, everything = time.thread_time(), time.process_time()
        submit = wire.decode_submit_request(request, TASKS)
        reply = await self.engine.submit(submit)
        wire.encode_submit_reply(reply, submit.key.namespace, self.engine.store_epoch).SerializeToString()
        await self._done.wait()
        loop, everything = time.thread_time() - loop, time.process_time() - everything
        return Cost(loop / TASKS * 1e6, everything / TASKS * 1e6)


class Samples:
    """Which code the loop was in, a millisecond of processor time after another."""

    def __init__(self, by: str) -> None:
        self.places: Counter[str] = Counter()
        self._by = by

    def take(self, _number: int, frame: FrameType | None) -> None:
        while frame is not None and not frame.f_code.co_filename.startswith(str(PACKAGE)):
            frame = frame.f_back
        if frame is None:
            self.places["the event loop itself"] += 1
        else:
            self.places[place_of(frame, self._by)] += 1


def place_of(frame: FrameType, by: str) -> str:
    path = Path(frame.f_code.co_filename).relative_to(PACKAGE).with_suffix("")
    return f"{path}:{frame.f_code.co_qualname}" if by == "function" else str(path)


@contextmanager
def sampled(samples: Samples) -> Iterator[None]:
    before = signal.signal(signal.SIGPROF, samples.take)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_SECONDS, SAMPLE_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


class Counts:
    """Calls and bytecodes, by place."""

    def __init__(self, by: str) -> None:
        self.calls: Counter[str] = Counter()
        self.bytecodes: Counter[str] = Counter()
        self._by = by

    def trace(self, frame: FrameType, event: str, _argument: object) -> Any:
        if event != "call" or not frame.f_code.co_filename.startswith(str(PACKAGE)):
            return None
        place = place_of(frame, self._by)
        self.calls[place] += 1
        frame.f_trace_opcodes, frame.f_trace_lines = True, False

        def local(_frame: FrameType, event: str, _argument: object) -> Any:
            if event == "opcode":
                self.bytecodes[place] += 1
            return local

        return local


@contextmanager
def counted(counts: Counts) -> Iterator[None]:
    sys.settrace(counts.trace)
    try:
        yield
    finally:
        sys.settrace(None)


async def measure(options: argparse.Namespace, *, journal: bool) -> None:
    with tempfile.TemporaryDirectory() as folder:
        parts = build(load_config(HERE / "noop.toml"), HERE, Path(folder) if journal else None)
        async with parts.scheduler as engine:
            bench = Bench(engine)
            watching = asyncio.create_task(bench.watch())
            for _ in range(WARM_UP_ROUNDS):
                await bench.round()
            gc.freeze()
            print(f"the journal {'on' if journal else 'off'}")
            if options.count:
                counts = Counts(options.by)
                with counted(counts):
                    await bench.round()
                show_counts(counts)
            else:
                await timed(bench, options)
            watching.cancel()
            await asyncio.wait([watching])


async def timed(bench: Bench, options: argparse.Namespace) -> None:
    costs = [await bench.round() for _ in range(options.rounds)]
    for name in Cost.__struct_fields__:
        taken = [getattr(cost, name) for cost in costs]
        print(f"  {name.replace('_', ' '):12} {min(taken):6.1f} µs a task, median {statistics.median(taken):.1f}")
    least = min(cost.loop for cost in costs)
    samples = Samples(options.by)
    with sampled(samples):
        for _ in range(options.rounds):
            await bench.round()
    for place, count in samples.places.most_common(options.lines):
        share = count / samples.places.total()
        print(f"  {share * least:6.2f} µs {share:6.1%}  {place}")


def show_counts(counts: Counts) -> None:
    total, calls = counts.bytecodes.total(), counts.calls.total()
    print(f"  {total / TASKS:.0f} bytecodes in {calls / TASKS:.1f} Python calls a task")
    for place, bytecodes in counts.bytecodes.most_common(40):
        print(f"  {bytecodes / TASKS:8.1f} {bytecodes / total:6.1%} {counts.calls[place] / TASKS:7.2f} calls  {place}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Where a task's processor time goes.")
    parser.add_argument("--rounds", type=int, default=60, help=f"of {TASKS} tasks each; default: %(default)s")
    parser.add_argument("--journal", choices=("on", "off", "both"), default="off", help="default: %(default)s")
    parser.add_argument("--by", choices=("part", "function"), default="part", help="default: %(default)s")
    parser.add_argument("--lines", type=int, default=40, help="of each table; default: %(default)s")
    parser.add_argument("--count", action="store_true", help="calls and bytecodes instead of time")
    options = parser.parse_args()
    for journal in {"on": (True,), "off": (False,), "both": (False, True)}[options.journal]:
        asyncio.run(measure(options, journal=journal))


if __name__ == "__main__":
    main()
