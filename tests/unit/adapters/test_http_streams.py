"""Server-sent events as the adapters read them."""

from __future__ import annotations

import asyncio
import tracemalloc
from typing import TYPE_CHECKING, cast

from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.adapters.http_client import sse_payloads

if TYPE_CHECKING:
    import aiohttp

EVENT_BYTES = 1 << 20
CHUNK_BYTES = 64 << 10


class Body:
    """Gives what it was made of, piece by piece, and then ends, or is silent."""

    def __init__(self, content: bytes, ends: list[int], *, is_silent: bool = False) -> None:
        self._pieces = [content[start:end] for start, end in zip([0, *ends], [*ends, len(content)], strict=True)]
        self._pieces.reverse()
        self._is_silent = is_silent

    async def read(self, _most: int) -> bytes:
        while self._pieces:
            if piece := self._pieces.pop():
                return piece
        if self._is_silent:
            await asyncio.Event().wait()
        return b""

    @property
    def as_content(self) -> aiohttp.StreamReader:
        return cast("aiohttp.StreamReader", self)


@given(
    st.lists(st.sampled_from([b"data: {}", b"data: 1\n2", b"data: ", b": comment", b"x"]), max_size=10),
    st.lists(st.integers(0, 100), max_size=5),
)
async def test_however_a_body_is_cut_the_payloads_of_its_events_come_in_order(
    events: list[bytes], cuts: list[int]
) -> None:
    content = b"".join([event + b"\n\n" for event in events]) + b"data: not complete"
    body = Body(content, sorted(min(cut, len(content)) for cut in cuts))
    assert [payload async for payload in sse_payloads(body.as_content)] == [
        event.removeprefix(b"data: ") for event in events if event.startswith(b"data: ")
    ]


async def test_a_stream_that_waits_holds_its_newest_event_once() -> None:
    """It is whoever asked for it that holds it: a thousand streams wait at once."""
    content = (b"data: " + b"x" * EVENT_BYTES + b"\n\n") * 2
    body = Body(content, [*range(CHUNK_BYTES, len(content), CHUNK_BYTES)], is_silent=True)
    del content
    tracemalloc.start()
    try:
        payloads = sse_payloads(body.as_content)
        newest = b""
        for _ in range(2):
            newest = await anext(payloads)
        waiting = asyncio.ensure_future(anext(payloads))
        await asyncio.sleep(0)
        held, _ = tracemalloc.get_traced_memory()
        waiting.cancel()
    finally:
        tracemalloc.stop()
    assert len(newest) == EVENT_BYTES
    assert held < 1.5 * EVENT_BYTES, "a second copy"
