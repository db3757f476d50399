"""A scripted server in a process of its own, which answers at once, with what SGLang 0.5.23 would write.

A generation is as long as it may be. `ignore_eos` of its sampling says how a stream of it comes: in increments if it is
set, else as events that repeat the output so far. What is made for one kind of generation is made once.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import random
import zlib
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

VOCAB_SIZE = 150_000
PROMPT_LENGTH = 64
LONGEST_INPUT = 65_536


class Output:
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
            "prompt_tokens": PROMPT_LENGTH,
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
            return _json(self.event(0, count))
        ends = [*range(1, count, interval), count]
        starts = [0, *ends[:-1]] if increments else [0] * len(ends)
        events = [self.event(start, end) for start, end in zip(starts, ends, strict=True)]
        chunks = [b"data: " + event + b"\n\n" for event in [*events, b"[DONE]"]]
        framed = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks)
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        return head + framed + b"0\r\n\r\n"


def prompt_ids(body: bytes) -> list[int]:
    """What the server's tokenizer makes of a prompt or a chat: ids of its own for each."""
    draw = random.Random(zlib.crc32(body))
    return [draw.randrange(VOCAB_SIZE) for _ in range(PROMPT_LENGTH)]


def _json(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


_MODEL = {"model_path": "/m", "weight_version": "default", "max_req_input_len": LONGEST_INPUT}
_LOADS = {"loads": [{"num_running_reqs": 0, "num_waiting_reqs": 0}]}


class _Server(asyncio.Protocol):
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
        self._transport.write(self._answer(head.split(b" ")[1], body[:length]))

    def _answer(self, path: bytes, body: bytes) -> bytes:
        if path == b"/generate":
            return self._generation(msgspec.json.decode(body))
        if path == b"/v1/tokenize":
            ids = prompt_ids(body)
            return _json(msgspec.json.encode({"tokens": ids, "count": len(ids), "max_model_len": LONGEST_INPUT}))
        return _json(msgspec.json.encode(_LOADS if path.startswith(b"/v1/loads") else _MODEL))

    def _generation(self, body: dict[str, object]) -> bytes:
        sampling = body["sampling_params"]
        assert isinstance(sampling, dict)
        kind = sampling["max_new_tokens"], sampling.get("stream_interval", 0), sampling.get("ignore_eos", False)
        if kind not in self.answers:
            self.answers[kind] = Output(kind[0]).answer(kind[1], increments=kind[2])
        return self.answers[kind]


def _serve(report: Connection) -> None:
    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(_Server, "127.0.0.1", 0)
        report.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@contextmanager
def scripted_server() -> Iterator[str]:
    """Its address, while it runs."""
    spawning = multiprocessing.get_context("spawn")
    ours, theirs = spawning.Pipe()
    server = spawning.Process(target=_serve, args=(theirs,), daemon=True)
    server.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        server.kill()
        server.join()
