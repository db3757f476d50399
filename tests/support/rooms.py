"""Rooms of a ready queue whose test says by hand what fits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler.scheduler.queue.rivalry import Rivalry
from py_scheduler.scheduler.queue.room import Room

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.scheduler.queue.entries import ReadyEntry


class EndlessRoom(Room):
    """Without a pool; leases fit too."""

    def take(self, entry: ReadyEntry, now: float) -> Any:
        self.shares.take(entry.flow[0], entry.shape[0], entry.per_sample, entry.tokens, now)
        return [None] * entry.tokens


class OneKindOfRoom(Rivalry):
    """Everybody wants the same, and whatever is admitted takes what those before it could have used."""

    def __init__(self, room: Room | None = None) -> None:
        super().__init__(room or EndlessRoom())

    def took_from(self, entry: ReadyEntry, head: ReadyEntry) -> bool:
        return True

    def has_to_take_from(self, entry: ReadyEntry, heads: Sequence[ReadyEntry]) -> bool:
        return True


class RoomOfEachEvaluator(OneKindOfRoom):
    """Entries of one evaluator want the same, and of two nothing in common."""

    def took_from(self, entry: ReadyEntry, head: ReadyEntry) -> bool:
        return entry.shape[0] == head.shape[0]

    def has_to_take_from(self, entry: ReadyEntry, heads: Sequence[ReadyEntry]) -> bool:
        return any(self.took_from(entry, head) for head in heads)


class StrandedRoom(Room):
    """Of which a head may never get enough."""

    def fits_ever(self, entry: ReadyEntry) -> bool:
        return False
