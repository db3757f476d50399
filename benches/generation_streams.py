"""What a thousand streams cost a server, and how late its loop is meanwhile.

    python -m benches.generation_streams [--streams 1000] [--tokens-per-second 50] [--seconds 60] [--interval 64]

A scripted SGLang in a process of its own streams as many generations at once, in increments, to a server process with
its journal on. One sample of another handler watches the server's loop. Beside it an idle loop in a process of its own
is watched in the same way at the same time, for what the machine does to any process.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import msgspec
import uvloop

from benches._generating_agents import loop_lag
from benches._generating_server import GeneratingServer, generating_server
from benches._paced_sglang import Pace
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import Delivery
from py_scheduler.domain.task import Task, TaskConfig

GOAL_P99_MS = 20.0
GOAL_CORES = 0.5
SETTLE_SECONDS = 3.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Lags in ms by quantile; cores: of the server's processor time, by what it was used for a second."""

    streams: int
    tokens_per_second: float
    """Of one stream."""
    interval: int
    seconds: float
    cores: float
    lag: dict[str, float]
    idle_lag: dict[str, float]


def watch_idle(seconds: float) -> dict[str, float]:
    """In a process of its own, with the loop that a server has."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(loop_lag(seconds))


async def lag_of(server: GeneratingServer, seconds: float) -> dict[str, float]:
    task = Task(config=TaskConfig(task_type="lag"), prompt=str(seconds))
    submission = await server.client.submit([task], batch_id=1)
    async for frame in server.client.watch(submission_id=submission.submission_id):
        for record in frame.records:
            if isinstance(record.event, AttemptEnded):
                return dict(record.event.samples[0].metrics)
            assert not isinstance(record.event, TaskDone)
    raise AssertionError("the watch has ended")


async def measure(options: argparse.Namespace) -> Report:
    # All of them run longer than they are watched, and none ends meanwhile.
    tokens = int(options.tokens_per_second * (options.seconds + 4 * SETTLE_SECONDS))
    pace = Pace(
        tokens_per_second=options.tokens_per_second,
        apart_seconds=options.apart_seconds or options.interval / options.tokens_per_second,
        increments=True,
        holds_ends=True,
    )
    backend = f"stream_interval = {options.interval}"
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as idle:
        async with generating_server(pace, journal=True, backend=backend, samples=options.streams) as server:
            submission_id = await server.submit(options.streams, tokens, 0, Delivery.WATCH)
            await server.until_running(submission_id, options.streams)
            await asyncio.sleep(SETTLE_SECONDS)
            beside = asyncio.get_running_loop().run_in_executor(idle, watch_idle, options.seconds)
            begun, cpu = time.monotonic(), server.process.cpu_seconds()
            lag = await lag_of(server, options.seconds)
            cores = (server.process.cpu_seconds() - cpu) / (time.monotonic() - begun)
            idle_lag = await beside
            await server.until_held(options.streams)
            await server.ask_engine("release")
            await server.until_done(submission_id)
    return Report(
        streams=options.streams,
        tokens_per_second=options.tokens_per_second,
        interval=options.interval,
        seconds=options.seconds,
        cores=cores,
        lag=lag,
        idle_lag=idle_lag,
    )


def show(report: Report) -> None:
    late = "reached" if report.lag["p99"] <= GOAL_P99_MS else "not reached"
    busy = "reached" if report.cores <= GOAL_CORES else "not reached"
    print(
        f"{report.streams} streams of {report.tokens_per_second:g} tokens/s in increments of {report.interval}, "
        f"watched for {report.seconds:g} s, the journal on\n"
        f"  {report.cores:.3f} cores (goal {GOAL_CORES:g}: {busy})\n"
        f"  the loop is late by {said(report.lag)} (p99 at most {GOAL_P99_MS:g} ms: {late})\n"
        f"    of it by its own work {said(report.lag, 'own ')}\n"
        f"  an idle loop beside it by {said(report.idle_lag)}"
    )


def said(lag: dict[str, float], what: str = "") -> str:
    return ", ".join(f"{name} {lag[what + name]:.1f}" for name in ("p50", "p90", "p99", "p99.9", "p100")) + " ms"


def main() -> None:
    parser = argparse.ArgumentParser(description="A thousand streams at one server.")
    parser.add_argument("--streams", type=int, default=1_000)
    parser.add_argument("--tokens-per-second", type=float, default=50.0, help="of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--interval", type=int, default=64, help="tokens of an increment (default %(default)s)")
    parser.add_argument("--apart-seconds", type=float, default=0.0, help="0: the time of one increment")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    report = asyncio.run(measure(options))
    show(report)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
