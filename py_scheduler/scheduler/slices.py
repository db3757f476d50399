"""Work that is done in slices, so that whatever its size it never holds the loop.

Such work is a generator: it yields wherever it may be interrupted, after at most a millisecond or so, and returns what
it came to. What it looks at may have changed after each yield. Where it has made work for others, such as handlers that
it told to stop, it yields True: its slice is over, however short it was, and the others go on first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Generator

    from py_scheduler.domain.ports import Clock

_Result = TypeVar("_Result")

SLICE_SECONDS = 0.005
"""What one turn of the loop is given to."""


def at_once(work: Generator[bool | None, None, _Result]) -> _Result:
    """Does all of it now: for who is not in a loop, or knows that it is little."""
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: _Result = done.value
            return result


async def in_slices(work: Generator[bool | None, None, _Result], clock: Clock) -> _Result:
    """Does it, and gives the loop back every few milliseconds."""
    slice_ends = clock.monotonic() + SLICE_SECONDS
    try:
        while True:
            try:
                is_over = next(work)
            except StopIteration as done:
                result: _Result = done.value
                return result
            if is_over or clock.monotonic() >= slice_ends:
                await asyncio.sleep(0)
                slice_ends = clock.monotonic() + SLICE_SECONDS
    finally:
        work.close()


class Backlog:
    """Work that goes on whether or not anybody waits for it. Several pieces take turns, so that none waits for another
    one that is long.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._work: deque[tuple[Generator[bool | None, None, Any], asyncio.Future[Any]]] = deque()
        self._next_slice: asyncio.Handle | None = None

    def add(self, work: Generator[bool | None, None, _Result]) -> asyncio.Future[_Result]:
        """Does the first slice of it now, so that what is short is over when this returns. To wait for the rest, shield
        what is returned: it is the work's and not the caller's.
        """
        done: asyncio.Future[_Result] = asyncio.get_running_loop().create_future()
        self._do_slice(work, done)
        return done

    def add_later(self, work: Generator[bool | None, None, Any]) -> None:
        """As `add`, but its first slice is not in this turn."""
        self._keep(work, asyncio.get_running_loop().create_future())

    def close(self) -> None:
        """Does nothing any more; who waits is cancelled."""
        if self._next_slice is not None:
            self._next_slice.cancel()
        for work, done in self._work:
            work.close()
            done.cancel()
        self._work.clear()

    def _do_slice(self, work: Generator[bool | None, None, _Result], done: asyncio.Future[_Result]) -> None:
        monotonic = self._clock.monotonic
        slice_ends = monotonic() + SLICE_SECONDS
        try:
            while monotonic() < slice_ends:
                if next(work):
                    break
        except StopIteration as end:
            done.set_result(end.value)
            return
        except Exception as error:  # noqa: BLE001 -- it is for whoever waits
            done.set_exception(error)
            return
        self._keep(work, done)

    def _keep(self, work: Generator[bool | None, None, Any], done: asyncio.Future[Any]) -> None:
        self._work.append((work, done))
        if self._next_slice is None:
            self._next_slice = asyncio.get_running_loop().call_soon(self._go_on)

    def _go_on(self) -> None:
        self._next_slice = None
        self._do_slice(*self._work.popleft())
        if self._work and self._next_slice is None:
            self._next_slice = asyncio.get_running_loop().call_soon(self._go_on)
