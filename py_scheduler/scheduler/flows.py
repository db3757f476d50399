"""How waiting work of different kinds shares room: by weight, in virtual time.

A flow is what shares as one: the evals of a namespace, or its training. Its virtual time rises by what it is given over
its weight, and the flow whose virtual time is least is served first. So over any stretch in which two flows wait, what
they are given is as their weights are, whatever their batch ids; inside a flow the order is by batch id, then arrival.

A head that finds too little room keeps its share all the same: while it waits, another flow may go on only until the
head's turn in virtual time is over. Else small entries would take each token that is given back, and a head that needs
several at once would never find them together.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.resources import Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FlowKey = tuple[str, bool]
"""Namespace, and whether it is evals."""

OrderKey = tuple[float, int, int]
Shape = tuple[str | Resource, int]
"""What fixes the demand (an evaluator's id, or a claim's own demand) and the count of attempts or tokens."""

_KEEP_GONE = 64


class ReadyEntry(msgspec.Struct, gc=False, kw_only=True):
    """Something that is admitted whole or waits. queued_at: monotonic seconds. is_gone: waits no longer."""

    flow: FlowKey
    order: OrderKey
    shape: Shape
    queued_at: float
    bypassed: int = 0
    is_gone: bool = False

    @property
    def cost(self) -> int:
        """What its admission is charged to its flow: tokens, as often as they are used."""
        return self.shape[1]


class FlowPolicy(msgspec.Struct, frozen=True):
    """Which flow an entry belongs to, and what a flow weighs. Training weighs 1.

    eval_weight: 0 serves evals when no training waits; None makes one flow of both.
    """

    eval_weight: float | None = 1.0

    @property
    def tells_evals_apart(self) -> bool:
        return self.eval_weight is not None

    def weight_of(self, key: FlowKey) -> float:
        return self.eval_weight if key[1] and self.eval_weight is not None else 1.0


EVEN = FlowPolicy()


class Flow:
    """The waiting entries of one flow: a heap for each shape, so that a blocked shape is passed over as a whole.

    Invariants: no heap is empty, and what is on top of one is not gone.
    """

    __slots__ = ("_gone", "_heaps", "_share", "count", "is_background", "key", "virtual_time")

    def __init__(self, key: FlowKey, weight: float) -> None:
        self.key = key
        self.is_background = weight == 0
        """Whether it is served only when no other flow waits; those share alike."""
        self._share = weight or 1.0
        self.virtual_time = 0.0
        self.count = 0
        # Order keys are unique, so that comparing never comes to the entries, nor to Python code.
        self._heaps: dict[Shape, list[tuple[OrderKey, ReadyEntry]]] = {}
        self._gone = 0

    @property
    def rank(self) -> tuple[bool, float, OrderKey]:
        """Flows are served in this order; those that are level, by their foremost entries."""
        return (self.is_background, self.virtual_time, self.head().order)

    def push(self, entry: ReadyEntry) -> None:
        heap = self._heaps.get(entry.shape)
        if heap is None:
            heap = self._heaps[entry.shape] = []
        heapq.heappush(heap, (entry.order, entry))
        self.count += 1

    def take_out(self, entry: ReadyEntry) -> bool:
        """Removes an entry, wherever it stands. True when it was the last of its shape."""
        entry.is_gone = True
        self.count -= 1
        heap = self._heaps[entry.shape]
        if heap[0][1] is not entry:
            self._gone += 1
            if self._gone > self.count + _KEEP_GONE:
                self._compact()
            return False
        heapq.heappop(heap)
        while heap and heap[0][1].is_gone:
            heapq.heappop(heap)
            self._gone -= 1
        if heap:
            return False
        del self._heaps[entry.shape]
        return True

    def _compact(self) -> None:
        for heap in self._heaps.values():
            heap[:] = [item for item in heap if not item[1].is_gone]
            heapq.heapify(heap)
        self._gone = 0

    def head(self) -> ReadyEntry:
        """The foremost entry, whatever blocks it."""
        if len(self._heaps) == 1:
            return next(iter(self._heaps.values()))[0][1]
        return min([heap[0] for heap in self._heaps.values()])[1]

    def first(self, may_go: Callable[[ReadyEntry], bool]) -> ReadyEntry | None:
        """The foremost entry of those that may go; entries of one shape are alike in that."""
        free = [heap[0] for heap in self._heaps.values() if may_go(heap[0][1])]
        return min(free)[1] if free else None

    def comes_before_all_of(self, other: Flow) -> bool:
        """Whether its head is due before anything of a flow behind it: the other had its share until then."""
        if self.is_background != other.is_background:
            return other.is_background
        return other.virtual_time >= self.time_after(self.head().cost)

    def entries(self) -> Iterator[ReadyEntry]:
        """All of them, in no order."""
        return (entry for heap in self._heaps.values() for _, entry in heap if not entry.is_gone)

    def charge(self, cost: int) -> None:
        self.virtual_time += cost / self._share

    def time_after(self, cost: float) -> float:
        """Its virtual time once it has been given so much more."""
        return self.virtual_time + cost / self._share

    def cost_until(self, virtual_time: float) -> float:
        """How much it is given until its virtual time is this."""
        return max(0.0, virtual_time - self.virtual_time) * self._share


class Flows:
    """The flows that wait. One that waits anew starts level with the others: it has no credit of its idle time.

    Nor is it forgiven what it was given ahead of them: that is remembered until they have caught up.
    """

    def __init__(self, policy: FlowPolicy) -> None:
        self.policy = policy
        self.waiting: dict[FlowKey, Flow] = {}
        self._ahead: dict[FlowKey, float] = {}
        """Virtual times of flows that do not wait now."""

    def __len__(self) -> int:
        return sum([flow.count for flow in self.waiting.values()])

    def open(self, key: FlowKey) -> Flow:
        """The flow, which waits from now on."""
        flow = self.waiting.get(key)
        if flow is None:
            flow = Flow(key, self.policy.weight_of(key))
            flow.virtual_time = max(self._ahead.pop(key, 0.0), self._level(background=flow.is_background))
            self.waiting[key] = flow
        return flow

    def take_out(self, entry: ReadyEntry) -> bool:
        """Removes an entry. True when it was the last of its shape in its flow."""
        flow = self.waiting[entry.flow]
        was_last = flow.take_out(entry)
        if not flow.count:
            del self.waiting[entry.flow]
            self._ahead[entry.flow] = flow.virtual_time
            if not self.waiting:
                self._ahead.clear()
            elif len(self._ahead) > _KEEP_GONE + len(self.waiting):
                self._forget()
        return was_last

    def foremost(self) -> Flow:
        """The flow to be served next. There must be one."""
        return min(self.waiting.values(), key=lambda flow: flow.rank)

    def in_order(self) -> list[Flow]:
        flows = list(self.waiting.values())
        if len(flows) > 1:
            flows.sort(key=lambda flow: flow.rank)
        return flows

    def _level(self, *, background: bool) -> float:
        return min(
            [flow.virtual_time for flow in self.waiting.values() if flow.is_background == background], default=0.0
        )

    def _forget(self) -> None:
        """Drops those that the others have caught up with, and if need be whatever is least ahead."""
        level = self._level(background=False)
        kept = heapq.nlargest(len(self.waiting) + _KEEP_GONE // 2, self._ahead.items(), key=lambda item: item[1])
        self._ahead = {key: time for key, time in kept if time > level}
