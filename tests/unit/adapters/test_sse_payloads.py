"""Server-sent events as they are read: the same ones wherever the network cuts their bytes."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from typing import TYPE_CHECKING, cast

from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.adapters.http_client import sse_payloads

if TYPE_CHECKING:
    from collections.abc import Sequence

    import aiohttp

EVENTS = st.lists(
    st.one_of(
        st.binary(max_size=6).map(lambda payload: b"data: " + payload.replace(b"\n", b"")),
        st.just(b": a comment"),
        st.just(b"event: ping\ndata: of two lines"),
    ),
    max_size=6,
)


class Reads:
    """As a body comes: what each read returns, and nothing at the end."""

    def __init__(self, body: bytes, cuts: Sequence[int]) -> None:
        edges = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
        self._reads = [body[start:end] for start, end in pairwise(edges)]

    async def read(self, _most: int) -> bytes:
        return self._reads.pop(0) if self._reads else b""


@given(events=EVENTS, cuts=st.lists(st.integers(1, 90), max_size=8), unended=st.sampled_from([b"", b"data: x", b"d\n"]))
def test_every_complete_event_comes_once_and_no_other(events: list[bytes], cuts: list[int], unended: bytes) -> None:
    async def read() -> list[bytes]:
        body = b"".join(event + b"\n\n" for event in events) + unended
        return [payload async for payload in sse_payloads(cast("aiohttp.StreamReader", Reads(body, cuts)))]

    assert asyncio.run(read()) == [event[6:] for event in events if event.startswith(b"data: ")]
