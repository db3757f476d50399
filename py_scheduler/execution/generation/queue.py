"""The queue in front of the backend of a role.

A role has `limit = 2` and gets the calls A, B, C, D in this order: A and B are at the backend, C and D wait. When A
ends, C is woken with A's place, though its coroutine has not had its turn yet. If a pause comes just then, C gives the
place back and waits on, before D; at the resume it is C that is woken.

Invariants
  1. A call is at its backend with a place, or woken with a place, or waiting without one.
  2. Those that have waited longest are woken first.
  3. While the role is paused no call begins: a call that is woken and has not had its turn waits on.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from py_scheduler.domain.ports import GenerationBackend
    from py_scheduler.execution.generation.known_backend import KnownBackend


class StoppableClock(Protocol):
    """The clock of a phase. To stop it twice, or to start it while it runs, changes nothing."""

    def stop_clock(self) -> None: ...

    def start_clock(self) -> None: ...


class Call:
    """One `generate`. woken: set while it is held; its result says whether it may begin. was_paused: a pause aborted it
    at its backend. stop_asked: `abort` was called for it.
    """

    __slots__ = ("clock", "is_at_backend", "role", "stop_asked", "was_paused", "woken")

    def __init__(self, role: Role, clock: StoppableClock | None) -> None:
        self.role = role
        self.clock = clock
        self.woken: asyncio.Future[bool] | None = None
        self.is_at_backend = False
        self.was_paused = False
        self.stop_asked = False

    def is_wanted(self) -> bool:
        return not self.stop_asked


class Role:
    """One role and its queue. limit: generations at once, None for no limit. running: places that are taken.

    awoken: calls that have a place and have not had their turn since, in order.
    """

    __slots__ = ("awoken", "backend", "known", "limit", "name", "running", "waiting")

    def __init__(self, name: str, backend: GenerationBackend, known: KnownBackend, limit: int | None) -> None:
        self.name = name
        self.backend = backend
        self.known = known
        self.limit = limit
        self.running = 0
        self.waiting: deque[Call] = deque()
        self.awoken: dict[Call, None] = {}

    @property
    def may_begin(self) -> bool:
        return self.known.pause_mode is None and (self.limit is None or self.running < self.limit)

    def entered(self, call: Call) -> bool:
        """Takes a place if there is one. Apart from `waited`, so that a call that need not wait awaits nothing."""
        if not (self.may_begin and call.is_wanted()):
            return False
        self.running += 1
        return True

    async def waited(self, call: Call) -> bool:
        """Waits for a place and takes it; False, without a place, when nobody wants the call any more."""
        if not call.is_wanted():
            return False
        call.woken = asyncio.get_running_loop().create_future()
        self.waiting.append(call)
        try:
            has_place = await self._woken(call)
        except asyncio.CancelledError:
            if call in self.awoken:
                del self.awoken[call]
                self.leave()
            elif call in self.waiting:
                self.waiting.remove(call)
                self.begin_held()
            raise
        finally:
            call.woken = None
        if has_place and not call.is_wanted():
            self.leave()
            return False
        return has_place

    async def _woken(self, call: Call) -> bool:
        while (woken := call.woken) is not None:
            has_place = await woken
            if call.woken is woken:
                self.awoken.pop(call, None)
                return has_place
        raise AssertionError("nobody else ends a wait")

    def leave(self) -> None:
        self.running -= 1
        self.begin_held()

    def begin_held(self) -> None:
        while self.waiting and self.may_begin:
            woken = self.waiting[0].woken
            if woken is not None and not woken.done():
                self.running += 1
                woken.set_result(True)
                self.awoken[self.waiting.popleft()] = None
            else:  # It was cancelled, and is on its way out of the queue.
                return

    def take_back(self) -> None:
        """At a pause: calls that are woken and have not had their turn wait on, before all others."""
        for call in [call for call in reversed(self.awoken) if call.is_wanted()]:
            del self.awoken[call]
            self.running -= 1
            call.woken = asyncio.get_running_loop().create_future()
            self.waiting.appendleft(call)

    def withdraw(self, call: Call) -> None:
        if call.woken is not None and not call.woken.done():
            self.waiting.remove(call)
            call.woken.set_result(False)
