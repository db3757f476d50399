"""Lets waiting batches and outside claims in, in order, as far as there is room. Wakes on events and never polls.

Invariants
  1. A batch runs with a lease that holds all of its tokens (none when there is no pool), or it waits. So does a claim.
  2. Whatever could make room, add an entry or take one out wakes the loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from py_scheduler.placement import PlacementPool, tokens_in_budget
from py_scheduler.scheduler.ledger.commands import LeaseAttempts
from py_scheduler.scheduler.queue.flows import FlowPolicy
from py_scheduler.scheduler.queue.ready_queue import ReadyBatch, ReadyLease, ReadyQueue
from py_scheduler.scheduler.queue.shares import Shares, supply_of
from py_scheduler.scheduler.queue.waiting_reasons import WaitingReasons

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.events import AttemptRef
    from py_scheduler.domain.leases import PlacementDemand
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.quotas import NamespaceSettings
    from py_scheduler.domain.resources import PlacementToken, Resource
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.placement import Lease
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.queue.flows import ReadyEntry
    from py_scheduler.scheduler.queue.quotas import Quotas
    from py_scheduler.scheduler.queue.staleness_gate import StalenessGate
    from py_scheduler.scheduler.settings import EngineSettings

    Launch = Callable[[EvaluatorSpec, list[PlannedAttempt], Sequence[PlacementToken | None], float], None]

_TURN_SECONDS = 0.002


class Admission:
    """The ready queue in front of the pool. `launch` gets what was let in, with one token (or None) for each permit.

    gate: holds training back that would be too stale; None: nothing is.
    """

    def __init__(
        self,
        pool: PlacementPool | None,
        recorder: Recorder,
        clock: Clock,
        settings: EngineSettings,
        launch: Launch,
        quotas: Quotas,
        namespaces: Mapping[str, NamespaceSettings],
        gate: StalenessGate | None = None,
    ) -> None:
        self._pool = pool
        self._recorder = recorder
        self._clock = clock
        self._max_permits = settings.max_running_samples
        self._has_fixed_nodes = settings.has_fixed_nodes
        self._launch = launch
        eval_weight = None if settings.eval_weight == "by_batch_id" else settings.eval_weight
        self._quotas = quotas
        weights = {namespace: table.weight for namespace, table in namespaces.items()}
        self._shares = Shares(supply_of(pool, settings.max_running_samples), weights)
        self._queue = ReadyQueue(
            settings.max_bypass,
            FlowPolicy(eval_weight),
            settings.max_wait_seconds,
            self._competes,
            shares=self._shares,
            wants=self._wants,
            is_capped=self._is_capped,
            can_fit=self._can_fit,
        )
        self._wake = asyncio.Event()
        self._permits_out = 0
        self.stranded_tokens = 0
        self._may_hold_ended = False
        self._in_budget: dict[str, int] = {}
        """How many tokens the budget of each evaluator holds."""
        self._most_tokens: dict[str, int] = {}
        """See `most_tokens`; by evaluator."""
        self._demands: dict[str, Resource] = {}
        """What a sample of each evaluator holds: always the same object, which the pool has converted already."""
        self._gate = gate
        if gate is not None:
            gate.opened = self._wake.set
        self.is_stopped = False
        self.reasons = WaitingReasons(self, self._queue, pool, recorder.ledger, clock, quotas, gate, self._max_permits)

    def enqueue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        """Adds one batch: attempts of one submission and one spec."""
        now = self._clock.monotonic()
        if self._gate is not None:
            attempts = self._gate.hold(spec, attempts, now)
        if attempts:
            self._queue.push(spec, attempts, now)
        self._wake.set()

    def requeue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        """Adds attempts of what was let in before."""
        self._queue.push(spec, attempts, self._clock.monotonic())
        self._wake.set()

    def enqueue_lease(
        self,
        namespace: str,
        batch_key: tuple[float, int],
        demand: PlacementDemand,
        tokens: int,
        grant: Callable[[Lease], None],
    ) -> ReadyLease:
        """Adds a claim from outside, and grants it before this returns if it fits and nothing holds it back."""
        entry = self._queue.push_lease(batch_key, demand, tokens, grant, self._clock.monotonic(), namespace)
        if self._admit_for_one_turn():
            self._wake.set()
        return entry

    def withdraw(self, entry: ReadyLease) -> None:
        """Takes out a claim that waits no longer: what it held back may go on."""
        self._queue.remove(entry, self._clock.monotonic())
        self._wake.set()

    def room_is_stranded(self, tokens: int) -> None:
        """So many tokens are held by handlers that do not stop.

        A batch that needs their room waits for something that may never come: it holds nobody back meanwhile.
        """
        self.stranded_tokens = tokens
        self._queue.holds_back = tokens == 0
        self._wake.set()

    def permit_returned(self, spec: EvaluatorSpec, namespace: str, taken_at: float) -> None:
        """A permit that was handed out at `taken_at` is free again, and its token has been given back."""
        self._permits_out -= 1
        demand, now = self._demand_of(spec), self._clock.monotonic()
        self._shares.give_back(namespace, spec.evaluator_id, demand, 1, taken_at, now)
        self.room_returned()

    def lease_returned(self, namespace: str, per_sample: Resource, tokens: int, taken_at: float) -> None:
        """So many tokens of a claim have been given back."""
        self._shares.give_back(namespace, per_sample, per_sample, tokens, taken_at, self._clock.monotonic())
        self.room_returned()

    def quotas_changed(self) -> None:
        """What a quota kept from being admitted may go on."""
        self._wake.set()

    def nodes_changed(self) -> None:
        """Nodes of the pool came or went."""
        self._most_tokens.clear()
        self._shares.supply_is(supply_of(self._pool, self._max_permits), self._clock.monotonic())
        self.room_returned()

    def room_returned(self) -> None:
        """Something was given back to the pool."""
        self._queue.unblock()
        self._wake.set()

    def attempts_were_ended(self) -> None:
        """The ledger has ended attempts that waited: they are left out from now on, and hold nothing back."""
        self._may_hold_ended = True
        self.room_returned()

    def stop(self) -> None:
        """Lets nothing in any more; what waits goes on waiting."""
        self.is_stopped = True

    async def run(self) -> None:
        """The resident loop: one sweep for each wake."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._sweep()

    async def _sweep(self) -> None:
        while self._admit_for_one_turn():  # noqa: ASYNC110 -- gives way to others, waits for nothing
            await asyncio.sleep(0)

    def _admit_for_one_turn(self) -> bool:
        """Admits what fits, for a few milliseconds at most; True when there may be more.

        Nothing that was admitted starts before this turn is over, so its leases are recorded together at the end.
        """
        turn_ends = time.monotonic() + _TURN_SECONDS
        leased: list[AttemptRef] = []
        may_be_more = False
        now = self._clock.monotonic()
        if self._gate is not None and not self.is_stopped:
            for held in self._gate.let_go():
                self._queue.push(held.spec, held.attempts, now)
        while not self.is_stopped and (self._permits_out < self._max_permits or self._queue.claims):
            entry = self._queue.offer(now)
            if entry is None:
                self._may_hold_ended = self._may_hold_ended and len(self._queue) > 0
                break
            if isinstance(entry, ReadyBatch) and not self._has_live_attempts(entry):
                self._queue.drop(entry, now)
            elif not self._admit(entry, now):
                self._queue.refuse(entry)
            elif isinstance(entry, ReadyBatch):
                leased.extend([attempt.ref for attempt in entry.attempts])
            if time.monotonic() >= turn_ends:
                may_be_more = True
                break
        if leased:
            self._recorder.record(LeaseAttempts(tuple(leased)), "")
        return may_be_more

    def _has_live_attempts(self, entry: ReadyBatch) -> bool:
        if self._may_hold_ended:
            ledger = self._recorder.ledger
            live = [attempt for attempt in entry.attempts if ledger.is_waiting(attempt.ref)]
            if not live:
                return False
            entry.attempts = live
        return True

    def _admit(self, entry: ReadyEntry, now: float) -> bool:
        if not isinstance(entry, ReadyBatch):
            assert isinstance(entry, ReadyLease)
            return self._grant(entry, now)
        tokens = self._tokens_for(entry)
        if tokens is None:
            return False
        self._queue.admit(entry, now)
        self._permits_out += len(tokens)
        self._launch(entry.spec, entry.attempts, tokens, now)
        return True

    def _grant(self, entry: ReadyLease, now: float) -> bool:
        assert self._pool is not None, "without a pool nobody can claim"
        lease = self._pool.try_acquire_batch(entry.budget, entry.per_sample, entry.tokens)
        if lease is None:
            return False
        self._queue.admit(entry, now)
        entry.grant(lease)
        return True

    def _tokens_for(self, entry: ReadyBatch) -> Sequence[PlacementToken | None] | None:
        spec, wanted = entry.spec, self._tokens_at_once(entry)
        if self._permits_are_short(wanted):
            return None
        if self._pool is None:
            return [None] * wanted
        lease = self._pool.try_acquire_batch(spec.resource, self._demand_of(spec), wanted)
        return None if lease is None else lease.tokens

    def _tokens_at_once(self, entry: ReadyEntry) -> int:
        """What an entry takes when it is admitted: a batch no more than its budget, and any limit, lets run at once."""
        if not isinstance(entry, ReadyBatch):
            return entry.cost
        count = len(entry.attempts)
        if count == 1:  # Most batches; whatever the limits are, they let one run.
            return 1
        quota = self._quotas.of(entry.flow[0]).max_running_samples
        limit = self.most_tokens(entry.spec)
        return min(count, limit if quota is None else min(limit, quota), self._tokens_in_budget(entry.spec))

    def most_tokens(self, spec: EvaluatorSpec) -> int:
        """How many tokens one batch may want, so that it waits neither for more permits than there are nor for nodes
        that never come.

        16 samples of one GPU each were accepted, and 8 GPUs are left after a restart: the batch starts with 8 tokens,
        and 8 samples follow on these. Where nodes come and go it waits for all 16 instead.
        """
        if self._pool is None or not self._has_fixed_nodes:
            return self._max_permits
        count = self._most_tokens.get(spec.evaluator_id)
        if count is None:
            on_nodes = max(1, self._pool.max_tokens_for(self._demand_of(spec)))
            count = self._most_tokens[spec.evaluator_id] = min(on_nodes, self._max_permits)
        return count

    def _tokens_in_budget(self, spec: EvaluatorSpec) -> int:
        count = self._in_budget.get(spec.evaluator_id)
        if count is None:
            if self._pool is None:
                count = spec.resource.concurrency
            else:
                count = tokens_in_budget(spec.resource, spec.sample_resource)
            self._in_budget[spec.evaluator_id] = count
        return count

    def _wants(self, entry: ReadyEntry) -> tuple[Resource | None, int]:
        return self._sample_of(entry), self._tokens_at_once(entry)

    def _is_capped(self, entry: ReadyEntry) -> bool:
        if not self._quotas.there_are_any:
            return False
        namespace = entry.flow[0]
        quota = self._quotas.of(namespace).max_running_samples
        return quota is not None and self._shares.tokens_of(namespace) + self._tokens_at_once(entry) > quota

    def _can_fit(self, entry: ReadyEntry) -> bool:
        """Whether the nodes that there are could hold it: some may have been lost since it was let in."""
        return self._pool is None or self._tokens_at_once(entry) <= self._pool.max_tokens_for(self._sample_of(entry))

    def _demand_of(self, spec: EvaluatorSpec) -> Resource:
        demand = self._demands.get(spec.evaluator_id)
        if demand is None:
            demand = self._demands[spec.evaluator_id] = spec.sample_resource
        return demand

    def _competes(self, entry: ReadyEntry, head: ReadyEntry) -> bool:
        """Whether the entry would take a permit, or room of a kind, that the head waits for."""
        if self._pool is None:
            return True
        if isinstance(entry, ReadyBatch) and self.lacks_permits(head):
            return True
        return _may_want_the_same(self._sample_of(entry), self._sample_of(head))

    def _sample_of(self, entry: ReadyEntry) -> Resource:
        if isinstance(entry, ReadyBatch):
            return self._demand_of(entry.spec)
        assert isinstance(entry, ReadyLease)
        return entry.per_sample

    def lacks_permits(self, entry: ReadyEntry) -> bool:
        """Whether it needs more permits than are free."""
        return isinstance(entry, ReadyBatch) and self._permits_are_short(self._tokens_at_once(entry))

    def _permits_are_short(self, wanted: int) -> bool:
        return self._max_permits - self._permits_out < wanted


def _may_want_the_same(one: Resource, other: Resource) -> bool:
    """Whether there is a kind of room that both take, and nodes that would do for both."""
    if any(other.required_labels.get(label, value) != value for label, value in one.required_labels.items()):
        return False
    amounts = ((one.gpu, other.gpu), (one.cpu, other.cpu), (one.memory_gb, other.memory_gb))
    return any(min(both) > 0 for both in amounts) or not one.named.keys().isdisjoint(other.named)
