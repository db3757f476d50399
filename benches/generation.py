"""What a token costs the client on its way from an SGLang server, beside a bare HTTP client in the same run.

    python -m benches.generation [--rounds 7] [--json out.json]

A scripted server (`_scripted_sglang.py`) answers at once. Bare is aiohttp and msgspec, which read the same output as
one plain answer into plain Python values. Client is SglangBackend, from
`generate` to the generation in an episode's record, once with increments and once with events that repeat the output.
They take turns, and what counts is the processor time of this process, so that a busy machine disturbs little. Every
generation's tokens are asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from benches._scripted_sglang import PROMPT_LENGTH, VOCAB_SIZE, Output, scripted_server
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.requests import generate_body
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.adapters.sglang.streaming import Streaming
from py_scheduler.domain.generation import GenerationRequest, SamplingParams
from py_scheduler.domain.trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

LENGTHS = (512, 4_096, 32_768)
GOALS = {Streaming.INCREMENTS: (3.0, 2.0, 2.0), Streaming.CUMULATIVE: (3.0, 6.0, 6.0)}
"""Times bare, by length."""
TOKENS_OF_A_RUN = 131_072
CONCURRENCY = 4
PROMPT = list(range(PROMPT_LENGTH))
JSON = {"Content-Type": "application/json"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of processor time a token, by round."""

    tokens: int
    bare: list[float]
    client: dict[Streaming, list[float]]

    def ratio(self, streaming: Streaming) -> float:
        return median(ours / bare for ours, bare in zip(self.client[streaming], self.bare, strict=True))


# -- the two clients


def request(number: int, tokens: int, streaming: Streaming) -> GenerationRequest:
    """`ignore_eos` tells the scripted server whether to answer in increments."""
    sampling = SamplingParams(max_new_tokens=tokens, ignore_eos=streaming is Streaming.INCREMENTS)
    return GenerationRequest(rid=f"r{number}", token_ids=PROMPT, sampling=sampling)


async def timed(tokens: int, generate: Callable[[int], Awaitable[None]]) -> float:
    """Microseconds of processor time a token."""
    count = max(CONCURRENCY, TOKENS_OF_A_RUN // tokens)
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await generate(number)

    begun = time.process_time()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return 1e6 * (time.process_time() - begun) / (count * tokens)


async def timed_bare(session: aiohttp.ClientSession, base_url: str, tokens: int) -> float:
    """Microseconds of processor time a token, of this process."""
    ids = Output(tokens).ids

    async def bare(number: int) -> None:
        body = generate_body(request(number, tokens, Streaming.PLAIN), SglangSettings(), Streaming.PLAIN)
        async with session.post(f"{base_url}/generate", data=msgspec.json.encode(body), headers=JSON) as answer:
            assert msgspec.json.decode(await answer.read())["output_ids"] == ids

    return await timed(tokens, bare)


async def measure(base_url: str, rounds: int) -> list[Row]:
    backends = {
        streaming: SglangBackend(base_url, settings=SglangSettings(streaming=streaming.value, vocab_size=VOCAB_SIZE))
        for streaming in GOALS
    }
    for backend in backends.values():
        await backend.start()
    rows = []
    async with aiohttp.ClientSession() as session:
        for tokens in LENGTHS:
            ids = Output(tokens).ids

            def client(streaming: Streaming, ids: list[int] = ids) -> Callable[[int], Awaitable[None]]:
                async def generate(number: int) -> None:
                    record = TrajectoryBuilder()
                    record.append_generation(
                        await backends[streaming].generate(request(number, len(ids), streaming)), "student"
                    )
                    assert record.token_ids == ids

                return generate

            ways = {streaming: client(streaming) for streaming in GOALS}
            await timed_bare(session, base_url, tokens)
            for way in ways.values():
                await timed(tokens, way)
            row = Row(tokens=tokens, bare=[], client={streaming: [] for streaming in GOALS})
            for _ in range(rounds):
                row.bare.append(await timed_bare(session, base_url, tokens))
                for streaming, way in ways.items():
                    row.client[streaming].append(await timed(tokens, way))
            rows.append(row)
    for backend in backends.values():
        await backend.close()
    return rows


def show(rows: list[Row]) -> None:
    print(f"{'tokens':>7}  {'bare':>9}", *(f"{streaming:>12}  {'ratio':>6}  {'goal':>4}" for streaming in GOALS))
    for number, row in enumerate(rows):
        cells = []
        for streaming, goals in GOALS.items():
            ratio, goal = row.ratio(streaming), goals[number]
            said = "" if ratio <= goal else " not reached"
            cells.append(f"{median(row.client[streaming]):9.3f} us  {ratio:5.2f}x  {goal:3g}x{said}")
        print(f"{row.tokens:7}  {median(row.bare):6.3f} us", *cells)


def main() -> None:
    parser = argparse.ArgumentParser(description="What a token costs the client on its way from an SGLang server.")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    options = parser.parse_args()
    with scripted_server() as base_url:
        rows = asyncio.run(measure(base_url, options.rounds))
    show(rows)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


if __name__ == "__main__":
    main()
