"""Who competes for room with whom: whether one that goes takes what another, which waits before it, could have used.

An entry that was let in took from a waiting one, the head, if the head now *waits for* a kind of room that the entry
took, on a node that could hold the head's tokens. The same is asked beforehand, of what an entry would get.

A head waits for a kind of room of the pool if the pool could not give it all its tokens of that kind alone. Say that it
wants 8 GPUs with 4 CPUs each, and that no GPU and 60 CPUs are free: it waits for GPUs. A sample of 1 CPU leaves it 59
of the 32 CPUs that it needs, and takes nothing from it. Once 32 are left, the next such sample does. If each kind alone
would do, but never on one node together, the head waits for all of them.

Quotas and permits are kinds of room too. What waits for the quota of its own namespace waits for nobody else: another
namespace takes nothing from it.

Invariant: what is known to be short is forgotten when anything comes back. Until then what is taken only makes more of
it short.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.resources import AMOUNTS, Resource
from py_scheduler.scheduler.queue.entries import ReadyBatch

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.queue.entries import DemandKey, ReadyEntry
    from py_scheduler.scheduler.queue.room import Room

_MAX_KNOWN = 1_024
"""Demands of leases are without number: no end of them may be remembered."""


class _Demand(msgspec.Struct):
    """What is known of one demand."""

    parts: dict[str, Resource]
    """Of each kind of room that it takes: a demand of that alone, on the same nodes."""
    labels: dict[str, str]
    is_for_any_node: bool = False
    """Whether every node could hold a token of it, were it empty."""
    layout: int = -1
    """The pool's layout of which that was said."""


class Rivalry:
    """Between the entries that wait for one room."""

    def __init__(self, room: Room) -> None:
        self.room = room
        self._demands: dict[DemandKey, _Demand] = {}
        self.known_short: dict[DemandKey, set[tuple[int, str]]] = {}
        """Of each demand that waits, how many tokens of it some kind of room is short of. Cleared when something comes
        back.
        """

    def forget(self, key: DemandKey) -> None:
        """The last of a demand waits no longer. Where another flow has more of it, it is asked anew."""
        self.known_short.pop(key, None)

    def took_from(self, entry: ReadyEntry, head: ReadyEntry) -> bool:
        """Whether the entry, which was let in last, took room that a waiting head could have used."""
        if self._waits_for_quota(head, entry, 0):
            return _are_of_one_namespace(entry, head)
        if self._waits_for_permits(head, entry, 0):
            return True
        pool = self.room.pool
        kinds = self._shared_kinds(entry, head) if pool is not None else []
        if pool is None or not kinds:
            return False
        return _could_use(pool, head, self.room.last_taken) and self._waits_for(pool, head, kinds, is_settled=True)

    def has_to_take_from(self, entry: ReadyEntry, heads: Sequence[ReadyEntry]) -> bool:
        """Whether an entry fits now and, if it was let in, could only get room that one of these heads could use.

        What it gets of the pool without that is reserved for it, and to be taken at once.
        """
        rivals: list[tuple[ReadyEntry, list[str]]] = []
        pool = self.room.pool
        for head in heads:
            if self._waits_for_quota(head, entry, entry.tokens):
                if _are_of_one_namespace(entry, head):
                    return self.room.fits_now(entry)
            elif self._waits_for_permits(head, entry, entry.tokens):
                return self.room.fits_now(entry)
            elif pool is not None and (kinds := self._shared_kinds(entry, head)):
                if self._is_for_any_node(pool, head) and self._waits_for(pool, head, kinds, is_settled=True):
                    return self.room.fits_now(entry)
                rivals.append((head, kinds))
        if pool is None or not rivals or self.room.lacks_permits(entry):
            return False
        losing: list[ReadyEntry] = []
        while (tokens := self.room.reserve(entry, apart_from=losing)) is not None:
            # Apart from those alone that would lose something: only nodes of the others may be left.
            more = [
                head
                for head, kinds in rivals
                if _could_use(pool, head, tokens) and self._waits_for(pool, head, kinds, is_settled=False)
            ]
            if not more:
                return False
            losing += more
        return bool(losing)

    # What a head waits for

    def _waits_for_quota(self, head: ReadyEntry, entry: ReadyEntry, more: int) -> bool:
        """Whether a head is capped by its quota once the entry has so many tokens more."""
        left = self.room.quota_left(head.flow[0])
        return left is not None and left - more * _are_of_one_namespace(entry, head) < head.tokens

    def _waits_for_permits(self, head: ReadyEntry, entry: ReadyEntry, more: int) -> bool:
        """Whether a head lacks permits, which the entry takes too, once it has so many more."""
        return isinstance(entry, ReadyBatch) and self.room.lacks_permits(head, more)

    def _waits_for(self, pool: PlacementPool, head: ReadyEntry, kinds: Sequence[str], *, is_settled: bool) -> bool:
        """Whether a head waits for one of these kinds of room. is_settled: whether what is held now stays so until
        something comes back.
        """
        if any(self._is_short_of(pool, head, kind, is_settled=is_settled) for kind in kinds):
            return True
        if pool.free_tokens_for(head.per_sample) >= head.tokens:
            return False
        others = self._demand(head).parts.keys() - kinds
        return not any(self._is_short_of(pool, head, kind, is_settled=is_settled) for kind in others)

    def _is_short_of(self, pool: PlacementPool, head: ReadyEntry, kind: str, *, is_settled: bool) -> bool:
        """Whether the pool could not give a head all its tokens of one kind alone."""
        key, known = head.shape[0], (head.tokens, kind)
        if known in self.known_short.get(key, ()):
            return True
        is_short = pool.free_tokens_for(self._demand(head).parts[kind]) < head.tokens
        if is_short and is_settled:
            self.known_short.setdefault(key, set()).add(known)
        return is_short

    def _shared_kinds(self, entry: ReadyEntry, head: ReadyEntry) -> list[str]:
        """The kinds of room that both take, if a node can have the labels of both."""
        one, other = self._demand(entry), self._demand(head)
        if one.labels and any(other.labels.get(label, value) != value for label, value in one.labels.items()):
            return []
        return [kind for kind in one.parts if kind in other.parts]

    def _demand(self, entry: ReadyEntry) -> _Demand:
        demand = self._demands.get(entry.shape[0])
        if demand is None:
            if len(self._demands) >= _MAX_KNOWN:
                self._demands.clear()
            demand = self._demands[entry.shape[0]] = _Demand(
                _parts_of(entry.per_sample), entry.per_sample.required_labels
            )
        return demand

    def _is_for_any_node(self, pool: PlacementPool, head: ReadyEntry) -> bool:
        demand, layout = self._demand(head), pool.layout_version
        if demand.layout != layout:
            demand.is_for_any_node, demand.layout = pool.could_hold_everywhere(head.per_sample), layout
        return demand.is_for_any_node


def _are_of_one_namespace(one: ReadyEntry, other: ReadyEntry) -> bool:
    return one.flow[0] == other.flow[0]


def _could_use(pool: PlacementPool, head: ReadyEntry, tokens: Iterable[PlacementToken | None]) -> bool:
    """Whether any of these tokens is on a node that could hold one of a head's."""
    nodes = {token.node_ip for token in tokens if token is not None}
    return any(pool.could_hold(head.per_sample, node_ip) for node_ip in nodes)


def _parts_of(demand: Resource) -> dict[str, Resource]:
    labels = demand.required_labels
    parts = {
        kind: Resource(**{kind: amount}, required_labels=labels)
        for kind in AMOUNTS
        if (amount := getattr(demand, kind)) > 0
    }
    return parts | {
        f"named.{name}": Resource(named={name: amount}, required_labels=labels) for name, amount in demand.named.items()
    }
