"""The places of an evaluator's children, and by key who waits for which. Nothing is started or ended here.

Invariant: a place is in the line of its key from `new` to `drop`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.runners.runner import ANYWHERE, RunnerState, RunnerView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.ports import TimerHandle
    from py_scheduler.domain.runners.runner import RunnerKey
    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.execution.children.session import ChildSession


class ChildPlace:
    """Where one child lives, and after it the next: kept over restarts.

    failed_tries: starts in a row that came to nothing. failed_rounds: how often in a row all tries did.
    has_played: the child that is there now, whether it was ever given to a slot.
    """

    def __init__(self, runner_id: str, key: RunnerKey) -> None:
        self.runner_id = runner_id
        self.key = key
        self.state = RunnerState.STARTING
        self.session: ChildSession | None = None
        self.running: RunningAttempt | None = None
        self.restarts = 0
        self.failed_tries = 0
        self.failed_rounds = 0
        self.has_played = False
        self.message = ""

    def view(self, kind: str, evaluator_id: str, now: float) -> RunnerView:
        """As it stands. now: monotonic seconds."""
        view = RunnerView(
            runner_id=self.runner_id,
            kind=kind,
            state=self.state,
            evaluator_id=evaluator_id,
            node_ip=self.key[0],
            gpu_ids=self.key[1] or (),
            pid=self.session.child.pid if self.session is not None else 0,
            restarts=self.restarts,
            message=self.message,
        )
        running = self.running
        if running is None:
            return view
        return msgspec.structs.replace(
            view,
            submission_id=running.planned.submission_id,
            task_id=running.ref.task_id,
            sample_no=running.sample_no,
            attempt_no=running.ref.attempt_no,
            begun_unix_seconds=running.began_unix_seconds,
            running_seconds=now - running.began_at,
            keys=dict(running.shown),
        )


class Waiter:
    """A slot that wants a child. arrival_no: who is older goes first, whichever of the children would do for both."""

    def __init__(self, arrival_no: int) -> None:
        self.arrival_no = arrival_no
        self.given: asyncio.Future[ChildPlace] = asyncio.get_running_loop().create_future()


class Line:
    """Of one key.

    failed: the place whose start failed last, if it has not been tried again; of several the first.
    may_try_again: the backoff of that place is over.
    """

    def __init__(self, key: RunnerKey) -> None:
        self.key = key
        self.places: set[ChildPlace] = set()
        self.idle: list[ChildPlace] = []
        self.failed: ChildPlace | None = None
        self.may_try_again = False
        self.backoff: TimerHandle | None = None
        self._waiters: deque[Waiter] = deque()

    @property
    def first(self) -> Waiter | None:
        """Who has waited longest, without those that were cancelled and have not had their turn to leave yet."""
        while self._waiters and self._waiters[0].given.done():
            self._waiters.popleft()
        return self._waiters[0] if self._waiters else None

    @property
    def arrival_no(self) -> float:
        """Of the first."""
        return math.inf if self.first is None else self.first.arrival_no

    @property
    def missing(self) -> int:
        """How many are waited for beyond those that are on their way."""
        waiting = sum(not waiter.given.done() for waiter in self._waiters)
        return waiting - sum(place.state is RunnerState.STARTING for place in self.places)

    @property
    def has_live_places(self) -> bool:
        """Also such as are on their way."""
        return any(place is not self.failed for place in self.places)

    @property
    def is_held_back(self) -> bool:
        """Its last start failed, and it is too early for another."""
        return self.failed is not None and not self.may_try_again

    def join(self, arrival_no: int) -> Waiter:
        waiter = Waiter(arrival_no)
        self._waiters.append(waiter)
        return waiter

    def withdraw(self, waiter: Waiter) -> ChildPlace | None:
        """What it was given before it could be told that it is no longer to wait."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        given = waiter.given
        if not given.done() or given.cancelled() or given.exception() is not None:
            return None
        return given.result()

    def give(self, place: ChildPlace) -> None:
        """To the first, who must be there."""
        self._waiters.popleft().given.set_result(place)

    def refuse_all(self, error: Exception) -> None:
        while (waiter := self.first) is not None:
            waiter.given.set_exception(error)

    def forget_failure(self) -> None:
        if self.backoff is not None:
            self.backoff.cancel()
        self.failed = self.backoff = None
        self.may_try_again = False


class ChildPlaces:
    """max_live: how many may have a child or one on its way."""

    def __init__(self, evaluator_id: str, max_live: int) -> None:
        self._evaluator_id = evaluator_id
        self._max_live = max_live
        self._numbers = itertools.count()
        self._places: dict[str, ChildPlace] = {}
        self._lines: dict[RunnerKey, Line] = {}

    def __iter__(self) -> Iterator[ChildPlace]:
        return iter(self._places.values())

    def new(self, key: RunnerKey) -> ChildPlace:
        place = ChildPlace(f"{self._evaluator_id}/{next(self._numbers)}", key)
        self._places[place.runner_id] = place
        self.line(key).places.add(place)
        return place

    def drop(self, place: ChildPlace) -> None:
        line = self.line(place.key)
        del self._places[place.runner_id]
        line.places.discard(place)
        if line.failed is place:
            line.forget_failure()

    def clear(self) -> None:
        self._places.clear()
        self._lines.clear()

    # Lines

    def line(self, key: RunnerKey) -> Line:
        return self._lines.setdefault(key, Line(key))

    @property
    def lines(self) -> list[Line]:
        """Whose first has waited longest comes first."""
        return sorted(self._lines.values(), key=lambda line: line.arrival_no)

    def line_served_by(self, place: ChildPlace) -> Line:
        """Of those that a place would do for, the one whose first has waited longest."""
        return min(self.line(place.key), self.line(ANYWHERE), key=lambda line: line.arrival_no)

    def line_with_idle(self, key: RunnerKey) -> Line | None:
        """One with idle children that would do for the key."""
        line = self.line(key)
        if not line.idle and key == ANYWHERE:
            return next((line for line in self._lines.values() if line.idle), None)
        return line if line.idle else None

    # What holds of all

    @property
    def has_room(self) -> bool:
        return sum(place.state is not RunnerState.FAILED for place in self) < self._max_live

    def is_anybody_starved(self, arrival_no: float) -> bool:
        """Whether somebody who came before that number waits for children of which there is none."""
        return any(
            line.arrival_no < arrival_no and not (line.has_live_places or line.is_held_back)
            for line in self._lines.values()
        )

    def is_hopeless(self, line: Line) -> bool:
        """Whether nothing lives that could serve who waits there."""
        serving = self._lines.values() if line.key == ANYWHERE else [line]
        return not any(line.has_live_places for line in serving)
