"""Generations under way, as `abort` and `close` see them.

Invariants

- A rid is in flight at most once. `finished` is set exactly when its `generate` is over.
- A flight that was cut never waits again: its current wait ends at once, and so does every later one.
- While the backend is paused no time limit counts. Afterwards each limit counts from its beginning: a generation with
  600 s to its first token, paused after 500, has 600 again.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from py_scheduler.errors import EngineRejectedError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine, Iterator


_LEEWAY = 1 + 1 / 16


class Flight:
    """One `generate` call. `backend_rid` is what the backend knows it as; empty while it knows nothing of it."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.backend_rid = ""
        self.abort_requested = False
        self.finished = asyncio.Event()
        self.was_cut = False
        self.stands_still = False
        self._seconds: float | None = None
        self._scope: asyncio.Timeout | None = None

    @asynccontextmanager
    async def watched(self, seconds: float | None = None) -> AsyncIterator[None]:
        """A stretch of waiting: TimeoutError after `seconds` without `allow`, or at once when cut."""
        if self.was_cut:
            raise TimeoutError
        async with asyncio.timeout(None) as scope:
            self._scope = scope
            try:
                self.allow(seconds)
                yield
            finally:
                self._scope = None

    def allow(self, seconds: float | None) -> None:
        """Sets the current stretch's limit to `seconds` from now, or up to a sixteenth more."""
        is_same, self._seconds = seconds == self._seconds, seconds
        if self._scope is None:
            return
        now = asyncio.get_running_loop().time()
        if self.was_cut:
            self._scope.reschedule(now)
        elif seconds is None or self.stands_still:
            self._scope.reschedule(None)
        else:
            # Told so by every event of a stream, and a timer that is moved costs as much as an event that is read.
            when = self._scope.when()
            if not is_same or when is None or when < now + seconds:
                self._scope.reschedule(now + seconds * _LEEWAY)

    def stand_still(self, stands_still: bool) -> None:
        self.stands_still = stands_still
        self.allow(self._seconds)

    def cut(self) -> None:
        self.was_cut = True
        self.allow(0)


class Flights:
    """All flights of one backend, and the clean-ups that follow some of them."""

    def __init__(self) -> None:
        self._flights: dict[str, Flight] = {}
        self._stand_still = False
        self._clean_ups: set[asyncio.Task[None]] = set()

    def get(self, rid: str) -> Flight | None:
        return self._flights.get(rid)

    @contextmanager
    def enter(self, rid: str) -> Iterator[Flight]:
        """Raises EngineRejectedError for a rid that is in flight: two of one name could not be aborted apart."""
        if rid in self._flights:
            raise EngineRejectedError(f"rid {rid!r} is in flight already: give every generation a rid of its own")
        flight = self._flights[rid] = Flight(rid)
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
