"""Who is served before an entry of the ready queue, as things stand: for whoever asks why it waits.

It looks at each entry once and sorts only the few that are told of, because the queue may be long. It takes the entries
of another flow or namespace to be of one size, their average, and what is held to stay so; the first of them are exact.
Training is owed 4 tokens before an eval's turn, and its 10 batches have 2 tokens on average: 2 of them are ahead.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.task import DEFAULT_NAMESPACE
from py_scheduler.scheduler.queue.entries import ARRIVAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from py_scheduler.scheduler.queue.entries import FlowKey, OrderKey, ReadyEntry
    from py_scheduler.scheduler.queue.flows import Flow, Flows
    from py_scheduler.scheduler.queue.ready_queue import ReadyQueue

    Ranked = tuple[float, OrderKey, ReadyEntry]
    """An entry, and what decides when it is served: its namespace's level by then, and its own order."""

_MAX_EXACT = 4_096
"""Beyond so many entries it does not matter which of two namespaces that are level is first."""


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


def ahead_of(
    queue: ReadyQueue,
    entry: ReadyEntry,
    now: float,
    limit: int = 0,
    is_there: Callable[[ReadyEntry], bool] = lambda _: True,
) -> Ahead:
    """Entries for which `is_there` is false are not counted."""
    entries: dict[str, list[ReadyEntry]] = {name: [] for name in queue.namespaces}
    for other in queue.entries():
        if other is not entry and is_there(other):
            entries[other.flow[0]].append(other)
    own = queue.namespaces[entry.flow[0]]
    counts, first = _ahead_in(own, entries.pop(own.namespace), entry, now, limit)
    before = sum(counts.values())
    level = queue.shares.level(own.namespace, now)
    each = queue.level_of(entry)
    start = level + before * each if before != len(first) else level + sum(map(queue.level_of, first))
    ranked = _ranked(queue, first, level)
    elsewhere: dict[str, int] = {}
    for namespace, others in entries.items():
        flows = queue.namespaces[namespace]
        left = queue.room.quota_left(namespace)
        if left is not None and left <= 0:
            continue
        count, foremost = _served_until(queue, flows, others, entry, start, now, limit)
        if count:
            elsewhere[namespace] = count
            ranked += _ranked(queue, foremost, queue.shares.level(namespace, now))
    ranked.sort(key=lambda rank: rank[:2])
    return Ahead([other for _, _, other in ranked[:limit]], counts, elsewhere)


def _ranked(queue: ReadyQueue, entries: Iterable[ReadyEntry], level: float) -> list[Ranked]:
    """Entries of one namespace, in their order, each with its namespace's level when it is served."""
    ranked: list[Ranked] = []
    for other in entries:
        ranked.append((level, other.order, other))
        level += queue.level_of(other)
    return ranked


def _served_until(
    queue: ReadyQueue,
    flows: Flows,
    entries: list[ReadyEntry],
    entry: ReadyEntry,
    start: float,
    now: float,
    limit: int,
) -> tuple[int, list[ReadyEntry]]:
    """How many entries of another namespace come before one whose turn is at a level, and the first of them."""
    level = queue.shares.level(flows.namespace, now)
    if not entries or level > start:
        return 0, []
    each = sum(map(queue.level_of, entries)) / len(entries)
    turns = (start - level) / each if each else float(len(entries))
    whole = min(len(entries), math.floor(turns + 1e-9))
    is_level = math.isclose(turns, whole, abs_tol=1e-9)
    count = whole if is_level else min(len(entries), math.ceil(turns))
    wanted = min(len(entries), max(min(limit, count), count + 1 if is_level and count < _MAX_EXACT else 0))
    first = _first_of(flows, entries, now, wanted)
    if is_level and count < len(first) and first[count].order < entry.order:
        count += 1
    return count, first[: min(limit, count)]


def _first_of(flows: Flows, entries: list[ReadyEntry], now: float, limit: int) -> list[ReadyEntry]:
    """The first entries of a namespace, in the order of service."""
    overdue, rest, given = _by_age(flows, entries, now)
    first = heapq.nsmallest(limit, overdue, key=_age)
    ranked: list[tuple[tuple[object, ...], ReadyEntry]] = []
    for key, others in rest.items():
        ranked += _in_flow(flows.waiting[key], given[key], others, limit - len(first))
    return first + [other for _, other in heapq.nsmallest(limit - len(first), ranked, key=lambda rank: rank[0])]


def _by_age(
    flows: Flows, entries: list[ReadyEntry], now: float
) -> tuple[list[ReadyEntry], dict[FlowKey, list[ReadyEntry]], dict[FlowKey, int]]:
    """What goes first for its age, the rest by flow, and what the former is charged to each."""
    overdue: list[ReadyEntry] = []
    rest: dict[FlowKey, list[ReadyEntry]] = {key: [] for key in flows.waiting}
    given = dict.fromkeys(flows.waiting, 0)
    for other in entries:
        if flows.is_overdue(other, now):
            overdue.append(other)
            given[other.flow] += other.cost
        else:
            rest[other.flow].append(other)
    return overdue, rest, given


def _ahead_in(
    flows: Flows, entries: list[ReadyEntry], entry: ReadyEntry, now: float, limit: int
) -> tuple[dict[FlowKey, int], list[ReadyEntry]]:
    """What is ahead of an entry in its own namespace: how many of each flow, and the first of them in their order."""
    overdue, rest, given = _by_age(flows, entries, now)
    if flows.is_overdue(entry, now):
        older = [other for other in overdue if _age(other) < _age(entry)]
        return _counted(older), heapq.nsmallest(limit, older, key=_age)
    own = flows.waiting[entry.flow]
    before = [other for other in rest[own.key] if other.order < entry.order]
    ranked = _in_flow(own, given[own.key], before, limit)
    counts = _counted([*overdue, *before])
    start = own.time_after(given[own.key] + sum([other.cost for other in before]))
    for flow in flows.waiting.values():
        if flow is own or flow.is_background > own.is_background:
            continue
        count = len(rest[flow.key])
        if flow.is_background == own.is_background:
            count = _turns_until(start, flow, given[flow.key], rest[flow.key], entry)
        if count:
            counts[flow.key] = counts.get(flow.key, 0) + count
            ranked += _in_flow(flow, given[flow.key], rest[flow.key], min(limit, count))
    oldest = heapq.nsmallest(limit, overdue, key=_age)
    return counts, [*oldest, *(other for _, other in sorted(ranked, key=lambda rank: rank[0]))][:limit]


def _age(entry: ReadyEntry) -> tuple[float, int]:
    return entry.queued_at, entry.order[ARRIVAL]


def _counted(entries: Iterable[ReadyEntry]) -> dict[FlowKey, int]:
    counts: dict[FlowKey, int] = {}
    for entry in entries:
        counts[entry.flow] = counts.get(entry.flow, 0) + 1
    return counts


def _turns_until(start: float, flow: Flow, given: int, entries: list[ReadyEntry], entry: ReadyEntry) -> int:
    """How many of another flow's entries come before one whose turn is at `start` in virtual time."""
    if not entries:
        return 0
    each = sum([other.cost for other in entries]) / len(entries)
    turns = max(0.0, flow.cost_until(start) - given) / each
    whole = math.floor(turns + 1e-9)
    count = math.ceil(turns)
    if flow.time_after(given) <= start and math.isclose(turns, whole, abs_tol=1e-9):
        # Level at that moment: then the foremost entry of both is first.
        count = whole + (sum([other.order < entry.order for other in entries]) > whole)
    return min(len(entries), count)


def _in_flow(
    flow: Flow, given: int, entries: list[ReadyEntry], limit: int
) -> list[tuple[tuple[object, ...], ReadyEntry]]:
    """The first entries of a flow, each with its place among all flows of its namespace."""
    ranked: list[tuple[tuple[object, ...], ReadyEntry]] = []
    cost = given
    for entry in heapq.nsmallest(limit, entries, key=lambda entry: entry.order):
        ranked.append(((flow.is_background, flow.time_after(cost), entry.order), entry))
        cost += entry.cost
    return ranked


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
