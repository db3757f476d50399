"""The ready queue beside a plain list of what waits, under whatever comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.leases import PlacementDemand
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import DEFAULT_NAMESPACE
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.ledger.records import sort_batch_id
from py_scheduler.scheduler.queue.entries import ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import task_of
from tests.support.rooms import OneKindOfRoom

if TYPE_CHECKING:
    from py_scheduler.domain.task import BatchId
    from py_scheduler.scheduler.queue.entries import ReadyEntry

MAX_BYPASS = 2
SPECS = {name: spec_of(SolvingAgent(), name) for name in ("small", "large")}
SAMPLE = Resource(gpu=0.5)
BATCH_IDS: tuple[BatchId, ...] = (1, 2, "1/eval", "other")


class Waiting(msgspec.Struct, frozen=True):
    """What the model knows of an entry; sorts as it is served."""

    order: tuple[float, int, int]
    name: str
    demand: object
    count: int


class QueueAndModel(RuleBasedStateMachine):
    """One namespace whose training waits: the order, the blocked shapes and the bound on overtaking."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = ReadyQueue(OneKindOfRoom(), MAX_BYPASS)
        self.waiting: list[Waiting] = []
        self.bypassed: dict[str, int] = {}
        self.blocked: dict[object, int] = {}
        self.leases: dict[str, ReadyLease] = {}
        self.arrivals = 0
        self.now = 0.0

    def _arrives(self, batch_id: BatchId, demand: object, count: int) -> str:
        name = f"e{self.arrivals}"
        self.waiting.append(Waiting((*sort_batch_id(batch_id), self.arrivals), name, demand, count))
        self.waiting.sort(key=lambda waiting: waiting.order)
        self.bypassed[name] = 0
        self.arrivals += 1
        return name

    @rule(batch_id=st.sampled_from(BATCH_IDS), spec=st.sampled_from(sorted(SPECS)), count=st.integers(1, 4))
    def push(self, batch_id: BatchId, spec: str, count: int) -> None:
        name = self._arrives(batch_id, spec, count)
        attempts = [
            PlannedAttempt(
                ref=AttemptRef(name, number, 1),
                task=task_of(name),
                first_sample_no=number,
                sample_count=1,
                submission_id=name,
                namespace=DEFAULT_NAMESPACE,
                batch_key=sort_batch_id(batch_id),
                queued_at=self.now,
            )
            for number in range(count)
        ]
        self.queue.push(SPECS[spec], attempts, self.now)

    @rule(batch_id=st.sampled_from(BATCH_IDS), count=st.integers(1, 4))
    def request_lease(self, batch_id: BatchId, count: int) -> None:
        name = self._arrives(batch_id, SAMPLE, count)
        demand = PlacementDemand(per_sample=SAMPLE, max_tokens=count)
        self.leases[name] = self.queue.push_lease(
            sort_batch_id(batch_id), demand, count, lambda _lease: None, self.now, DEFAULT_NAMESPACE
        )

    def _expected(self) -> Waiting | None:
        """The first that is not blocked; nobody behind a head once that was overtaken often enough."""
        for waiting in self._heads():
            if waiting.count < self.blocked.get(waiting.demand, 1 << 30):
                return waiting
            if self.bypassed[waiting.name] >= MAX_BYPASS:
                return None
        return None

    def _heads(self) -> list[Waiting]:
        """The first of each shape, in order."""
        first: dict[tuple[object, int], Waiting] = {}
        for waiting in self.waiting:
            first.setdefault((waiting.demand, waiting.count), waiting)
        return list(first.values())

    def _name(self, entry: ReadyEntry | None) -> str | None:
        if isinstance(entry, ReadyBatch):
            return entry.attempts[0].ref.task_id
        return next((name for name, lease in self.leases.items() if lease is entry), None)

    @rule(admits=st.booleans())
    def offer(self, admits: bool) -> None:
        self.now += 1.0
        entry, expected = self.queue.offer(self.now), self._expected()
        assert self._name(entry) == (expected.name if expected else None)
        if entry is None or expected is None:
            return
        if not admits:
            self.queue.refuse(entry)
            self.blocked[expected.demand] = min(expected.count, self.blocked.get(expected.demand, expected.count))
            return
        self.queue.admit(entry, self.now)
        for head in self._heads():
            if head is expected:
                break
            self.bypassed[head.name] += 1
        self._leaves(expected)

    def _leaves(self, waiting: Waiting) -> None:
        self.waiting.remove(waiting)
        self.leases.pop(waiting.name, None)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.leases)))
        self.queue.remove(self.leases[name], self.now)
        (waiting,) = [waiting for waiting in self.waiting if waiting.name == name]
        self._leaves(waiting)
        if all((other.demand, other.count) != (SAMPLE, waiting.count) for other in self.waiting):
            # The last of its shape takes the block with it, be it of smaller ones: those are tried once more.
            self.blocked.pop(SAMPLE, None)

    @rule()
    def release(self) -> None:
        self.queue.unblock()
        self.blocked.clear()

    @invariant()
    def the_same_entries_wait(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.pending_leases == len(self.leases)
        assert sorted(filter(None, map(self._name, self.queue.entries()))) == sorted(w.name for w in self.waiting)
        bypassed = {self._name(entry): entry.bypassed for entry in self.queue.entries()}
        assert bypassed == {waiting.name: self.bypassed[waiting.name] for waiting in self.waiting}

    def teardown(self) -> None:
        """Nothing is left behind for ever: once everything fits, everything goes, in order."""
        self.queue.unblock()
        left = [waiting.name for waiting in self.waiting]
        for name in left:
            entry = self.queue.offer(self.now)
            assert self._name(entry) == name
            assert entry is not None
            self.queue.admit(entry, self.now)
        assert self.queue.offer(self.now) is None


TestReadyQueue = QueueAndModel.TestCase
