"""Who waits for children of one key, and which places there are for it."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from typing import TYPE_CHECKING

from py_scheduler.domain.runners import RunnerState

if TYPE_CHECKING:
    from py_scheduler.domain.ports import TimerHandle
    from py_scheduler.domain.runners import RunnerKey
    from py_scheduler.execution.child_place import ChildPlace


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
