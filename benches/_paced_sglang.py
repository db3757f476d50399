"""A scripted server in a process of its own, which streams as fast as it is told and keeps back the ends.

A generation is as long as it may be. Its first event comes at a moment drawn from one interval, as streams of a server
under load lie apart, and the others at `tokens_per_second`. The last event, or a plain answer, waits for `release`:
until then everything else of every generation is in flight.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from benches._scripted_sglang import LONGEST_INPUT, Output

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
SPREAD_SECONDS = 30.0
"""Over which the ends come once they are released."""


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a server streams: of each generation so many tokens a second, from a first moment within `apart_seconds`.
    holds_ends: until they are released.
    """

    tokens_per_second: float
    apart_seconds: float
    increments: bool
    holds_ends: bool


class Held(msgspec.Struct, frozen=True):
    """Generations of which only the end is missing."""

    held: int


class _Chunks:
    """A generation's events as they are written, made once: `ends[k]` tokens are there with the k-th."""

    made: ClassVar[dict[tuple[int, int], _Chunks]] = {}

    def __init__(self, tokens: int, interval: int, *, increments: bool) -> None:
        output = Output(tokens)
        self.ends = [*range(1, tokens, interval), tokens] if interval else [tokens]
        starts = [0, *self.ends[:-1]] if increments else [0] * len(self.ends)
        events = [output.event(start, end) for start, end in zip(starts, self.ends, strict=True)]
        if interval:
            self.events = [_chunk(b"data: " + event + b"\n\n") for event in events]
            self.events[0] = HEAD + self.events[0]
            self.events[-1] += _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
        else:
            self.events = [_answer(events[0])]


def _chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


def _answer(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


class _Server(asyncio.Protocol):
    pace: ClassVar[Pace]
    held: ClassVar[set[_Server]] = set()
    is_released: ClassVar[bool] = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._buffer = b""

    def connection_lost(self, _error: Exception | None) -> None:
        self.held.discard(self)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, separator, body = self._buffer.partition(b"\r\n\r\n")
        length = next(
            (int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), 0
        )
        if not separator or len(body) < length:
            return
        self._buffer = body[length:]
        path = head.split(b" ")[1]
        if path == b"/generate":
            self._generate(msgspec.json.decode(body[:length]))
        else:
            self._transport.write(_answer(msgspec.json.encode(self._said(path))))

    def _said(self, path: bytes) -> Any:
        if path == b"/held":
            return Held(len(self.held))
        if path == b"/release":
            _Server.is_released = True
            for number, stream in enumerate(self.held):
                asyncio.get_running_loop().call_later(SPREAD_SECONDS * number / len(self.held), stream.end)
            self.held.clear()
            return None
        if path == b"/hold":
            _Server.is_released = False
            return None
        if path.startswith(b"/v1/loads"):
            return {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}
        return {
            "model_path": "/m",
            "weight_version": "default",
            "max_req_input_len": LONGEST_INPUT,
            "incremental_streaming_output": self.pace.increments,
        }

    # -- one generation

    def _generate(self, body: dict[str, Any]) -> None:
        sampling = body["sampling_params"]
        shape = sampling["max_new_tokens"], sampling.get("stream_interval", 1) if body["stream"] else 0
        if shape not in _Chunks.made:
            _Chunks.made[shape] = _Chunks(*shape, increments=self.pace.increments)
        self._chunks, self._next = _Chunks.made[shape], 0
        self._loop = asyncio.get_running_loop()
        self._begun = self._loop.time() + random.uniform(0, self.pace.apart_seconds)
        self._go_on()

    def _go_on(self) -> None:
        """Writes what is due, and comes back for what is due next."""
        chunks = self._chunks
        last = len(chunks.events) - 1
        while not self._transport.is_closing():
            due = self._begun + chunks.ends[self._next] / self.pace.tokens_per_second
            if due > self._loop.time():
                self._loop.call_at(due, self._go_on)
                return
            if self._next == last:
                if self.pace.holds_ends and not self.is_released:
                    self.held.add(self)
                else:
                    self.end()
                return
            self._transport.write(chunks.events[self._next])
            self._next += 1

    def end(self) -> None:
        self._transport.write(self._chunks.events[-1])


def _serve(report: Connection, pace: Pace) -> None:
    async def run() -> None:
        _Server.pace = pace
        server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0, backlog=4_096)
        report.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def paced_server(pace: Pace) -> Iterator[str]:
    """Its address, while it runs."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    server = spawning.Process(target=_serve, args=(theirs, pace), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        server.kill()
        server.join()
