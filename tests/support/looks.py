"""Work that is made to be done in slices, done at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from py_scheduler.scheduler.queue.service_order import look_ahead_of

if TYPE_CHECKING:
    from collections.abc import Generator

    from py_scheduler.scheduler.queue.entries import ReadyEntry
    from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
    from py_scheduler.scheduler.queue.service_order import Ahead

_Result = TypeVar("_Result")


def at_once(work: Generator[None, None, _Result]) -> _Result:
    while True:
        try:
            next(work)
        except StopIteration as done:
            result: _Result = done.value
            return result


def ahead_of(queue: ReadyQueue, entry: ReadyEntry, now: float, limit: int = 0) -> Ahead:
    """What is ahead of an entry, where nothing was ended."""
    return at_once(look_ahead_of(queue, entry, now, lambda other: not other.is_gone, limit))
