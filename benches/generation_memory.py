"""What a server holds of a thousand long generations: in flight, finished and not yet read, read.

    python -m benches.generation_memory [--samples 1000] [--tokens 32768] [--streaming increments cumulative plain]
        [--no-journal] [--collect] [--rounds 2]

A scripted SGLang in a process of its own streams all of them at once and keeps back the last event of each, so that
everything else is in flight together; then it lets them end within half a minute. Nobody reads until all are done. Then
one client reads all and acknowledges it. What is told is the server's resident size over what it was before the first
generation, and the largest since the step before, which tells what a step takes on its way. The second round tells what
the allocator keeps: it takes no more than the first did.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benches._generating_server import SAMPLES, GeneratingServer, generating_server
from benches._paced_sglang import Pace
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import Delivery
from py_scheduler.domain.task import Task, TaskConfig

if TYPE_CHECKING:
    from benches._server_process import ServerProcess

WARM_UP = 8
"""Samples, of 64 tokens."""


STEADY_MIB, STEADY_SECONDS = 2.0, 3.0


class Step(msgspec.Struct, frozen=True, kw_only=True):
    """mib: resident over what the server was at first; peak_mib: the most since the step before."""

    round_no: int
    name: str
    mib: float
    peak_mib: float
    seconds: float


class Memory:
    """Of a process, in MiB over what it is now. tokens: of all generations of a round."""

    def __init__(self, process: ServerProcess, tokens: int) -> None:
        self._process = process
        self._tokens = tokens
        self._before = process.resident_bytes()
        self._since = time.monotonic()
        self.steps: list[Step] = []

    def _mib(self, which: str) -> float:
        return (self._process.resident_bytes(which) - self._before) / 2**20

    async def until_steady(self) -> None:
        """The journal has written what it was given, and the allocator gives nothing back any more."""
        before, now = float("inf"), self._mib("VmRSS")
        while abs(now - before) > STEADY_MIB:
            await asyncio.sleep(STEADY_SECONDS)
            before, now = now, self._mib("VmRSS")

    def note(self, round_no: int, name: str) -> None:
        now = time.monotonic()
        self.steps.append(
            Step(
                round_no=round_no,
                name=name,
                mib=self._mib("VmRSS"),
                peak_mib=self._mib("VmHWM"),
                seconds=now - self._since,
            )
        )
        self._since = now
        self._process.forget_peak()
        show(self.steps[-1], self._tokens)


async def watched(server: GeneratingServer, submission_id: str, samples: int, tokens: int) -> None:
    """Reads every sample's tokens, and acknowledges."""
    read = done = 0
    async for frame in server.client.watch(submission_id=submission_id):
        for record in frame.records:
            if isinstance(record.event, AttemptEnded):
                (sample,) = record.event.samples
                assert sample.trajectory.generated_tokens == tokens
                read += 1
            done += isinstance(record.event, TaskDone)
        if done == samples:
            assert read == samples
            await server.client.ack(frame.cursor, submission_id=submission_id)
            return


async def collected(server: GeneratingServer, submission_id: str, samples: int, tokens: int) -> None:
    """Likewise, of a submission whose results are kept for that."""
    read = 0
    while read < samples:
        request_id = f"{submission_id}-{read}"
        reply = await server.client.collect(submission_id=submission_id, request_id=request_id, max_num=50)
        for result in reply.results:
            (sample,) = result.samples
            assert sample.trajectory.generated_tokens == tokens
        read += len(reply.results)
        await server.client.ack_results(request_id)


async def play(server: GeneratingServer, memory: Memory, round_no: int, options: argparse.Namespace) -> None:
    delivery = Delivery.COLLECT if options.collect else Delivery.WATCH
    read = collected if options.collect else watched
    submission_id = await server.submit(options.samples, options.tokens, round_no, delivery)
    await server.until_held(options.samples)
    memory.note(round_no, "in flight")
    await server.ask_engine("release")
    await server.until_done(submission_id)
    memory.note(round_no, "just finished")
    await memory.until_steady()
    await given_back(server)
    memory.note(round_no, "finished, not read")
    await read(server, submission_id, options.samples, options.tokens)
    memory.note(round_no, "just read")
    await memory.until_steady()
    await given_back(server)
    memory.note(round_no, "read and acknowledged")
    await server.ask_engine("hold")


async def given_back(server: GeneratingServer) -> None:
    """By the allocator, what nobody holds any more."""
    trimming = Task(config=TaskConfig(task_type="trimming"))
    await server.until_done((await server.client.submit([trimming], "trimming")).submission_id)


async def measure(streaming: str, options: argparse.Namespace) -> list[Step]:
    pace = Pace(
        tokens_per_second=options.tokens / options.seconds,
        apart_seconds=options.seconds / 8,
        increments=streaming != "cumulative",
        holds_ends=True,
    )
    backend = f'streaming = "{streaming}"'
    journal = not options.no_journal
    async with generating_server(pace, journal=journal, backend=backend, samples=options.samples) as server:
        warm_up = await server.submit(WARM_UP, 64, 0, Delivery.WATCH)
        await server.until_held(WARM_UP)
        await server.ask_engine("release")
        await server.until_done(warm_up)
        await watched(server, warm_up, WARM_UP, 64)
        await server.ask_engine("hold")
        memory = Memory(server.process, options.samples * options.tokens)
        for round_no in range(1, options.rounds + 1):
            await play(server, memory, round_no, options)
        return memory.steps


def show(step: Step, tokens: int) -> None:
    print(
        f"  round {step.round_no}, {step.name:<22} {step.mib:7.0f} MiB ({step.mib * 2**20 / tokens:5.1f} bytes a "
        f"token), at most {step.peak_mib:7.0f} MiB ({step.peak_mib * 2**20 / tokens:5.1f}), {step.seconds:.0f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="What a server holds of a thousand long generations.")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--tokens", type=int, default=32_768, help="of each (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=60.0, help="that each streams (default %(default)s)")
    parser.add_argument("--streaming", nargs="+", default=["increments"], help="also cumulative, plain")
    parser.add_argument("--no-journal", action="store_true")
    parser.add_argument("--collect", action="store_true", help="results are kept to be collected, not watched")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    reports = {}
    for streaming in options.streaming:
        print(
            f"{options.samples} generations of {options.tokens} tokens, {streaming}, "
            f"the journal {'off' if options.no_journal else 'on'}, {'collected' if options.collect else 'watched'}"
        )
        reports[streaming] = asyncio.run(measure(streaming, options))
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")


if __name__ == "__main__":
    main()
