"""What a token costs the client on its way from an SGLang server, beside a bare HTTP client in the same run.

    python -m benches.generation [--rounds 7] [--json out.json]

A scripted server in a process of its own answers at once, with events as SGLang 0.5.23 writes them. Bare is aiohttp and
msgspec, which read the same output as one plain answer into plain Python values. Client is SglangBackend, from
`generate` to the generation in an episode's record, once with increments and once with events that repeat the output.
They take turns, and what counts is the processor time of this process, so that a busy machine disturbs little. Every
generation's tokens are asserted.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import random
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, ClassVar

import aiohttp
import msgspec

from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.requests import generate_body
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.adapters.sglang.streaming import Streaming
from py_scheduler.domain.generation import GenerationRequest, SamplingParams
from py_scheduler.domain.trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from multiprocessing.connection import Connection

LENGTHS = (512, 4_096, 32_768)
GOALS = {Streaming.INCREMENTS: (3.0, 2.0, 2.0), Streaming.CUMULATIVE: (3.0, 6.0, 6.0)}
"""Times bare, by length."""
TOKENS_OF_A_RUN = 131_072
CONCURRENCY = 4
VOCAB_SIZE = 150_000
PROMPT = list(range(64))
JSON = {"Content-Type": "application/json"}


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Microseconds of processor time a token, by round."""

    tokens: int
    bare: list[float]
    client: dict[Streaming, list[float]]

    def ratio(self, streaming: Streaming) -> float:
        return median(ours / bare for ours, bare in zip(self.client[streaming], self.bare, strict=True))


# -- the scripted server


class _Output:
    """`count` tokens as SGLang would tell of them."""

    def __init__(self, count: int) -> None:
        draw = random.Random(count)
        self.ids = [draw.randrange(VOCAB_SIZE) for _ in range(count)]
        # Float32 as Python prints them.
        self._scored = [[-draw.randrange(1, 2**24) / 2**21, token_id, None] for token_id in self.ids]
        self._words = [" token" if token_id % 2 else "ing" for token_id in self.ids]

    def event(self, start: int, end: int) -> bytes:
        is_last = end == len(self.ids)
        meta: dict[str, Any] = {
            "id": "r~0123456789abcdef",
            "finish_reason": {"type": "length", "length": len(self.ids)} if is_last else None,
            "prompt_tokens": len(PROMPT),
            "weight_version": "default",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": self._scored[start:end],
            "output_token_logprobs_length": end,
            "reasoning_tokens": 0,
            "completion_tokens": end,
            "cached_tokens": 0,
            "cached_tokens_details": None,
            "dp_rank": None,
        }
        if is_last:
            meta["weight_versions"] = [{"version": "default", "start": 0, "end": end}]
        return msgspec.json.encode(
            {"text": "".join(self._words[start:end]), "output_ids": self.ids[start:end], "meta_info": meta}
        )

    def answer(self, interval: int, *, increments: bool) -> bytes:
        """To /generate, whole: plain without interval, else chunked as SGLang's server does it, an event to a chunk."""
        count = len(self.ids)
        if not interval:
            body = self.event(0, count)
            return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body
        ends = [*range(1, count, interval), count]
        starts = [0, *ends[:-1]] if increments else [0] * len(ends)
        events = [self.event(start, end) for start, end in zip(starts, ends, strict=True)]
        chunks = [b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"]]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + framed + b"0\r\n\r\n"


class _Server(asyncio.Protocol):
    """Answers the calls of a client that starts, and generations with what was made once for their kind."""

    answers: ClassVar[dict[tuple[int, int, bool], bytes]] = {}

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if not separator or len(body) < length:
            return
        self._buffer = body[length:]
        if head.startswith(b"POST /generate"):
            self._transport.write(self._generation(msgspec.json.decode(body[:length])))
            return
        info = msgspec.json.encode(
            {
                "model_path": "/m",
                "weight_version": "default",
                "max_req_input_len": 2 * max(LENGTHS),
            }
        )
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(info) + info)

    def _generation(self, body: dict[str, object]) -> bytes:
        sampling = body["sampling_params"]
        assert isinstance(sampling, dict)
        kind = sampling["max_new_tokens"], sampling.get("stream_interval", 0), sampling["ignore_eos"]
        if kind not in self.answers:
            self.answers[kind] = _Output(kind[0]).answer(kind[1], increments=kind[2])
        return self.answers[kind]


def serve(report: Connection) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0)
        report.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


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


async def measure(port: int, rounds: int) -> list[Row]:
    base_url = f"http://127.0.0.1:{port}"
    backends = {
        streaming: SglangBackend(base_url, settings=SglangSettings(streaming=streaming.value, vocab_size=VOCAB_SIZE))
        for streaming in GOALS
    }
    for backend in backends.values():
        await backend.start()
    rows = []
    async with aiohttp.ClientSession() as session:
        for tokens in LENGTHS:
            ids = _Output(tokens).ids

            async def bare(number: int, tokens: int = tokens, ids: list[int] = ids) -> None:
                body = generate_body(request(number, tokens, Streaming.PLAIN), SglangSettings(), Streaming.PLAIN)
                async with session.post(f"{base_url}/generate", data=msgspec.json.encode(body), headers=JSON) as answer:
                    assert msgspec.json.decode(await answer.read())["output_ids"] == ids

            def client(streaming: Streaming, ids: list[int] = ids) -> Callable[[int], Awaitable[None]]:
                async def generate(number: int) -> None:
                    record = TrajectoryBuilder()
                    record.append_generation(
                        await backends[streaming].generate(request(number, len(ids), streaming)), "student"
                    )
                    assert record.token_ids.tolist() == ids

                return generate

            ways = {streaming: client(streaming) for streaming in GOALS}
            for way in (bare, *ways.values()):
                await timed(tokens, way)
            row = Row(tokens=tokens, bare=[], client={streaming: [] for streaming in GOALS})
            for _ in range(rounds):
                row.bare.append(await timed(tokens, bare))
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
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    server = spawning.Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        rows = asyncio.run(measure(ours.recv(), options.rounds))
    finally:
        server.kill()
    show(rows)
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(rows)) + b"\n")


if __name__ == "__main__":
    main()
