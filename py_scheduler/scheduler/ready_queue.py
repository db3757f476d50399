"""Batches that wait for room, in the order of service.

Order: the batch id's key, then arrival. A batch that was refused blocks its shape: entries of that demand and at
least its count are passed over until something is released, so that a wake is not a scan. Entries that fit may
overtake the blocked head, but only `max_bypass` times; from then on nothing behind it is offered until it is admitted.

Invariants: every attempt in the queue is still to be run (whoever ends waiting attempts prunes); no entry is empty.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.execution.attempt import PlannedAttempt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

OrderKey = tuple[float, int, int]
Shape = tuple[str, int]
"""An evaluator's id, which fixes budget and demand, and the count of attempts."""


class ReadyBatch(msgspec.Struct, gc=False):
    """Attempts of one batch, waiting to be admitted together."""

    spec: EvaluatorSpec
    attempts: list[PlannedAttempt]
    order: OrderKey
    shape: Shape
    queued_at: float
    bypassed: int = 0


class ReadyQueue:
    """One heap for each shape, so that a blocked shape is passed over as a whole."""

    def __init__(self, max_bypass: int) -> None:
        self._max_bypass = max_bypass
        # Order keys are unique, so that comparing never comes to the entries, nor to Python code.
        self._heaps: dict[Shape, list[tuple[OrderKey, ReadyBatch]]] = {}
        self._blocked: dict[str, int] = {}
        """The least count that was refused of each evaluator since the last release."""
        self._arrivals = itertools.count()

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def __iter__(self) -> Iterator[ReadyBatch]:
        """All entries, in the order of service."""
        return (entry for _, entry in sorted(itertools.chain.from_iterable(self._heaps.values())))

    def push(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt], queued_at: float) -> None:
        """Adds a batch of at least one attempt."""
        order = (*attempts[0].batch_key, next(self._arrivals))
        entry = ReadyBatch(spec, attempts, order, (spec.evaluator_id, len(attempts)), queued_at)
        heap = self._heaps.get(entry.shape)
        if heap is None:
            heap = self._heaps[entry.shape] = []
        heapq.heappush(heap, (order, entry))

    def offer(self) -> ReadyBatch | None:
        """The next entry to try: `admit` or `refuse` it. None when all that is left is blocked or held back."""
        if not self._heaps:
            return None
        if not self._blocked:
            return min(heap[0] for heap in self._heaps.values())[1]
        free = [heap[0] for shape, heap in self._heaps.items() if not self._is_blocked(shape)]
        if not free:
            return None
        best, head = min(free)[1], self._head()
        if head is not None and head.order < best.order and head.bypassed >= self._max_bypass:
            return None
        return best

    def admit(self, entry: ReadyBatch) -> None:
        """Removes the entry that was offered, and counts it against the head that it overtook, if it did."""
        heap = self._heaps[entry.shape]
        heapq.heappop(heap)
        if not heap:
            del self._heaps[entry.shape]
        if self._blocked:
            head = self._head()
            if head is not None and head.order < entry.order:
                head.bypassed += 1

    def refuse(self, entry: ReadyBatch) -> None:
        """Blocks the entry's demand, from its count on, until the next release."""
        evaluator_id, count = entry.shape
        self._blocked[evaluator_id] = min(count, self._blocked.get(evaluator_id, count))

    def unblock(self) -> None:
        """Something was released: everything may be tried again."""
        self._blocked.clear()

    def prune(self, is_live: Callable[[PlannedAttempt], bool]) -> None:
        """Drops attempts that are no longer to run, and the entries that they were all of."""
        entries = [entry for _, entry in itertools.chain.from_iterable(self._heaps.values())]
        self._heaps.clear()
        for entry in entries:
            entry.attempts = [attempt for attempt in entry.attempts if is_live(attempt)]
            if entry.attempts:
                entry.shape = (entry.shape[0], len(entry.attempts))
                self._heaps.setdefault(entry.shape, []).append((entry.order, entry))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def is_blocked(self, entry: ReadyBatch) -> bool:
        return self._is_blocked(entry.shape)

    def _head(self) -> ReadyBatch | None:
        """The entry that is first in order, blocked or not."""
        return min(heap[0] for heap in self._heaps.values())[1] if self._heaps else None

    def _is_blocked(self, shape: Shape) -> bool:
        evaluator_id, count = shape
        least = self._blocked.get(evaluator_id)
        return least is not None and count >= least
