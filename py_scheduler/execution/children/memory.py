"""Looks at what children hold of their machine's memory while they play: nothing tells when it grows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.runners.runner import RunnerState

if TYPE_CHECKING:
    from py_scheduler.domain.ports import Clock, TimerHandle
    from py_scheduler.execution.children.slots import ChildSlots

_SECONDS = 0.5
"""Between two looks."""


class MemoryWatch:
    """Kills what is larger than `limit_mib`, from a `begin` until no child is busy any more. None: it never looks."""

    def __init__(self, slots: ChildSlots, limit_mib: float | None, clock: Clock) -> None:
        self._slots = slots
        self._limit_mib = limit_mib
        self._clock = clock
        self._next: TimerHandle | None = None

    def begin(self) -> None:
        if self._limit_mib is not None and self._next is None:
            self._next = self._clock.call_at(self._clock.monotonic() + _SECONDS, self._look)

    def end(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _look(self) -> None:
        self._next = None
        busy = [slot.session for slot in self._slots if slot.state is RunnerState.BUSY]
        for session in busy:
            size_mib = None if session is None else session.child.resident_mib()
            if session is not None and size_mib is not None and self._limit_mib and size_mib > self._limit_mib:
                session.kill(f"it held {size_mib:.0f} MiB, hard_resident_mib is {self._limit_mib:g}")
        if busy:
            self.begin()
