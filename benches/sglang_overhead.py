"""What the SGLang client costs per request, beside a bare aiohttp loop that sends the same bodies in the same run.

    python benches/sglang_overhead.py --base-url http://127.0.0.1:30000 [--base-url ...] [--json out.json]

The servers run already (examples/sglang/serve_cpu.py starts one on a CPU) and have nothing else to do. Bare loop and
client take turns, so that a machine that becomes busy slows both. The time of a request is the run's elapsed time over
its requests, and the ratio is what the client adds to that of the bare loop: the median over the rounds, and from CPU
seconds of this process, which a busy machine disturbs less. Token counts are asserted before anything is reported.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.adapters.sglang.requests import generate_body
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.adapters.sglang.streaming import Streaming
from py_scheduler.domain.generation import GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

GOAL_RATIO = 0.10
FIRST_PLAIN_TOKEN, PLAIN_TOKENS = 5, 300
"""Ids that the tiny model has."""

numbers = itertools.count()


class Run(msgspec.Struct, frozen=True):
    """Seconds per request: of the clock, and of this process' CPU."""

    elapsed: float
    cpu: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    requests: int
    concurrency: int
    new_tokens: int
    bare: list[Run]
    client: list[Run]

    @property
    def ratios(self) -> list[float]:
        """What the client adds to the bare loop's time, round by round."""
        return [client.elapsed / bare.elapsed - 1 for bare, client in zip(self.bare, self.client, strict=True)]

    @property
    def cpu_ratio(self) -> float:
        added = median(run.cpu for run in self.client) - median(run.cpu for run in self.bare)
        return added / median(run.elapsed for run in self.bare)


def make_requests(count: int, prompt_tokens: int, new_tokens: int) -> list[GenerationRequest]:
    """No two prompts of a whole run begin alike, so that no server has one in its cache."""
    made = []
    for number in itertools.islice(numbers, count):
        digits = [number // PLAIN_TOKENS**place % PLAIN_TOKENS for place in range(prompt_tokens)]
        token_ids = [FIRST_PLAIN_TOKEN + digit for digit in digits]
        sampling = SamplingParams(max_new_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        made.append(GenerationRequest(rid=f"overhead-{number}", token_ids=token_ids, sampling=sampling))
    return made


async def timed(
    requests: Sequence[GenerationRequest],
    concurrency: int,
    generate: Callable[[int, GenerationRequest], Awaitable[int]],
) -> Run:
    """`generate` gives the number of tokens that came back."""
    queue = iter(enumerate(requests))

    async def work() -> None:
        for number, request in queue:
            got = await generate(number, request)
            if got != request.sampling.max_new_tokens:
                raise AssertionError(f"{got} tokens came back of {request.sampling.max_new_tokens}")

    begun, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(work() for _ in range(concurrency)))
    return Run((time.perf_counter() - begun) / len(requests), (time.process_time() - cpu) / len(requests))


async def measure(base_urls: list[str], count: int, concurrency: int, new_tokens: int, rounds: int) -> Report:
    # Both get one answer at the end: what a stream costs, generation.py tells.
    settings = SglangSettings(streaming="plain")
    fleet = SglangFleet(base_urls, settings=settings)
    connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=settings.keepalive_seconds)
    bare: list[Run] = []
    client: list[Run] = []
    async with aiohttp.ClientSession(connector=connector) as session:

        async def through_bare(number: int, request: GenerationRequest) -> int:
            body = generate_body(request, settings, Streaming.PLAIN) | {"rid": request.rid}
            url = f"{base_urls[number % len(base_urls)]}/generate"
            async with session.post(url, data=msgspec.json.encode(body), headers=JSON) as response:
                content = await response.read()
            return len(msgspec.json.decode(content)["output_ids"])

        async def through_client(_number: int, request: GenerationRequest) -> int:
            return len((await fleet.generate(request)).token_ids)

        await fleet.start()
        try:
            for generate in (through_bare, through_client):
                await timed(make_requests(2 * concurrency, 64, new_tokens), concurrency, generate)
            for _ in range(rounds):
                for runs, generate in ((bare, through_bare), (client, through_client)):
                    runs.append(await timed(make_requests(count, 64, new_tokens), concurrency, generate))
        finally:
            await fleet.close()
    return Report(requests=count, concurrency=concurrency, new_tokens=new_tokens, bare=bare, client=client)


JSON = {"Content-Type": "application/json"}


def show(report: Report) -> None:
    ratio = median(report.ratios)
    said = "reached" if ratio < GOAL_RATIO else "not reached"
    bare, client = (median(run.elapsed for run in runs) for runs in (report.bare, report.client))
    bare_cpu, client_cpu = (median(run.cpu for run in runs) for runs in (report.bare, report.client))
    print(
        f"{len(report.bare)} rounds of {report.requests} requests, {report.concurrency} at once, "
        f"{report.new_tokens} tokens each\n"
        f"  bare aiohttp {1e3 * bare:.2f} ms a request, client {1e3 * client:.2f} ms\n"
        f"  the client adds {ratio:+.1%} (goal below {GOAL_RATIO:.0%}: {said}; "
        f"rounds from {min(report.ratios):+.1%} to {max(report.ratios):+.1%})\n"
        f"  CPU of this process {1e3 * bare_cpu:.2f} and {1e3 * client_cpu:.2f} ms a request: "
        f"{report.cpu_ratio:+.1%} of a request's time"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="The SGLang client beside a bare aiohttp loop.")
    parser.add_argument("--base-url", action="append", required=True, help="of a running server; may be repeated")
    parser.add_argument("--requests", type=int, default=256, help="in a round (default %(default)s)")
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the report there as well")
    options = parser.parse_args()
    report = asyncio.run(
        measure(options.base_url, options.requests, options.concurrency, options.new_tokens, options.rounds)
    )
    show(report)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")


if __name__ == "__main__":
    main()
