"""Generations under way, as `abort` and `close` see them.

Invariants

- A rid is in flight at most once. `finished` is set exactly when its `generate` is over.
- A flight that was cut never waits again: its current wait ends at once, and so does every later one.
- Whoever is silent for longer than its limit is told by the one timer of all flights, which is never due later than the
  first limit. A limit that is moved, as by every event of a stream, moves no timer.
- While the backend is paused no time limit counts. Afterwards each limit counts from its beginning: a generation with
  600 s to its first token, paused after 500, has 600 again.
"""

from __future__ import annotations

import asyncio
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING

from py_scheduler.errors import EngineRejectedError

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Iterator
    from types import TracebackType


class Flight:
    """One `generate` call. `backend_rid` is what the backend knows it as; empty while it knows nothing of it."""

    def __init__(self, rid: str, silences: Silences) -> None:
        self.rid = rid
        self.backend_rid = ""
        self.abort_requested = False
        self.finished = asyncio.Event()
        self.was_cut = False
        self.stands_still = False
        self.due = math.inf
        """When its silence has lasted too long; what it waits for meanwhile is `scope`."""
        self.scope: asyncio.Timeout | None = None
        self._silences = silences
        self._seconds: float | None = None

    def watched(self, seconds: float | None = None) -> Watched:
        """A stretch of waiting: TimeoutError after `seconds` without `allow`, or at once when cut."""
        return Watched(self, seconds)

    def allow(self, seconds: float | None) -> None:
        """Sets the current stretch's limit to `seconds` from now."""
        self._seconds = seconds
        if self.scope is None:
            return
        if self.was_cut:
            self.end_wait()
        elif seconds is None or self.stands_still:
            self.due = math.inf
        else:
            self.due = asyncio.get_running_loop().time() + seconds
            if self.due < self._silences.due:
                self._silences.look_at(self.due)

    def end_wait(self) -> None:
        """By TimeoutError, at once."""
        self.due = math.inf
        if self.scope is not None and not self.scope.expired():
            self.scope.reschedule(asyncio.get_running_loop().time())

    def stand_still(self, stands_still: bool) -> None:
        self.stands_still = stands_still
        self.allow(self._seconds)

    def cut(self) -> None:
        self.was_cut = True
        self.allow(0)


class Watched:
    """One stretch of waiting of a flight, as a context manager."""

    __slots__ = ("_flight", "_scope", "_seconds")

    def __init__(self, flight: Flight, seconds: float | None) -> None:
        self._flight = flight
        self._seconds = seconds

    async def __aenter__(self) -> None:
        flight = self._flight
        if flight.was_cut:
            raise TimeoutError
        self._scope = asyncio.timeout(None)
        await self._scope.__aenter__()
        flight.scope = self._scope
        flight.allow(self._seconds)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._flight.scope = None
        self._flight.due = math.inf
        await self._scope.__aexit__(kind, error, trace)


class Silences:
    """The timer of many flights."""

    def __init__(self, flights: Iterable[Flight]) -> None:
        self.due = math.inf
        """Of the timer."""
        self._flights = flights
        self._timer: asyncio.TimerHandle | None = None

    def look_at(self, due: float) -> None:
        """Sooner than it would, at this time of the loop."""
        self.close()
        self.due = due
        self._timer = asyncio.get_running_loop().call_at(due, self._look)

    def close(self) -> None:
        self.due = math.inf
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        # The loop calls timers up to a tick of its clock too soon.
        looked_at, first = max(self.due, asyncio.get_running_loop().time()), math.inf
        self._timer, self.due = None, math.inf
        for flight in self._flights:
            if flight.due > looked_at:
                first = min(first, flight.due)
            else:
                flight.end_wait()
        if first < math.inf:
            self.look_at(first)


class Flights:
    """All flights of one backend, and the clean-ups that follow some of them."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        self._silences = Silences(self._flights.values())
        self._stand_still = False
        self._clean_ups: set[asyncio.Task[None]] = set()

    def get(self, rid: str) -> Flight | None:
        return self._flights.get(rid)

    @contextmanager
    def enter(self, rid: str) -> Iterator[Flight]:
        """Raises EngineRejectedError for a rid that is in flight: two of one name could not be aborted apart."""
        if rid in self._flights:
            raise EngineRejectedError(f"rid {rid!r} is in flight already: give every generation a rid of its own")
        flight = self._flights[rid] = Flight(rid, self._silences)
        flight.stands_still = self._stand_still
        try:
            yield flight
        finally:
            del self._flights[rid]
            flight.finished.set()

    def stand_still(self) -> None:
        """The backend is paused: its silence has no limit until `go_on`."""
        self._set_still(stands_still=True)

    def go_on(self) -> None:
        self._set_still(stands_still=False)

    def _set_still(self, *, stands_still: bool) -> None:
        self._stand_still = stands_still
        for flight in self._flights.values():
            flight.stand_still(stands_still)

    def clean_up(self, work: Coroutine[object, object, None]) -> asyncio.Task[None]:
        """Runs `work` beside its caller, who may be cancelled; `work` bounds itself and raises nothing."""
        task = asyncio.get_running_loop().create_task(work)
        self._clean_ups.add(task)
        task.add_done_callback(self._clean_ups.discard)
        return task

    async def close(self, seconds: float) -> None:
        """Cuts every flight, lets clean-ups finish within `seconds`, and cancels what then still runs."""
        for flight in list(self._flights.values()):
            flight.cut()
        self._silences.close()
        endings = [asyncio.ensure_future(flight.finished.wait()) for flight in self._flights.values()]
        deadline = asyncio.get_running_loop().time() + seconds
        if endings:
            _, late = await asyncio.wait(endings, timeout=seconds)
            for ending in late:
                ending.cancel()
        while self._clean_ups:
            left = deadline - asyncio.get_running_loop().time()
            _, running = await asyncio.wait(self._clean_ups, timeout=max(0.0, left))
            for task in running:
                task.cancel()
