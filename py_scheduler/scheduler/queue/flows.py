"""How the waiting work of one namespace shares its room: by weight, in virtual time.

A flow is what shares as one: the evals of a namespace, or its training. Each flow has a virtual time. It rises by the
tokens that the flow is given over its weight, and the flow with the least virtual time is served next. So over any
stretch in which both wait, they are given tokens as their weights are, whatever their batch ids. Training weighs 1:

- With `eval_weight` 3 evals get 75 of 100 tokens, with 1/4 they get 20.
- Beside evals of 1 token, training waits in batches of 10. At weight 1 ten evals follow on each training batch.
- Training had 500 tokens while no evals waited. Evals come: they get 50 of the next 100. Nobody saves up credit while
  it waits for nothing.
- Evals had 10 tokens at once and leave. When they come back they wait until training has had 10 too.

Inside a flow the order is by batch id, then by which batch came to wait first, then by arrival.

A head that finds too little room keeps its turn. While it waits, the other flow may go on until its own virtual time
has come to where the head's flow will be after the head. A training batch waits for 4 tokens at equal weights: evals of
1 token take 4 of those that come back, and then leave them to the batch. Else small entries would take each token that
is given back, and the batch would never find four together.

Invariants
  1. A flow is in `Flows.waiting` exactly while it has entries; what it was given ahead of others is kept in `_ahead`.
  2. No heap is empty, and what is on top of one is not gone.
"""

from __future__ import annotations

import bisect
import heapq
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.scheduler.queue.entries import (
    ARRIVAL,
    ENTRY,
    FlowKey,
    OrderKey,
    ReadyBatch,
    ReadyEntry,
    Shape,
    age_of,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_KEEP_GONE = 64


class FlowPolicy(msgspec.Struct, frozen=True):
    """Which flow an entry belongs to, and what a flow weighs. Training weighs 1.

    eval_weight: 0 serves evals only when no training waits; None makes one flow of both.
    """

    eval_weight: float | None = 1.0

    @property
    def tells_evals_apart(self) -> bool:
        return self.eval_weight is not None

    def weight_of(self, key: FlowKey) -> float:
        return self.eval_weight if key[1] and self.eval_weight is not None else 1.0


EVEN = FlowPolicy()

Item = tuple[float, int, int, int, ReadyEntry]
"""How an entry lies in a heap: behind its order key."""


class Flow:
    """The waiting entries of one flow: a heap for each shape, so that a blocked shape is passed over as a whole."""

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
        self._heaps: dict[Shape, list[Item]] = {}
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
        if heap[0][ENTRY] is not entry:
            self._gone += 1
            if self._gone > self.count + _KEEP_GONE:
                self._compact()
            return False
        heapq.heappop(heap)
        while heap and heap[0][ENTRY].is_gone:
            heapq.heappop(heap)
            self._gone -= 1
        if heap:
            return False
        del self._heaps[entry.shape]
        return True

    def _compact(self) -> None:
        for heap in self._heaps.values():
            heap[:] = [item for item in heap if not item[ENTRY].is_gone]
            heapq.heapify(heap)
        self._gone = 0

    def head(self) -> ReadyEntry:
        """The foremost entry, whatever blocks it."""
        if len(self._heaps) == 1:
            return next(iter(self._heaps.values()))[0][ENTRY]
        return min([heap[0] for heap in self._heaps.values()])[ENTRY]

    def heads(self) -> list[ReadyEntry]:
        """The foremost entry of each shape, in order."""
        if len(self._heaps) == 1:
            return [self.head()]
        return [item[ENTRY] for item in sorted([heap[0] for heap in self._heaps.values()])]

    def comes_before_all_of(self, other: Flow, cost: int) -> bool:
        """Whether an entry of that cost, which is next here, is due before anything of a flow behind it: the other had
        its share until then.

        At equal weights this flow was given 10 tokens and its next entry costs 4. It is due before a flow that was
        given 14, and not before one that was given 13.
        """
        if self.is_background != other.is_background:
            return other.is_background
        return other.virtual_time >= self.time_after(cost)

    def entries(self) -> Iterator[ReadyEntry]:
        """All of them, in no order."""
        entries = (item[ENTRY] for heap in self._heaps.values() for item in heap)
        return (entry for entry in entries if not entry.is_gone)

    @property
    def shapes(self) -> list[Shape]:
        """Of those that wait."""
        return list(self._heaps)

    def heap(self, shape: Shape) -> list[Item]:
        """The entries of one shape, some of them gone: a copy, for a look that takes several turns of the loop."""
        return self._heaps.get(shape, []).copy()

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

    max_wait_seconds: what has waited so long goes before the rest, the oldest first; None: nothing does. At 60 s an
    entry of the batch id "last" that has waited 60 s goes before one of step 1 that has waited 30 s.
    """

    def __init__(self, namespace: str, policy: FlowPolicy, max_wait_seconds: float | None = None) -> None:
        self.namespace = namespace
        self.waiting: dict[FlowKey, Flow] = {}
        self._policy = policy
        self._max_wait_seconds = max_wait_seconds
        self._ahead: dict[FlowKey, float] = {}
        """Virtual times of flows that do not wait now."""
        self._by_age = None if max_wait_seconds is None else _ByAge(max_wait_seconds)

    def __len__(self) -> int:
        return sum([flow.count for flow in self.waiting.values()])

    def push(self, entry: ReadyEntry) -> None:
        flow = self.waiting.get(entry.flow)
        if flow is None:
            flow = Flow(entry.flow, self._policy.weight_of(entry.flow))
            flow.virtual_time = max(self._ahead.pop(entry.flow, 0.0), self._level(background=flow.is_background))
            self.waiting[entry.flow] = flow
        flow.push(entry)
        if self._by_age is not None:
            self._by_age.push(entry)

    def take_out(self, entry: ReadyEntry) -> bool:
        """Removes an entry. True when it was the last of its shape in its flow."""
        flow = self.waiting[entry.flow]
        was_last = flow.take_out(entry)
        if not flow.count:
            del self.waiting[entry.flow]
            self._ahead[entry.flow] = flow.virtual_time
        if self._by_age is not None:
            self._by_age.took_out(entry, waiting=len(self))
        return was_last

    def is_overdue(self, entry: ReadyEntry, now: float) -> bool:
        """Whether it has waited so long that it goes before what has not."""
        return self._by_age is not None and self._by_age.is_overdue(entry, now)

    def foremost(self, now: float) -> ReadyEntry:
        """What is to be served next, whatever blocks it. There must be something."""
        if self._by_age is not None and (overdue := self._by_age.foremost(now)) is not None:
            return overdue
        if len(self.waiting) == 1:
            return next(iter(self.waiting.values())).head()
        return min(self.waiting.values(), key=lambda flow: flow.rank).head()

    def in_order(self) -> list[Flow]:
        flows = list(self.waiting.values())
        if len(flows) > 1:
            flows.sort(key=lambda flow: flow.rank)
        return flows

    def line_up(self, now: float) -> Iterator[ReadyEntry]:
        """The heads of all shapes, in the order of service: first those that go first for their age."""
        overdue = [] if self._by_age is None else self._by_age.overdue(now)
        yield from overdue
        told = set(map(id, overdue))
        for flow in self.in_order():
            for head in flow.heads():
                if id(head) not in told:
                    yield head

    def _level(self, *, background: bool) -> float:
        return min(
            [flow.virtual_time for flow in self.waiting.values() if flow.is_background == background], default=0.0
        )


class _ByAge:
    """The entries of one namespace by their age. Only the oldest of each flow and shape goes first for its age, and
    these are kept in order: whoever asks who is overdue neither sorts them nor looks at those that are not.

    Invariants
      1. `_oldest` has the first of each of `_queues`, the oldest of all first; none of these is gone.
      2. No queue is empty.
    """

    def __init__(self, max_wait_seconds: float) -> None:
        self._max_wait_seconds = max_wait_seconds
        self._queues: dict[tuple[FlowKey, Shape], deque[ReadyEntry]] = {}
        """Those of each flow and shape as they came; some behind the first are gone."""
        self._oldest: list[ReadyEntry] = []
        self._count = 0
        """How many entries the queues hold."""

    def is_overdue(self, entry: ReadyEntry, now: float) -> bool:
        return now - entry.queued_at >= self._max_wait_seconds

    def foremost(self, now: float) -> ReadyEntry | None:
        """The oldest of all, if it goes first for its age."""
        return self._oldest[0] if self._oldest and self.is_overdue(self._oldest[0], now) else None

    def overdue(self, now: float) -> list[ReadyEntry]:
        """What goes first for its age: the oldest of each flow and shape, the oldest of all first."""
        return self._oldest[: bisect.bisect_left(self._oldest, True, key=lambda entry: not self.is_overdue(entry, now))]

    def push(self, entry: ReadyEntry) -> None:
        key = entry.flow, entry.shape
        queue = self._queues.get(key)
        self._count += 1
        if queue is None:
            self._queues[key] = deque((entry,))
            bisect.insort(self._oldest, entry, key=age_of)
        elif age_of(queue[-1]) <= age_of(entry):
            queue.append(entry)
        else:  # What has shrunk stands among those that came as late.
            self._forget_oldest(queue[0])
            queue = self._queues[key] = deque(sorted([*queue, entry], key=age_of))
            self._set_oldest(key, queue)

    def took_out(self, entry: ReadyEntry, *, waiting: int) -> None:
        """An entry is gone, and so many wait still."""
        key = entry.flow, entry.shape
        queue = self._queues[key]
        if queue[0] is entry:
            self._forget_oldest(entry)
            self._set_oldest(key, queue)
        elif self._count > 2 * waiting + _KEEP_GONE:
            self._forget_gone()

    def _forget_oldest(self, entry: ReadyEntry) -> None:
        at = bisect.bisect_left(self._oldest, age_of(entry), key=age_of)
        while self._oldest[at] is not entry:  # What is left of a batch that shrinks came when the batch did.
            at += 1
        del self._oldest[at]

    def _set_oldest(self, key: tuple[FlowKey, Shape], queue: deque[ReadyEntry]) -> None:
        while queue and queue[0].is_gone:
            queue.popleft()
            self._count -= 1
        if queue:
            bisect.insort(self._oldest, queue[0], key=age_of)
        else:
            del self._queues[key]

    def _forget_gone(self) -> None:
        self._queues = {
            key: deque(entry for entry in queue if not entry.is_gone) for key, queue in self._queues.items()
        }
        self._count = sum([len(queue) for queue in self._queues.values()])


class WaitingBatches:
    """The batches in the queue, whatever their flow: by submission, and those of several attempts by the tasks that
    have some in them. A batch of one either waits whole or is gone.
    """

    def __init__(self) -> None:
        self._of_submission: dict[str, dict[int, ReadyBatch]] = {}
        """By arrival; they come in their order."""
        self._of_task: dict[str, tuple[ReadyBatch, ...]] = {}

    def of_submission(self, submission_id: str) -> Iterable[ReadyBatch]:
        """A submission's batches, as they came."""
        return self._of_submission.get(submission_id, {}).values()

    def of_task(self, task_id: str) -> tuple[ReadyBatch, ...]:
        """The batches of several attempts that have some of the task."""
        return self._of_task.get(task_id, ())

    def add(self, batch: ReadyBatch) -> None:
        """One that comes, or what is left of one in its place."""
        self._of_submission.setdefault(batch.submission_id, {})[batch.order[ARRIVAL]] = batch
        of_task, task_ids = self._of_task, _tasks_of(batch)
        if of_task.keys().isdisjoint(task_ids):  # As a rule; all at once takes a third of the time.
            of_task.update(dict.fromkeys(task_ids, (batch,)))
            return
        for task_id in task_ids:
            of_task[task_id] = (*of_task.get(task_id, ()), batch)

    def take_out(self, batch: ReadyBatch) -> None:
        siblings = self._of_submission[batch.submission_id]
        if siblings[batch.order[ARRIVAL]] is batch:  # Else what is left of it has its place.
            del siblings[batch.order[ARRIVAL]]
            if not siblings:
                del self._of_submission[batch.submission_id]
        for task_id in _tasks_of(batch):
            batches = self._of_task.pop(task_id)
            if len(batches) > 1:
                self._of_task[task_id] = tuple([other for other in batches if other is not batch])


def _tasks_of(batch: ReadyBatch) -> Iterable[str]:
    if len(batch.attempts) == 1:
        return ()
    return dict.fromkeys([attempt.ref.task_id for attempt in batch.attempts])
