"""Who is served before an entry of the ready queue, as things stand: for whoever asks why it waits.

Looks at each entry once and sorts none but the few that are told of, because the queue may be long. Between flows it
takes the entries of the other flow to be of one size; the first of them are exact.
"""

from __future__ import annotations

import heapq
import math
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.task import DEFAULT_NAMESPACE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from py_scheduler.scheduler.flows import Flow, FlowKey, ReadyEntry
    from py_scheduler.scheduler.ready_queue import ReadyQueue


class Ahead(msgspec.Struct):
    """first: in the order of service, at most as many as were asked for. counts: how many there are of each flow."""

    first: list[ReadyEntry]
    counts: dict[FlowKey, int]

    @property
    def in_all(self) -> int:
        return sum(self.counts.values())


def ahead_of(
    queue: ReadyQueue,
    entry: ReadyEntry,
    now: float,
    limit: int = 0,
    is_there: Callable[[ReadyEntry], bool] = lambda _: True,
) -> Ahead:
    """Entries for which `is_there` is false are not counted."""
    overdue: list[ReadyEntry] = []
    rest: dict[FlowKey, list[ReadyEntry]] = {key: [] for key in queue.flows.waiting}
    for other in queue.entries():
        if other is not entry and is_there(other):
            if queue.is_overdue(other, now):
                overdue.append(other)
            else:
                rest[other.flow].append(other)
    if queue.is_overdue(entry, now):
        older = [other for other in overdue if _age(other) < _age(entry)]
        return Ahead(heapq.nsmallest(limit, older, key=_age), _counted(older))
    # What goes first for its age is charged to its flow all the same.
    given = dict.fromkeys(queue.flows.waiting, 0)
    for other in overdue:
        given[other.flow] += other.cost
    own = queue.flows.waiting[entry.flow]
    before = [other for other in rest[own.key] if other.order < entry.order]
    ranked = _ranked(own, given[own.key], before, limit)
    counts = _counted([*overdue, *before])
    start = own.time_after(given[own.key] + sum([other.cost for other in before]))
    for flow in queue.flows.waiting.values():
        if flow is own or flow.is_background > own.is_background:
            continue
        count = len(rest[flow.key])
        if flow.is_background == own.is_background:
            count = _served_until(start, flow, given[flow.key], rest[flow.key], entry)
        if count:
            counts[flow.key] = counts.get(flow.key, 0) + count
            ranked += _ranked(flow, given[flow.key], rest[flow.key], min(limit, count))
    oldest = heapq.nsmallest(limit, overdue, key=_age)
    return Ahead([*oldest, *(other for _, other in sorted(ranked))][:limit], counts)


def _age(entry: ReadyEntry) -> tuple[float, int]:
    return entry.queued_at, entry.order[2]


def _counted(entries: Iterable[ReadyEntry]) -> dict[FlowKey, int]:
    counts: dict[FlowKey, int] = {}
    for entry in entries:
        counts[entry.flow] = counts.get(entry.flow, 0) + 1
    return counts


def _served_until(start: float, flow: Flow, given: int, entries: list[ReadyEntry], entry: ReadyEntry) -> int:
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


def _ranked(
    flow: Flow, given: int, entries: list[ReadyEntry], limit: int
) -> list[tuple[tuple[object, ...], ReadyEntry]]:
    """The first of them, each with its place among all flows."""
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
    if len(queue.flows.waiting) == 1:
        return said
    weight_of = queue.flows.policy.weight_of
    parts = [f"{count} of {_name(key)} (weight {weight_of(key):g})" for key, count in sorted(ahead.counts.items())]
    return f"{said}: {', '.join(parts)}; itself it is of {_name(entry.flow)} (weight {weight_of(entry.flow):g})"


def _name(key: FlowKey) -> str:
    namespace, is_eval = key
    kind = "evals" if is_eval else "training"
    return kind if namespace == DEFAULT_NAMESPACE else f"{kind} in {namespace!r}"
