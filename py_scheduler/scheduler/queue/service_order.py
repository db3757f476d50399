"""Who is served before an entry of the ready queue, as things stand: for whoever asks why it waits.

It looks at each entry once, in slices, because the queue may be long: a million entries take two seconds, and the loop
goes on meanwhile. So it tells of the entries that stood there when it came to those of their shape. It counts them and
keeps only the few that are told of. It takes the entries of another flow to be of one size, their average, those of
another namespace behind the first 256 too, and what is held to stay so. Training is owed 4 tokens before an eval's
turn, and its 10 batches have 2 tokens on average: 2 of them are ahead.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING, TypeVar

import msgspec

from py_scheduler.domain.task import DEFAULT_NAMESPACE
from py_scheduler.scheduler.queue.entries import ENTRY, age_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from py_scheduler.scheduler.queue.entries import FlowKey, OrderKey, ReadyEntry
    from py_scheduler.scheduler.queue.flows import Flow, Flows, Item
    from py_scheduler.scheduler.queue.ready_queue import ReadyQueue

    Ranked = tuple[float, OrderKey, ReadyEntry]
    """An entry, and what decides when it is served: its namespace's level by then, and its own order."""
    Aged = tuple[float, int, ReadyEntry]
    """An entry that goes first for its age, behind what decides which of those is first."""

_Comparable = TypeVar("_Comparable", "Item", "Aged")

_MAX_EXACT = 256
"""So many entries of another namespace are looked at one by one."""
_ROUNDING = 1e-9
"""Of a turn: what is apart by less is level."""
_STEP = 1_000
"""Entries that are looked at before the loop may be given back."""


class Ahead(msgspec.Struct):
    """first: in the order of service, at most as many as were asked for. How many there are: `counts` in each flow of
    the entry's own namespace, `elsewhere` in each of the others.
    """

    first: list[ReadyEntry]
    counts: dict[FlowKey, int]
    elsewhere: dict[str, int] = {}

    @property
    def in_all(self) -> int:
        return sum(self.counts.values()) + sum(self.elsewhere.values())


def look_ahead_of(
    queue: ReadyQueue, entry: ReadyEntry, now: float, is_there: Callable[[ReadyEntry], bool], limit: int = 0
) -> Generator[None, None, Ahead]:
    """What is ahead of an entry; in slices. When the entry itself has gone meanwhile, nothing is.

    is_there: whether anything of an entry still waits. The queue cannot say: it is told late of what has ended.
    """
    lines = [_Line(queue, flows, entry, now) for flows in queue.namespaces.values()]
    for line in lines:
        yield from line.count(limit, is_there)
    if entry.is_gone:
        return Ahead([], {})
    own = next(line for line in lines if line.namespace == entry.flow[0])
    counts, first, higher = own.ahead(limit)
    level = queue.shares.level(own.namespace, now)
    start = level + (higher if sum(counts.values()) != len(first) else sum(map(queue.level_of, first)))
    ranked = _ranked(queue, first, level)
    elsewhere: dict[str, int] = {}
    for line in lines:
        left = queue.room.quota_left(line.namespace)
        if line is own or (left is not None and left <= 0):
            continue
        count, foremost = line.served_until(start, limit)
        if count:
            elsewhere[line.namespace] = count
            ranked += _ranked(queue, foremost, queue.shares.level(line.namespace, now))
        yield
    ranked.sort(key=lambda rank: rank[:2])
    return Ahead([other for _, _, other in ranked[:limit]], counts, elsewhere)


def _ranked(queue: ReadyQueue, entries: Iterable[ReadyEntry], level: float) -> list[Ranked]:
    """Entries of one namespace, in their order, each with its namespace's level when it is served."""
    ranked: list[Ranked] = []
    for other in entries:
        ranked.append((level, other.order, other))
        level += queue.level_of(other)
    return ranked


class _FlowCount:
    """What one flow has waiting. `before`: of an earlier order than the entry that is asked about. `first`: in order.
    Apart from these are the `overdue`, which go first for their age; `older` of them are older than that entry. Each
    `level`: how much higher their namespace's level is once they were admitted.
    """

    __slots__ = (
        "before",
        "before_cost",
        "before_level",
        "cost",
        "count",
        "first",
        "flow",
        "level",
        "older",
        "older_level",
        "overdue",
        "overdue_cost",
        "overdue_level",
    )

    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.count = self.cost = self.before = self.before_cost = 0
        self.overdue = self.overdue_cost = self.older = 0
        self.level = self.before_level = self.overdue_level = self.older_level = 0.0
        self.first: list[Item] = []

    def ranked(self, limit: int) -> list[tuple[tuple[object, ...], ReadyEntry]]:
        """The first entries, each with its place among all flows of its namespace."""
        ranked: list[tuple[tuple[object, ...], ReadyEntry]] = []
        cost = self.overdue_cost
        for item in self.first[:limit]:
            entry: ReadyEntry = item[ENTRY]
            ranked.append(((self.flow.is_background, self.flow.time_after(cost), entry.order), entry))
            cost += entry.cost
        return ranked

    def turns_until(self, start: float) -> int:
        """How many of them come before an entry of another flow whose turn is at `start` in virtual time."""
        if not self.count:
            return 0
        each = self.cost / self.count
        turns = max(0.0, self.flow.cost_until(start) - self.overdue_cost) / each
        whole = math.floor(turns + 1e-9)
        count = math.ceil(turns)
        if self.flow.time_after(self.overdue_cost) <= start and math.isclose(turns, whole, abs_tol=1e-9):
            # Level at that moment: then the foremost entry of both is first.
            count = whole + (self.before > whole)
        return min(self.count, count)


class _Line:
    """What one namespace has waiting beside the entry that is asked about."""

    def __init__(self, queue: ReadyQueue, flows: Flows, entry: ReadyEntry, now: float) -> None:
        self.namespace = flows.namespace
        self._queue = queue
        self._flows = flows
        self._entry = entry
        self._now = now
        self._has_overdue = flows.is_overdue(flows.foremost(now), now)
        self._counts = {key: _FlowCount(flow) for key, flow in flows.waiting.items()}
        self._oldest: list[Aged] = []
        """The first of those that go first for their age."""

    # Counting

    def count(self, limit: int, is_there: Callable[[ReadyEntry], bool]) -> Generator[None, None, None]:
        """limit: how many of the first are to be known."""
        queue, entry = self._queue, self._entry
        kept = max(limit, _MAX_EXACT) if self.namespace != entry.flow[0] else limit
        for counted, shape in [(each, shape) for each in self._counts.values() for shape in each.flow.shapes]:
            heap = counted.flow.heap(shape)
            if not heap:
                continue  # They have gone meanwhile.
            some: ReadyEntry = heap[0][ENTRY]  # The others want the same.
            each = queue.shares.level_of(self.namespace, some.shape[0], some.per_sample, 1)
            for begin in range(0, len(heap), _STEP):
                items = [
                    item
                    for item in heap[begin : begin + _STEP]
                    if (other := item[ENTRY]) is not entry and is_there(other)
                ]
                self._add(counted, items, kept, each)
                yield

    def _add(self, counted: _FlowCount, items: list[Item], kept: int, each: float) -> None:
        """Counts entries of one flow and shape. each: what a token of them adds to the namespace's level."""
        if not items:
            return
        cost: int = items[0][ENTRY].cost
        if self._has_overdue:
            items = self._add_overdue(counted, items, kept, each)
        before = [item for item in items if item < self._entry.order]
        counted.count += len(items)
        counted.cost += cost * len(items)
        counted.level += each * sum([item[ENTRY].tokens for item in items])
        counted.before += len(before)
        counted.before_cost += cost * len(before)
        counted.before_level += each * sum([item[ENTRY].tokens for item in before])
        counted.first = _first_of(counted.first, items, kept)

    def _add_overdue(self, counted: _FlowCount, items: list[Item], kept: int, each: float) -> list[Item]:
        """Counts what goes first for its age; the rest."""
        rest: list[Item] = []
        overdue: list[Aged] = []
        for item in items:
            other = item[ENTRY]
            if self._flows.is_overdue(other, self._now):
                overdue.append((*age_of(other), other))
                counted.overdue_cost += other.cost
            else:
                rest.append(item)
        older = [aged for aged in overdue if aged < age_of(self._entry)]
        counted.overdue += len(overdue)
        counted.overdue_level += each * sum([aged[ENTRY].tokens for aged in overdue])
        counted.older += len(older)
        counted.older_level += each * sum([aged[ENTRY].tokens for aged in older])
        self._oldest = _first_of(self._oldest, overdue, kept)
        return rest

    # What it comes to

    def ahead(self, limit: int) -> tuple[dict[FlowKey, int], list[ReadyEntry], float]:
        """What is ahead of the entry in its own namespace: how many of each flow, the first in their order, and how
        much higher the namespace's level is after all of them.
        """
        entry = self._entry
        if self._flows.is_overdue(entry, self._now):
            older = {key: counted.older for key, counted in self._counts.items() if counted.older}
            higher = sum([counted.older_level for counted in self._counts.values()])
            return older, [aged[ENTRY] for aged in self._oldest if aged < age_of(entry)][:limit], higher
        own = self._counts[entry.flow]
        start = own.flow.time_after(own.overdue_cost + own.before_cost)
        counts: dict[FlowKey, int] = {}
        ranked: list[tuple[tuple[object, ...], ReadyEntry]] = []
        higher = 0.0
        for key, counted in self._counts.items():
            count = self._ahead_in(counted, own, start)
            if count + counted.overdue:
                counts[key] = count + counted.overdue
                among = counted.before_level if counted is own else counted.level * count / max(1, counted.count)
                higher += counted.overdue_level + among
            ranked += counted.ranked(min(limit, count))
        ranked.sort(key=lambda rank: rank[0])
        first = [*(aged[ENTRY] for aged in self._oldest), *(other for _, other in ranked)][:limit]
        return counts, first, higher

    @staticmethod
    def _ahead_in(counted: _FlowCount, own: _FlowCount, start: float) -> int:
        """start: the entry's turn, in virtual time."""
        if counted is own:
            return own.before
        if counted.flow.is_background != own.flow.is_background:
            return counted.count if own.flow.is_background else 0
        return counted.turns_until(start)

    def served_until(self, start: float, limit: int) -> tuple[int, list[ReadyEntry]]:
        """How many entries of this namespace come before one of another whose turn is at a level, and the first of
        them.
        """
        level = self._queue.shares.level(self.namespace, self._now)
        ends = level + sum([counted.level + counted.overdue_level for counted in self._counts.values()])
        first = self._first(max(limit, _MAX_EXACT))
        for number, other in enumerate(first):
            each = self._queue.level_of(other)
            is_level = abs(level - start) <= each * _ROUNDING
            if other.order > self._entry.order if is_level else level > start:
                return number, first[: min(limit, number)]
            level += each
        rest = sum([counted.count + counted.overdue for counted in self._counts.values()]) - len(first)
        if rest and ends > level:
            turns = max(0.0, start - level) / ((ends - level) / rest)
            rest = min(rest, math.ceil(turns - _ROUNDING))
        return len(first) + rest, first[:limit]

    def _first(self, limit: int) -> list[ReadyEntry]:
        """The first entries, in the order of service."""
        first: list[ReadyEntry] = [aged[ENTRY] for aged in self._oldest[:limit]]
        left = limit - len(first)
        ranked = [rank for counted in self._counts.values() for rank in counted.ranked(left)]
        return first + [other for _, other in heapq.nsmallest(left, ranked, key=lambda rank: rank[0])]


def _first_of(first: list[_Comparable], more: list[_Comparable], limit: int) -> list[_Comparable]:
    """The first of both, in order."""
    if limit and len(first) >= limit:
        last = first[-1]
        more = [item for item in more if item < last]
    return heapq.nsmallest(limit, first + more) if more else first


def describe_ahead(queue: ReadyQueue, entry: ReadyEntry, ahead: Ahead) -> str:
    """Why an entry that would fit is not served yet."""
    if not ahead.in_all:
        return "nothing is ahead of it: it comes next"
    said = "1 batch is ahead of it" if ahead.in_all == 1 else f"{ahead.in_all} batches are ahead of it"
    own = entry.flow[0]
    parts, itself = [], []
    if len(queue.namespaces[own].waiting) > 1:
        weight_of = queue.policy.weight_of
        parts = [f"{count} of {_name(key)} (weight {weight_of(key):g})" for key, count in sorted(ahead.counts.items())]
        itself = [f"of {_name(entry.flow)} (weight {weight_of(entry.flow):g})"]
    elif ahead.counts and len(queue.namespaces) > 1:
        parts = [f"{sum(ahead.counts.values())} of its own namespace"]
    if len(queue.namespaces) > 1:
        weight_of_namespace = queue.shares.weight_of
        parts += [
            f"{count} of namespace {namespace!r} (weight {weight_of_namespace(namespace):g})"
            for namespace, count in sorted(ahead.elsewhere.items())
        ]
        itself.append(f"of namespace {own!r} (weight {weight_of_namespace(own):g})")
    return f"{said}: {', '.join(parts)}; itself it is {', '.join(itself)}" if parts else said


def _name(key: FlowKey) -> str:
    namespace, is_eval = key
    kind = "evals" if is_eval else "training"
    return kind if namespace == DEFAULT_NAMESPACE else f"{kind} in {namespace!r}"
