"""Batches and outside claims that wait for room, in the order of service.

Order: the batch id's key, then arrival. A batch that was refused blocks its shape: entries of that demand and at
least its count are passed over until something is released, so that a wake is not a scan. Entries that fit may
overtake the blocked head, but only `max_bypass` times; from then on nothing behind it is offered until it is admitted.

Invariants: every claim in the queue is pending (whoever ends one removes it). A batch may hold attempts that have been
ended meanwhile: looking through a long queue for them would hold the loop, so they are found when it is offered.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.execution.attempt import PlannedAttempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from py_scheduler.domain.leases import PlacementDemand
    from py_scheduler.domain.resources import Resource
    from py_scheduler.placement import Lease

OrderKey = tuple[float, int, int]
Shape = tuple[Hashable, int]
"""What fixes the demand (an evaluator's id, or a claim's own demand) and the count of attempts or tokens."""


class ReadyEntry(msgspec.Struct, gc=False, kw_only=True):
    """Something that is admitted whole or waits. queued_at: monotonic seconds."""

    order: OrderKey
    shape: Shape
    queued_at: float
    bypassed: int = 0


class ReadyBatch(ReadyEntry, gc=False, kw_only=True):
    """Attempts of one batch, waiting to be admitted together."""

    spec: EvaluatorSpec
    attempts: list[PlannedAttempt]

    @property
    def submission_id(self) -> str:
        return self.attempts[0].submission_id


class ReadyClaim(ReadyEntry, gc=True, kw_only=True):
    """Room that a scheduler outside asked for; `grant` gets it in the turn that admits the claim."""

    budget: Resource
    per_sample: Resource
    grant: Callable[[Lease], None]

    @property
    def tokens(self) -> int:
        return self.shape[1]


class ReadyQueue:
    """One heap for each shape, so that a blocked shape is passed over as a whole."""

    def __init__(self, max_bypass: int) -> None:
        self._max_bypass = max_bypass
        # Order keys are unique, so that comparing never comes to the entries, nor to Python code.
        self._heaps: dict[Shape, list[tuple[OrderKey, ReadyEntry]]] = {}
        self._blocked: dict[Hashable, int] = {}
        """The least count that was refused of each demand since the last release."""
        self._batches_of: dict[str, dict[OrderKey, ReadyBatch]] = {}
        """The batches of each submission, which come in their order."""
        self._arrivals = itertools.count()
        self.holds_back = True
        """Whether a head that was overtaken often enough holds the others back."""
        self.claims = 0
        """How many of the entries are outside claims."""

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __iter__(self) -> Iterator[ReadyEntry]:
        """All entries, in the order of service."""
        return (entry for _, entry in sorted(itertools.chain.from_iterable(self._heaps.values())))

    @property
    def max_bypass(self) -> int:
        return self._max_bypass

    def batches_of(self, submission_id: str) -> Iterable[ReadyBatch]:
        """A submission's batches, in order of service."""
        return self._batches_of.get(submission_id, {}).values()

    def unordered(self) -> Iterator[ReadyEntry]:
        """All entries, in no order: for a look that must not sort a long queue."""
        return (entry for _, entry in itertools.chain.from_iterable(self._heaps.values()))

    def push(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt], queued_at: float) -> None:
        """Adds a batch of at least one attempt."""
        order = (*attempts[0].batch_key, next(self._arrivals))
        shape = (spec.evaluator_id, len(attempts))
        entry = ReadyBatch(order=order, shape=shape, queued_at=queued_at, spec=spec, attempts=attempts)
        siblings = self._batches_of.get(entry.submission_id)
        if siblings is None:
            siblings = self._batches_of[entry.submission_id] = {}
        siblings[order] = entry
        self._push(entry)

    def push_claim(
        self,
        batch_key: tuple[float, int],
        demand: PlacementDemand,
        tokens: int,
        grant: Callable[[Lease], None],
        queued_at: float,
    ) -> ReadyClaim:
        """Adds a claim of at least one token. `tokens` is what the demand comes to."""
        entry = ReadyClaim(
            order=(*batch_key, next(self._arrivals)),
            shape=(demand.per_sample, tokens),
            queued_at=queued_at,
            budget=demand.ceiling,
            per_sample=demand.per_sample,
            grant=grant,
        )
        self.claims += 1
        self._push(entry)
        return entry

    def _push(self, entry: ReadyEntry) -> None:
        heap = self._heaps.get(entry.shape)
        if heap is None:
            heap = self._heaps[entry.shape] = []
        heapq.heappush(heap, (entry.order, entry))

    def offer(self) -> ReadyEntry | None:
        """The next entry to try: `admit` or `refuse` it. None when all that is left is blocked or held back."""
        if not self._heaps:
            return None
        if not self._blocked:
            return min(heap[0] for heap in self._heaps.values())[1]
        free = [heap[0] for shape, heap in self._heaps.items() if not self._is_blocked(shape)]
        if not free:
            return None
        best, head = min(free)[1], self._head()
        if self.holds_back and head is not None and head.order < best.order and head.bypassed >= self._max_bypass:
            return None
        return best

    def admit(self, entry: ReadyEntry) -> None:
        """Removes the entry that was offered, and counts it against the head that it overtook, if it did."""
        self.drop(entry)
        if self._blocked:
            head = self._head()
            if head is not None and head.order < entry.order:
                head.bypassed += 1

    def drop(self, entry: ReadyEntry) -> None:
        """Removes the entry that was offered: nothing of it is left to run."""
        heap = self._heaps[entry.shape]
        heapq.heappop(heap)
        if not heap:
            del self._heaps[entry.shape]
        if isinstance(entry, ReadyBatch):
            siblings = self._batches_of[entry.submission_id]
            del siblings[entry.order]
            if not siblings:
                del self._batches_of[entry.submission_id]
        else:
            self.claims -= 1

    def remove(self, entry: ReadyClaim) -> None:
        """Takes out a claim that ended while it waited, wherever it stands."""
        heap = self._heaps[entry.shape]
        heap.remove((entry.order, entry))
        self.claims -= 1
        if heap:
            heapq.heapify(heap)
            return
        del self._heaps[entry.shape]
        # Demands of claims are without number, and until a release may be long: none may outlive its last entry here.
        self._blocked.pop(entry.per_sample, None)

    def refuse(self, entry: ReadyEntry) -> None:
        """Blocks the entry's demand, from its count on, until the next release."""
        demand, count = entry.shape
        self._blocked[demand] = min(count, self._blocked.get(demand, count))

    def unblock(self) -> None:
        """Something was released: everything may be tried again."""
        self._blocked.clear()

    def place_of(self, entry: ReadyEntry) -> int:
        """How many entries are ahead of it."""
        return sum(order < entry.order for heap in self._heaps.values() for order, _ in heap)

    def is_blocked(self, entry: ReadyEntry) -> bool:
        return self._is_blocked(entry.shape)

    def _head(self) -> ReadyEntry | None:
        """The entry that is first in order, blocked or not."""
        return min(heap[0] for heap in self._heaps.values())[1] if self._heaps else None

    def _is_blocked(self, shape: Shape) -> bool:
        demand, count = shape
        least = self._blocked.get(demand)
        return least is not None and count >= least
