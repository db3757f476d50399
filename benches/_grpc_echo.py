"""Bare grpc.aio, in two processes, moving the frames that the service moved and nothing else: the floor under its cost.

Run as a program it is the server. The client says with each call how many bytes it wants back, and sends as many as the
service's client sent, so the server needs no knowledge of the service. `SAY` has the one stream of `HEAR` give one
message, stamped when it is handed to gRPC with the clock that the processes of a machine share.
"""

from __future__ import annotations

import asyncio
import signal
import struct
import time
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SUBMIT = "/bench.Echo/Submit"
WATCH = "/bench.Echo/Watch"
SAY = "/bench.Echo/Say"
HEAR = "/bench.Echo/Hear"
_SIZE_DIGITS = 12
_STAMP = struct.Struct("d")
_OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]


class Traffic(msgspec.Struct, frozen=True):
    """Frames in bytes: of each submit (sent, received) and of each message of the one watch stream."""

    submits: list[tuple[int, int]]
    watch: list[int]


async def echo_seconds(address: str, traffic: Traffic) -> float:
    """Moves the traffic once: submits one after another, while the stream runs."""
    async with grpc.aio.insecure_channel(address, options=_OPTIONS) as channel:
        submit: Any = channel.unary_unary(SUBMIT)
        watch: Any = channel.unary_stream(WATCH)
        await submit(_request(_SIZE_DIGITS, 1))
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            group.create_task(_read(watch(msgspec.json.encode(traffic.watch)), traffic.watch))
            for sent, received in traffic.submits:
                reply = await submit(_request(sent, received))
                assert len(reply) == received
        return time.perf_counter() - started


def _request(size: int, reply_size: int) -> bytes:
    return str(reply_size).zfill(_SIZE_DIGITS).encode().ljust(size, b"\0")


class Saying(msgspec.Struct, frozen=True):
    """A message that `SAY` asks for: its size, and how long after the call's answer it is to be sent."""

    size_bytes: int
    after_seconds: float


def stamp_of(message: bytes) -> float:
    """When a message of `HEAR` was handed to gRPC."""
    sent: float
    (sent,) = _STAMP.unpack_from(message)
    return sent


async def _read(call: Any, sizes: list[int]) -> None:
    received = [len(message) async for message in call]
    assert received == sizes


class _Echo(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self._said: asyncio.Queue[Saying] = asyncio.Queue()
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            SUBMIT: grpc.unary_unary_rpc_method_handler(self._submit),
            WATCH: grpc.unary_stream_rpc_method_handler(self._watch),
            SAY: grpc.unary_unary_rpc_method_handler(self._say),
            HEAR: grpc.unary_stream_rpc_method_handler(self._hear),
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return self._handlers.get(handler_call_details.method)

    async def _submit(self, request: bytes, context: object) -> bytes:  # noqa: ARG002
        return bytes(int(request[:_SIZE_DIGITS]))

    async def _watch(self, request: bytes, context: object) -> AsyncIterator[bytes]:  # noqa: ARG002
        for size in msgspec.json.decode(request, type=list[int]):
            yield bytes(size)

    async def _say(self, request: bytes, context: object) -> bytes:  # noqa: ARG002
        self._said.put_nowait(msgspec.json.decode(request, type=Saying))
        return b""

    async def _hear(self, request: bytes, context: object) -> AsyncIterator[bytes]:  # noqa: ARG002
        while True:
            saying = await self._said.get()
            if saying.after_seconds:
                await asyncio.sleep(saying.after_seconds)
            yield _STAMP.pack(time.monotonic()).ljust(saying.size_bytes, b"\0")


async def serve() -> None:
    """Until SIGTERM."""
    server = grpc.aio.server(options=_OPTIONS)
    server.add_generic_rpc_handlers((_Echo(),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    stopped = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopped.set)
    print(f"listening on 127.0.0.1:{port}", flush=True)
    await stopped.wait()
    await server.stop(grace=1.0)


def main() -> None:
    """On the loop that the service chooses, too: uvloop where it is installed."""
    try:
        import uvloop  # noqa: PLC0415 (optional)
    except ImportError:
        asyncio.run(serve())
    else:
        uvloop.run(serve())


if __name__ == "__main__":
    main()
