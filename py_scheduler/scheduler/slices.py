"""Work that is done in slices, so that whatever its size it never holds the loop.

Such work is a generator: it yields wherever it may be interrupted, after at most a millisecond or so, and returns what
it came to. What it looks at may have changed after each yield.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

_Result = TypeVar("_Result")

SLICE_SECONDS = 0.005
"""What one turn of the loop is given to."""


async def in_slices(work: Generator[None, None, _Result]) -> _Result:
    """Does it, and gives the loop back every few milliseconds."""
    slice_ends = time.monotonic() + SLICE_SECONDS
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: _Result = done.value
            return result
        if time.monotonic() >= slice_ends:
            await asyncio.sleep(0)
            slice_ends = time.monotonic() + SLICE_SECONDS


def at_once(work: Generator[None, None, _Result]) -> _Result:
    """Does all of it in this turn."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: _Result = done.value
            return result
