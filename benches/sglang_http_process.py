"""What a stream costs the HTTP process of a real SGLang server, beside plain answers of the same length.

    python -m benches.sglang_http_process --python .venv-sglang/bin/python --model target/sglang/tiny-... [--rounds 5]

That process is one thread of Python, which serves all generations of its server. Two servers run on the CPU, one after
the other: the first streams increments, the second events that repeat the output. At each, generations through
SglangBackend, as it asks by default, take turns with plain ones, and with increments of other lengths where those are
named. What counts is the processor time of the process, and how many times plain it is: medians over the rounds. All
tokens of every generation are asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import tempfile
from pathlib import Path
from statistics import median

import msgspec

from examples.sglang.serve_cpu import CpuServer
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.domain.generation import GenerationRequest, SamplingParams

GOAL_RATIO = 1.5
PLAIN = "plain"
DEFAULT = SglangSettings()
PROMPT = list(range(5, 69))
# The tiny model is made for a context of 4 096; its rotary embedding has no end of its own.
FLAGS = ("--json-model-override-args", '{"max_position_embeddings": 65536}')

numbers = itertools.count()


class Way(msgspec.Struct, frozen=True, kw_only=True):
    """One way to ask. seconds: of the process' processor time a generation, by round."""

    name: str
    streams_increments: bool
    """Of the server."""
    seconds: list[float] = []
    plain_seconds: list[float] = []

    @property
    def ratio(self) -> float:
        """By round, and of these the median."""
        return median(ours / plain for ours, plain in zip(self.seconds, self.plain_seconds, strict=True))


def cpu_seconds(pid: int) -> float:
    """Of all threads of a process, to the nanosecond."""
    return sum(int(file.read_text().split()[0]) for file in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


async def seconds_of(server: CpuServer, backend: SglangBackend, tokens: int, at_once: int) -> float:
    """Of the server's HTTP process, a generation, when so many are made at once."""

    async def generate() -> None:
        request = GenerationRequest(
            rid=f"http-{next(numbers)}",
            token_ids=PROMPT,
            sampling=SamplingParams(max_new_tokens=tokens, ignore_eos=True),
        )
        generation = await backend.generate(request)
        assert len(generation.token_ids) == len(generation.log_probs) == tokens

    begun = cpu_seconds(server.pid)
    await asyncio.gather(*(generate() for _ in range(at_once)))
    return (cpu_seconds(server.pid) - begun) / at_once


async def measure(
    server: CpuServer, settings: dict[str, SglangSettings], options: argparse.Namespace, *, streams_increments: bool
) -> list[Way]:
    """`settings`: by the name of the way; the first is plain."""
    backends = {name: SglangBackend(server.base_url, settings=each) for name, each in settings.items()}
    for backend in backends.values():
        await backend.start()
    took: dict[str, list[float]] = {name: [] for name in backends}
    try:
        for backend in backends.values():
            await seconds_of(server, backend, options.tokens // 8, options.at_once)
        for number in range(options.rounds):
            for name, backend in backends.items():
                took[name].append(await seconds_of(server, backend, options.tokens, options.at_once))
                print(f"  round {number + 1}, {name}: {took[name][-1]:.3f} s", flush=True)
    finally:
        for backend in backends.values():
            await backend.close()
    return [
        Way(name=name, streams_increments=streams_increments, seconds=seconds, plain_seconds=took[PLAIN])
        for name, seconds in took.items()
    ]


def ways_at(options: argparse.Namespace, *, streams_increments: bool) -> dict[str, SglangSettings]:
    plain = {PLAIN: SglangSettings(streaming="plain")}
    if not streams_increments:
        events = f"repeated, {DEFAULT.cumulative_events} events (default)"
        return plain | {events: DEFAULT}
    by_default = {f"increments of {DEFAULT.stream_interval} (default)": DEFAULT}
    return (
        plain
        | by_default
        | {f"increments of {each}": SglangSettings(stream_interval=each) for each in options.interval}
    )


def show(ways: list[Way], options: argparse.Namespace) -> None:
    print(
        f"HTTP process of SGLang, {options.at_once} generations of {options.tokens} tokens at once, "
        f"{options.rounds} rounds; s a generation, times plain (goal {GOAL_RATIO:g})"
    )
    for way in ways:
        said = "" if way.ratio <= GOAL_RATIO else "  not reached"
        spread = f"{min(way.seconds):.3f} to {max(way.seconds):.3f}"
        print(f"{way.name:>30}  {median(way.seconds):.3f} ({spread})  {way.ratio:5.2f}x{said}")


def main() -> None:
    parser = argparse.ArgumentParser(description="What a stream costs the HTTP process of a real SGLang server.")
    parser.add_argument("--python", required=True, help="that has SGLang")
    parser.add_argument("--model", type=Path, required=True, help="the tiny model of `make test-sglang`")
    parser.add_argument("--tokens", type=int, default=4_096, help="of a generation (default %(default)s)")
    parser.add_argument("--at-once", type=int, default=2, help="generations (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--interval", type=int, action="append", default=[], help="of increments; may be repeated")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    ways: list[Way] = []
    with tempfile.TemporaryDirectory() as folder:
        for streams_increments in (True, False):
            settings = ways_at(options, streams_increments=streams_increments)
            log = Path(folder) / "sglang.log"
            with CpuServer(
                options.python, options.model, log, streams_increments=streams_increments, flags=FLAGS
            ) as server:
                measured = measure(server, settings, options, streams_increments=streams_increments)
                ways += asyncio.run(measured)
    show(ways, options)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(ways)) + b"\n")


if __name__ == "__main__":
    main()
