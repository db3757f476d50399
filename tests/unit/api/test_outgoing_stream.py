"""What becomes of a message that is on its way when nobody waits for it any longer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from py_scheduler.api.boundary import CallRefusedError, OutgoingStream
from py_scheduler.api.security.access import Access
from py_scheduler.api.security.bearer_tokens import ANYBODY


class HeldUp:
    """A call's context whose client reads when it is told to."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.reads = asyncio.Event()
        self.ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

    async def write(self, message: bytes) -> None:
        self.begun.set()
        try:
            await self.reads.wait()
        except asyncio.CancelledError:
            self.ended.cancel()
            raise
        self.ended.set_result(message)


def outgoing(context: Any, stalled_seconds: float = 60.0) -> OutgoingStream:
    return OutgoingStream(context, Access(None), ANYBODY, stalled_seconds)


async def test_a_stream_that_is_broken_off_does_not_break_off_its_write() -> None:
    """gRPC never frees what a write has taken whose awaiter was cancelled."""
    context = HeldUp()
    call = asyncio.create_task(outgoing(context).write(b"message"))
    await context.begun.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    context.reads.set()
    assert await context.ended == b"message"


async def test_nor_does_a_stream_that_is_cut_because_nobody_reads() -> None:
    context = HeldUp()
    with pytest.raises(CallRefusedError, match=r"nothing was read for 0\.01 s"):
        await outgoing(context, stalled_seconds=0.01).write(b"message")
    context.reads.set()
    assert await context.ended == b"message"
