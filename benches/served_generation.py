"""What a served sample costs: one question and one answer from an SGLang server, beside a bare HTTP client.

    python -m benches.served_generation [--streaming increments] [--rounds 5] [--json out.json]

A scripted server (`_scripted_sglang.py`) answers at once. `py-scheduler serve`, with its journal, plays groups of
GROUP samples with distinct prompts, as a chat that the server's tokenizer encodes, 64 samples at once; a gRPC client
submits them and watches. What counts is the processor time of all threads of the scheduler's process. Bare is aiohttp
and msgspec in this process, which read the same output as one plain answer, from ids that are at hand. They take turns.
Every sample's tokens are asserted.

`--seconds 30 --tokens 64` only keeps such a server busy, for a profiler: its pid is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from benches._scripted_sglang import VOCAB_SIZE, Output, scripted_server
from benches._server_process import server_process
from benches.generation import timed_bare
from py_scheduler.adapters.sglang.streaming import Streaming
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.generation import SamplingParams
from py_scheduler.domain.results import Outcome, SampleDone
from py_scheduler.domain.task import Task, TaskConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benches._server_process import ServerProcess

GROUP = 8
ROUND_OF = {64: 2_048, 4_096: 256, 32_768: 64}
"""Samples of a round, by the tokens of each. The clock of the server's process ticks a hundred times a second."""
GOAL_US = {64: 400.0, 4_096: 4_096 * 0.6, 32_768: 32_768 * 0.6}
"""Of a sample."""

_CONFIG = """
[server]
listen = "127.0.0.1:0"
log_level = "warning"

[cluster.layout]
"10.0.0.1" = {{ gpus = [0, 1, 2, 3], cpu = 128, memory_gb = 512 }}
"10.0.0.2" = {{ gpus = [0, 1, 2, 3], cpu = 128, memory_gb = 512 }}

[journal]
state_dir = "state"

[generation.student]
kind = "sglang"
{servers}
vocab_size = {vocab_size}
streaming = "{streaming}"

[[evaluator]]
evaluator_id = "chat"
handler = "benches.chat_agent:OneTurnAgent"
resource = {{ gpu = 1.0, cpu = 8.0, memory_gb = 32.0, concurrency = 8 }}
run_resource = {{ gpu = 0.125, cpu = 1.0, memory_gb = 4.0 }}
eval_resource = {{ cpu = 1.0, memory_gb = 4.0 }}
default_sampling = {{ ignore_eos = {increments} }}
"""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of processor time a sample, by round."""

    tokens: int
    bare: list[float]
    served: list[float]

    @property
    def ratio(self) -> float:
        return median(ours / bare for ours, bare in zip(self.served, self.bare, strict=True))


class Bench:
    """A server with one trainer. The number of its rounds makes batch ids and prompts that were not there before."""

    def __init__(self, server: ServerProcess, client: SchedulerClient) -> None:
        self._server = server
        self._client = client
        self._rounds = 0

    async def round(self, tokens: int, samples: int) -> float:
        """Microseconds of the server's processor time a sample."""
        self._rounds += 1
        ids = Output(tokens).ids
        config = TaskConfig(task_type="chat", repeat_times=GROUP, sampling=SamplingParams(max_new_tokens=tokens))
        tasks = [
            Task(config=config, prompt=f"Question {number} of round {self._rounds}?", metadata={"answer": "42"})
            for number in range(samples // GROUP)
        ]
        begun, done = self._server.cpu_seconds(), 0
        async for events in self._client.rollout_batches(tasks, batch_id=self._rounds):
            for event in events:
                if isinstance(event, SampleDone):
                    assert event.outcome is Outcome.WRONG_ANSWER, event
                    assert event.trajectory.token_ids[-tokens:].tolist() == ids
                    done += 1
        assert done == samples
        return 1e6 * (self._server.cpu_seconds() - begun) / samples


@asynccontextmanager
async def served(base_url: str, streaming: Streaming, *, as_fleet: bool) -> AsyncIterator[tuple[ServerProcess, Bench]]:
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "scheduler.toml"
        config.write_text(
            _CONFIG.format(
                servers=f'base_urls = ["{base_url}"]' if as_fleet else f'base_url = "{base_url}"',
                vocab_size=VOCAB_SIZE,
                streaming=streaming.value,
                increments="true" if streaming is Streaming.INCREMENTS else "false",
            ),
            encoding="utf-8",
        )
        command = ["-m", "py_scheduler.cli", "serve", "--config", str(config)]
        async with server_process(command) as server, SchedulerClient(server.address) as client:
            yield server, Bench(server, client)


async def measure(base_url: str, options: argparse.Namespace) -> list[Row]:
    rows = []
    streaming = Streaming(options.streaming)
    async with served(base_url, streaming, as_fleet=options.fleet) as (_, bench), aiohttp.ClientSession() as session:
        for tokens, samples in ROUND_OF.items():
            count = max(GROUP, int(samples * options.scale) // GROUP * GROUP)
            row = Row(tokens=tokens, bare=[], served=[])
            await bench.round(tokens, count)
            await timed_bare(session, base_url, tokens)
            for _ in range(options.rounds):
                row.bare.append(await timed_bare(session, base_url, tokens) * tokens)
                row.served.append(await bench.round(tokens, count))
            rows.append(row)
    return rows


async def keep_busy(base_url: str, options: argparse.Namespace) -> None:
    async with served(base_url, Streaming(options.streaming), as_fleet=options.fleet) as (server, bench):
        print(f"server: pid {server.pid}", flush=True)
        end = time.monotonic() + options.seconds
        while time.monotonic() < end:
            await bench.round(options.tokens, ROUND_OF[options.tokens])


def show(rows: list[Row]) -> None:
    print(f"{'tokens':>7}  {'bare a sample':>14}  {'served a sample':>16}  {'ratio':>6}  {'a token':>9}  {'goal':>7}")
    for row in rows:
        ours, goal = median(row.served), GOAL_US[row.tokens]
        said = "" if ours <= goal else " not reached"
        print(
            f"{row.tokens:7}  {median(row.bare) / 1e3:11.3f} ms  {ours / 1e3:13.3f} ms  {row.ratio:5.2f}x  "
            f"{ours / row.tokens:6.2f} us  {goal / 1e3:4.2f} ms{said}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description="What a served sample costs the scheduler's process.")
    parser.add_argument("--streaming", choices=list(Streaming), default=Streaming.INCREMENTS)
    parser.add_argument("--fleet", action="store_true", help="configure the SGLang server as a fleet of one")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the samples of a round; default: %(default)s")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    parser.add_argument("--seconds", type=float, help="only keep the server busy that long")
    parser.add_argument("--tokens", type=int, choices=list(ROUND_OF), default=64, help="of these samples")
    options = parser.parse_args()
    with scripted_server() as base_url:
        if options.seconds:
            asyncio.run(keep_busy(base_url, options))
            return
        rows = asyncio.run(measure(base_url, options))
    show(rows)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


if __name__ == "__main__":
    main()
