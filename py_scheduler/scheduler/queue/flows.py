"""How the waiting work of one namespace shares its room: by weight, in virtual time.

A flow is what shares as one: the evals of a namespace, or its training. Its virtual time rises by what it is given over
its weight, and the flow whose virtual time is least is served first. So over any stretch in which two flows wait, what
they are given is as their weights are, whatever their batch ids; inside a flow the order is by batch id, then by which
batch came to wait first, then arrival.

A head that finds too little room keeps its share all the same: while it waits, another flow may go on only until the
head's turn in virtual time is over. Else small entries would take each token that is given back, and a head that needs
several at once would never find them together.
"""

from __future__ import annotations

import heapq
from collections import deque
from typing import TYPE_CHECKING, Final

import msgspec

from py_scheduler.domain.resources import Resource

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

FlowKey = tuple[str, bool]
"""Namespace, and whether it is evals."""

OrderKey = tuple[float, int, int, int]
"""The batch id's place (two numbers), when its submission came to wait, and when it came itself."""
CAME: Final = 2
ARRIVAL: Final = 3
Shape = tuple[str | Resource, int]
"""What fixes the demand (an evaluator's id, or a claim's own demand) and the count of attempts or tokens."""

_KEEP_GONE = 64
_ENTRY: Final = 4
"""Where the entry stands in an item of a heap, behind its order key."""


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

_Item = tuple[float, int, int, int, ReadyEntry]


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
        # Order keys are unique, so that comparing never comes to the entries, nor to Python code. They lie flat: tuples
        # in tuples are compared twice.
        self._heaps: dict[Shape, list[_Item]] = {}
        self._gone = 0

    @property
    def rank(self) -> tuple[bool, float, OrderKey]:
        """Flows are served in this order; those that are level, by their foremost entries."""
        return (self.is_background, self.virtual_time, self.head().order)

    def push(self, entry: ReadyEntry) -> None:
        heap = self._heaps.get(entry.shape)
        if heap is None:
            heap = self._heaps[entry.shape] = []
        heapq.heappush(heap, (*entry.order, entry))
        self.count += 1

    def take_out(self, entry: ReadyEntry) -> bool:
        """Removes an entry, wherever it stands. True when it was the last of its shape."""
        entry.is_gone = True
        self.count -= 1
        heap = self._heaps[entry.shape]
        if heap[0][_ENTRY] is not entry:
            self._gone += 1
            if self._gone > self.count + _KEEP_GONE:
                self._compact()
            return False
        heapq.heappop(heap)
        while heap and heap[0][_ENTRY].is_gone:
            heapq.heappop(heap)
            self._gone -= 1
        if heap:
            return False
        del self._heaps[entry.shape]
        return True

    def _compact(self) -> None:
        for heap in self._heaps.values():
            heap[:] = [item for item in heap if not item[_ENTRY].is_gone]
            heapq.heapify(heap)
        self._gone = 0

    def head(self) -> ReadyEntry:
        """The foremost entry, whatever blocks it."""
        if len(self._heaps) == 1:
            return next(iter(self._heaps.values()))[0][_ENTRY]
        return min([heap[0] for heap in self._heaps.values()])[_ENTRY]

    def first(self, may_go: Callable[[ReadyEntry], bool]) -> ReadyEntry | None:
        """The foremost entry of those that may go; entries of one shape are alike in that."""
        free = [heap[0] for heap in self._heaps.values() if may_go(heap[0][_ENTRY])]
        return min(free)[_ENTRY] if free else None

    def comes_before_all_of(self, other: Flow) -> bool:
        """Whether its head is due before anything of a flow behind it: the other had its share until then."""
        if self.is_background != other.is_background:
            return other.is_background
        return other.virtual_time >= self.time_after(self.head().cost)

    def entries(self) -> Iterator[ReadyEntry]:
        """All of them, in no order."""
        entries = (item[_ENTRY] for heap in self._heaps.values() for item in heap)
        return (entry for entry in entries if not entry.is_gone)

    def charge(self, cost: int) -> None:
        self.virtual_time += cost / self._share

    def time_after(self, cost: float) -> float:
        """Its virtual time once it has been given so much more."""
        return self.virtual_time + cost / self._share

    def cost_until(self, virtual_time: float) -> float:
        """How much it is given until its virtual time is this."""
        return max(0.0, virtual_time - self.virtual_time) * self._share


class Flows:
    """The flows of one namespace that wait. One that waits anew starts level with the others: it has no credit of its
    idle time. Nor is it forgiven what it was given ahead of them: that is remembered while any of them waits.

    max_wait_seconds: what has waited so long goes before the rest; None: nothing does.
    """

    def __init__(self, namespace: str, policy: FlowPolicy, max_wait_seconds: float | None = None) -> None:
        self.namespace = namespace
        self.waiting: dict[FlowKey, Flow] = {}
        self._policy = policy
        self._max_wait_seconds = max_wait_seconds
        self._ahead: dict[FlowKey, float] = {}
        """Virtual times of flows that do not wait now."""
        self._by_age: deque[ReadyEntry] = deque()
        """As they came, if somebody may be promoted; some are gone."""

    def __len__(self) -> int:
        return sum([flow.count for flow in self.waiting.values()])

    def push(self, entry: ReadyEntry) -> None:
        flow = self.waiting.get(entry.flow)
        if flow is None:
            flow = Flow(entry.flow, self._policy.weight_of(entry.flow))
            flow.virtual_time = max(self._ahead.pop(entry.flow, 0.0), self._level(background=flow.is_background))
            self.waiting[entry.flow] = flow
        flow.push(entry)
        if self._max_wait_seconds is not None:
            self._by_age.append(entry)
            if len(self._by_age) > 2 * len(self) + _KEEP_GONE:
                self._by_age = deque(entry for entry in self._by_age if not entry.is_gone)

    def take_out(self, entry: ReadyEntry) -> bool:
        """Removes an entry. True when it was the last of its shape in its flow."""
        flow = self.waiting[entry.flow]
        was_last = flow.take_out(entry)
        if not flow.count:
            del self.waiting[entry.flow]
            self._ahead[entry.flow] = flow.virtual_time
        return was_last

    def is_overdue(self, entry: ReadyEntry, now: float) -> bool:
        """Whether it has waited so long that it goes before what has not."""
        return self._max_wait_seconds is not None and now - entry.queued_at >= self._max_wait_seconds

    def overdue(self, now: float) -> ReadyEntry | None:
        """What goes first for its age."""
        if self._max_wait_seconds is None:
            return None
        by_age = self._by_age
        while by_age and by_age[0].is_gone:
            by_age.popleft()
        return by_age[0] if by_age and self.is_overdue(by_age[0], now) else None

    def foremost(self, now: float) -> ReadyEntry:
        """What is to be served next, whatever blocks it. There must be something."""
        overdue = self.overdue(now)
        if overdue is not None:
            return overdue
        if len(self.waiting) == 1:
            return next(iter(self.waiting.values())).head()
        return min(self.waiting.values(), key=lambda flow: flow.rank).head()

    def in_order(self) -> list[Flow]:
        flows = list(self.waiting.values())
        if len(flows) > 1:
            flows.sort(key=lambda flow: flow.rank)
        return flows

    def passed_by(self, entry: ReadyEntry | None, now: float) -> list[ReadyEntry]:
        """What an entry goes before although its turn is later: whoever is first by age, and the heads of the flows up
        to the entry's own. None: an entry of another namespace, which is behind all of this one.
        """
        overdue = self.overdue(now)
        if entry is not None and entry is overdue:
            return []
        passed = [] if overdue is None else [overdue]
        for flow in self.in_order():
            head = flow.head()
            if head is not entry and head is not overdue:
                passed.append(head)
            if entry is not None and flow.key == entry.flow:
                break
        return passed

    def _level(self, *, background: bool) -> float:
        return min(
            [flow.virtual_time for flow in self.waiting.values() if flow.is_background == background], default=0.0
        )
