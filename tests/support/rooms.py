"""Rooms of a ready queue whose test says by hand what fits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.scheduler.queue.room import Room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.scheduler.queue.entries import ReadyEntry


class OneKindOfRoom(Room):
    """Everybody wants the same, and whatever is admitted takes what those before it could have used."""

    def took_from(self, entry: ReadyEntry, head: ReadyEntry) -> bool:
        return True

    def reserve(self, entry: ReadyEntry, heads: Sequence[ReadyEntry]) -> bool:
        return False


class RoomOfEachEvaluator(Room):
    """Entries of one evaluator want the same, and of two nothing in common."""

    def took_from(self, entry: ReadyEntry, head: ReadyEntry) -> bool:
        return entry.shape[0] == head.shape[0]

    def reserve(self, entry: ReadyEntry, heads: Sequence[ReadyEntry]) -> bool:
        return not any(entry.shape[0] == head.shape[0] for head in heads)


class StrandedRoom(OneKindOfRoom):
    """Of which a head may never get enough."""

    def fits_ever(self, entry: ReadyEntry) -> bool:
        return False
