"""The places of an evaluator's children, and by key who waits for which. Nothing is started or ended here.

Invariant: a place is in the line of its key from `new` to `drop`.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from py_scheduler.domain.runners import ANYWHERE, RunnerState
from py_scheduler.execution.child_line import Line
from py_scheduler.execution.child_place import ChildPlace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.runners import RunnerKey


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
