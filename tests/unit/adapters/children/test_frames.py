"""Frames over a socket, however they arrive, and what a child may and may not say in them."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
import tracemalloc
from typing import TYPE_CHECKING

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.adapters.children import frames as _frames
from py_scheduler.adapters.children.frames import FrameProtocol, FrameSocket
from py_scheduler.adapters.children.process_host import child_environment, how_it_ended
from py_scheduler.adapters.children.ray_host import actor_environment
from py_scheduler.domain.results import Outcome
from py_scheduler.domain.runners.frames import (
    AgentSaid,
    Ask,
    Generate,
    Observe,
    Raised,
    Returned,
    encode,
    raw,
    read_child_frame,
    read_server_frame,
)
from py_scheduler.domain.runners.runner import RunnerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence


@given(st.lists(st.binary(max_size=200), max_size=8), st.integers(1, 64), st.sampled_from([0, 50, 1_000]))
def test_frames_arrive_whole_however_the_stream_is_cut(frames: Sequence[bytes], piece: int, large: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_frames, "_PIECE_BYTES", large)
        assert _received(frames, piece) == [*frames]


def _received(frames: Sequence[bytes], piece: int) -> list[bytes]:
    """The stream in pieces of so many bytes, the first half of them before anybody listens."""
    protocol, got = FrameProtocol(), list[bytes]()
    stream = b"".join(struct.pack(">I", len(frame)) + frame for frame in frames)
    half = len(stream) // 2
    for start in range(0, half, piece):
        protocol.data_received(stream[start : min(start + piece, half)])
    protocol.listen(got.append)
    for start in range(half, len(stream), piece):
        protocol.data_received(stream[start : start + piece])
    return got


def test_a_large_frame_is_in_memory_once() -> None:
    protocol, got, size, piece = FrameProtocol(), list[bytes](), 32 << 20, bytes(1 << 18)
    protocol.listen(got.append)
    tracemalloc.start()
    try:
        protocol.data_received(struct.pack(">I", size))
        for _ in range(size // len(piece)):
            protocol.data_received(piece)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert [len(frame) for frame in got] == [size]
    assert peak < 1.5 * size


async def test_both_ends_speak_to_one_another_and_hear_the_end() -> None:
    ours, theirs = socket.socketpair()
    loop = asyncio.get_running_loop()
    _, protocol = await loop.create_unix_connection(FrameProtocol, sock=ours)
    got: asyncio.Queue[bytes] = asyncio.Queue()
    protocol.listen(got.put_nowait)
    child = FrameSocket(theirs)
    heard: list[bytes | None] = []
    big = bytes(3_000_000)
    protocol.send(b"one")
    protocol.send(big)

    def hear() -> None:
        heard.extend(child.receive() for _ in range(2))
        child.send(big)
        theirs.close()

    thread = threading.Thread(target=hear)
    thread.start()
    assert await got.get() == big
    await protocol.lost.wait()
    thread.join()
    assert heard == [b"one", big]
    protocol.send(b"to nobody")
    protocol.close()


async def test_a_frame_that_is_longer_than_it_may_be_ends_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        _, protocol = await asyncio.get_running_loop().create_unix_connection(
            lambda: FrameProtocol(max_bytes=16), sock=ours
        )
        theirs.sendall(struct.pack(">I", 17))
        async with asyncio.timeout(5):
            await protocol.lost.wait()
        theirs.setblocking(True)
        assert theirs.recv(1) == b"", "the other side sees the end"


@pytest.mark.parametrize(
    "frame",
    [
        Ask(call_no=1, question=Generate(role="student", max_new_tokens=None, sampling=None)),
        Ask(call_no=2, question=Observe(token_id_bytes=bytes(8), text="x")),
        Returned(order_no=1, value=raw(AgentSaid(termination_reason="", answer="42"))),
        Raised(order_no=2, outcome=Outcome.INFRA_OTHER, error="ValueError"),
    ],
)
def test_what_is_said_arrives_as_it_was_said(frame: Ask | Returned | Raised) -> None:
    again = read_child_frame(encode(frame))
    if isinstance(again, Returned):
        assert msgspec.msgpack.decode(again.value, type=AgentSaid).answer == "42"
    else:
        assert again == frame


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"GET / HTTP/1.1", encode(Raised(order_no=1, outcome=Outcome.SOLVED, error=""))[:-1]]
)
def test_what_is_no_frame_is_an_error(data: bytes) -> None:
    for read in (read_child_frame, read_server_frame):
        with pytest.raises((msgspec.ValidationError, msgspec.DecodeError)):
            read(data)


def test_how_a_process_ended_is_said_in_words() -> None:
    assert how_it_ended(0) == "exit status 0"
    assert how_it_ended(3) == "exit status 3"
    assert how_it_ended(-9) == "signal SIGKILL"
    assert how_it_ended(-255) == "signal 255"


def test_children_get_what_is_listed_and_actors_what_is_not_each_machines_own() -> None:
    environment = {"PATH": "/bin", "TOKEN": "t", "LD_PRELOAD": "x", "OTHER": "y", "CUDA_VISIBLE_DEVICES": "7"}
    settings = RunnerSettings(environment=("PATH", "TOKEN", "LD_PRELOAD", "PYTHONPATH", "BASH_ENV"))
    own = {"PATH": "/bin", "TOKEN": "t"}
    assert child_environment(environment, ("", None), settings) == own | {"CUDA_VISIBLE_DEVICES": "7"}
    assert child_environment(environment, ("", (0, 3)), settings) == own | {"CUDA_VISIBLE_DEVICES": "0,3"}
    assert child_environment(environment, ("", ()), settings) == own | {"CUDA_VISIBLE_DEVICES": ""}
    assert actor_environment(environment, (1,), settings) == {"TOKEN": "t", "CUDA_VISIBLE_DEVICES": "1"}
    assert actor_environment(environment, None, settings) == {"TOKEN": "t"}
