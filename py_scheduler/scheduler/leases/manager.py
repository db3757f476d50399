"""Room for schedulers that live elsewhere: from the same pool and through the same ready queue as the rollouts.

    acquire -> PENDING, an entry of the ready queue -> GRANTED, a lease of the pool -> ENDED: released or expired
                  `-> ENDED: withdrawn, not asked for during its ttl, or the server stops

Invariants
  1. A record stands in the ready queue exactly while it is PENDING, and holds a lease of the pool exactly while it is
     GRANTED. It goes from one state to the next within one turn of the loop, and never back.
  2. Room comes back once, by a release or at the expiry, and whoever gives it back wakes admission.
  3. Fencing tokens rise strictly with every grant, also from one run of the server to the next: the journal says where
     they begin, and moves that on for good each time it is opened. Without one on disk it is the wall clock.
  4. A record that is not over has exactly one entry in the deadline heap, which never comes later than its end:
     renewing moves `expires_at` alone, and the entry follows when it comes up. Nothing expires while a call that asked
     for it when it was pending is under way.
  5. A record is found under its lease id and its request id until it is forgotten; only ENDED ones are, oldest first.
  6. A call that is refused changes nothing.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import deque
from functools import partial
from typing import TYPE_CHECKING

from py_scheduler.domain.leases import (
    AcquireRequest,
    CapacityView,
    LeaseState,
    LeaseView,
    PlacementDemand,
    PlacementView,
    ReleaseReply,
    ReleaseRequest,
    RenewRequest,
    check_acquire,
    check_demand,
)
from py_scheduler.domain.requests import NodeView
from py_scheduler.domain.resources import NODE_AMOUNTS
from py_scheduler.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseError,
    ResourceExhaustedError,
    UnplaceableError,
)
from py_scheduler.execution.deadlines import Deadlines
from py_scheduler.placement import tokens_in_budget
from py_scheduler.scheduler.leases.record import LeaseRecord, resolve
from py_scheduler.scheduler.ledger.records import sort_batch_id
from py_scheduler.scheduler.queue.explanations import node_shortage

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.resources import Resource
    from py_scheduler.errors import FieldViolation
    from py_scheduler.placement import Lease, NodeUsage, PlacementPool
    from py_scheduler.scheduler.queue.admission import Admission
    from py_scheduler.scheduler.queue.quotas import Quotas
    from py_scheduler.scheduler.settings import EngineSettings

_RETRY_AFTER_SECONDS = 1.0
_SHUTTING_DOWN = "the server is shutting down and grants nothing any more: ask another one"


class LeaseManager:
    """Leases from outside. Implements `api.ports.PlacementPort`.

    Every method raises FailedPreconditionError when there is no pool.
    """

    def __init__(
        self, pool: PlacementPool | None, admission: Admission, clock: Clock, settings: EngineSettings, quotas: Quotas
    ) -> None:
        self._pool = pool
        self._admission = admission
        self._clock = clock
        self._quotas = quotas
        self._has_fixed_nodes = settings.has_fixed_nodes
        self._max_pending = settings.max_pending_leases
        self._retained = settings.retained_leases
        self._records: dict[str, LeaseRecord] = {}
        self._by_request: dict[tuple[str, str], LeaseRecord] = {}
        self._pending: set[LeaseRecord] = set()
        self._ended: deque[LeaseRecord] = deque()
        self._remembered = 0
        """Request ids that ended records keep: their own and those of their releases."""
        self._deadlines: Deadlines[LeaseRecord] = Deadlines(clock, self._on_deadline)
        self._fencing_tokens = itertools.count(1)
        self._is_stopped = False

    def start(self, first_fencing_token: int) -> None:
        """Fencing tokens begin here: far above all that earlier runs of the server can have given out."""
        self._fencing_tokens = itertools.count(first_fencing_token)

    # Calls

    async def acquire(self, request: AcquireRequest) -> LeaseView:
        """Grants, joins or finds again what the request id stands for, and says how it stands.

        Raises InvalidArgumentError, UnplaceableError (it could never fit), AlreadyExistsError (the id has other terms),
        ResourceExhaustedError (too many records wait), FailedPreconditionError (the server is stopping).
        """
        record = self._by_request.get((request.namespace, request.request_id))
        if record is None:
            record = self._open(request)
        elif record.terms != request.terms:
            raise AlreadyExistsError(
                f"request_id {request.request_id!r} was used with other content: take a fresh one for another lease"
            )
        self._end_if_due(record)
        why_pending = await self._ask(record, request) if record.state is LeaseState.PENDING else ""
        if record.end_reason == _SHUTTING_DOWN:
            raise FailedPreconditionError(_SHUTTING_DOWN)
        reason = why_pending if record.state is LeaseState.PENDING else record.end_reason
        return record.view(self._clock.monotonic(), reason)

    def renew(self, request: RenewRequest) -> float:
        """Holds a lease for another ttl; for how many seconds that is. Raises LeaseError when it is not held."""
        record = self._held(request.namespace, request.lease_id, request.fencing_token)
        record.touch(self._clock.monotonic())
        return record.terms.ttl_seconds

    def release(self, request: ReleaseRequest) -> ReleaseReply:
        """Gives back tokens, or takes back a pending record; once for each request id.

        Raises LeaseError when the lease, or one of the tokens, is not held; AlreadyExistsError, InvalidArgumentError.
        """
        known = self._records.get(request.lease_id)
        if known is not None and known.namespace == request.namespace:
            answered = known.releases.get(request.request_id)
            if answered is not None:
                if answered[0] != request:
                    raise AlreadyExistsError(f"request_id {request.request_id!r} released something else")
                return answered[1]
            self._end_if_due(known)
            if known.state is LeaseState.PENDING and request.fencing_token == 0:
                self._end(known, "withdrawn by its owner")
                return self._answer(known, request, 0)
        record = self._held(request.namespace, request.lease_id, request.fencing_token)
        returned = self._tokens_to_release(record, request.token_nos)
        for token_no in returned:
            record.tokens.pop(token_no).release()
        if not record.tokens:
            self._end(record, "released by its owner")
        self._give_back(record, len(returned))
        return self._answer(record, request, len(returned))

    def capacity(self, per_sample: Resource) -> CapacityView:
        """Raises InvalidArgumentError."""
        pool = self._require_pool()
        return CapacityView(
            max_tokens=pool.max_tokens_for(per_sample),
            free_tokens=pool.free_tokens_for(per_sample),
            nodes=tuple(map(node_view, pool.nodes())),
        )

    def explain(self, demand: PlacementDemand) -> PlacementView:
        """Raises InvalidArgumentError, UnplaceableError when the budget holds no sample."""
        pool = self._require_pool()
        _check(check_demand(demand))
        wanted = _tokens_wanted(demand)
        explanation = pool.explain(demand.per_sample, wanted)
        return PlacementView(
            wanted_tokens=wanted,
            free_tokens=explanation.free_tokens,
            max_tokens=explanation.max_tokens,
            nodes=tuple(map(node_shortage, explanation.nodes)),
        )

    def stop(self) -> None:
        """Ends what is pending and grants nothing any more; what is held can still be renewed and released."""
        self._is_stopped = True
        for record in list(self._pending):
            self._end(record, _SHUTTING_DOWN)

    def close(self) -> None:
        """Lets no timer outlive the engine."""
        self.stop()
        self._deadlines.clear()

    # From PENDING on

    def _open(self, request: AcquireRequest) -> LeaseRecord:
        pool = self._require_pool()
        _check(check_acquire(request))
        if self._is_stopped:
            raise FailedPreconditionError(_SHUTTING_DOWN)
        demand = request.terms.demand
        # In this order: a faulty sample is told of as such, not as the budget that is made of it.
        capacity = pool.max_tokens_for(demand.per_sample)
        tokens = _tokens_wanted(demand)
        if tokens > capacity and self._has_fixed_nodes:
            raise UnplaceableError(
                f"the lease needs {tokens} tokens, the pool can give {capacity} even when empty: lower max_tokens, "
                "ask for less per sample, or add nodes"
            )
        quota = self._quotas.of(request.namespace).max_running_samples
        if quota is not None and tokens > quota:
            raise UnplaceableError(
                f"the lease needs {tokens} tokens, the quota of namespace {request.namespace!r} is "
                f"max_running_samples = {quota}: lower max_tokens"
            )
        # Before it is known whether the record would wait: one that is refused leaves nothing behind.
        if len(self._pending) >= self._max_pending:
            raise ResourceExhaustedError(
                f"max_pending_leases ({self._max_pending}) wait for room: come back later", _RETRY_AFTER_SECONDS
            )
        record = LeaseRecord(f"l{os.urandom(8).hex()}", request, self._clock.monotonic())
        self._records[record.lease_id] = self._by_request[record.namespace, record.request_id] = record
        self._pending.add(record)
        self._deadlines.add(record.expires_at, record)
        entry = self._admission.enqueue_lease(
            request.namespace, sort_batch_id(request.terms.batch_id), demand, tokens, partial(self._grant, record)
        )
        if record.state is LeaseState.PENDING:
            record.entry = entry
        return record

    def _grant(self, record: LeaseRecord, lease: Lease) -> None:
        """Admission's answer, in the turn in which the record left the queue."""
        if record.entry is not None:
            record.bypassed, record.entry = record.entry.bypassed, None
        now = self._clock.monotonic()
        self._pending.discard(record)
        record.state = LeaseState.GRANTED
        record.lease = lease
        record.tokens = dict(enumerate(lease.tokens))
        record.fencing_token = next(self._fencing_tokens)
        record.waited_seconds = now - record.queued_at
        record.touch(now)
        record.wake()

    async def _ask(self, record: LeaseRecord, request: AcquireRequest) -> str:
        """Waits as long as a call for a pending record does; why it is pending then. However long the answer takes, the
        owner has a whole ttl from then on.
        """
        record.calls += 1
        try:
            if request.wait:
                await self._wait(record, request.timeout_seconds)
            return await self._admission.reasons.why_pending(record.entry) if record.entry is not None else ""
        finally:
            record.calls -= 1
            if not record.is_over:
                record.touch(self._clock.monotonic())

    async def _wait(self, record: LeaseRecord, timeout_seconds: float | None) -> None:
        """Until the record is no longer pending or the time is over."""
        if timeout_seconds is not None and timeout_seconds <= 0:
            return
        waiter = asyncio.get_running_loop().create_future()
        record.waiters.add(waiter)
        timer = None
        if timeout_seconds is not None:
            timer = self._clock.call_at(self._clock.monotonic() + timeout_seconds, partial(resolve, waiter))
        try:
            await waiter
        finally:
            record.waiters.discard(waiter)
            if timer is not None:
                timer.cancel()

    # To the end

    def _held(self, namespace: str, lease_id: str, fencing_token: int) -> LeaseRecord:
        """The lease, if it is held under this fencing token."""
        self._require_pool()
        record = self._records.get(lease_id)
        if record is None or record.namespace != namespace:
            raise LeaseError(
                f"lease {lease_id!r} is not known (any more): it ended long ago, or with the server that granted it"
            )
        self._end_if_due(record)
        if record.state is LeaseState.PENDING:
            raise LeaseError(f"lease {lease_id!r} is not granted yet: acquire it with its request_id again")
        if record.state is LeaseState.ENDED:
            raise LeaseError(f"lease {lease_id!r} was {record.end_reason}: acquire another one")
        if record.fencing_token != fencing_token:
            raise LeaseError(
                f"lease {lease_id!r} has another fencing token than {fencing_token}: acquire with the same request_id "
                "again to learn it"
            )
        return record

    def _on_deadline(self, record: LeaseRecord, _when: float) -> None:
        if record.calls:
            record.touch(self._clock.monotonic())
        if self._clock.monotonic() < record.expires_at:
            self._deadlines.add(record.expires_at, record)
        else:
            self._end_if_due(record)

    def _end_if_due(self, record: LeaseRecord) -> None:
        """A timer may come late; what it will say holds from the moment it was set for."""
        if record.is_over or record.calls or self._clock.monotonic() < record.expires_at:
            return
        ttl = record.terms.ttl_seconds
        if record.state is LeaseState.PENDING:
            self._end(record, f"dropped: nobody asked for it for ttl_seconds ({ttl:g})")
        else:
            self._end(record, f"expired: nobody renewed it for ttl_seconds ({ttl:g})")

    def _end(self, record: LeaseRecord, reason: str) -> None:
        if record.entry is not None:
            self._admission.withdraw(record.entry)
        if record.tokens and record.lease is not None:
            record.lease.release()
            self._give_back(record, len(record.tokens))
        if record.state is LeaseState.PENDING:
            record.waited_seconds = self._clock.monotonic() - record.queued_at
        self._pending.discard(record)
        record.state, record.end_reason = LeaseState.ENDED, reason
        record.entry, record.lease, record.tokens = None, None, {}
        record.wake()
        self._ended.append(record)
        self._remember(1 + len(record.releases))

    def _give_back(self, record: LeaseRecord, tokens: int) -> None:
        per_sample, granted_at = record.terms.demand.per_sample, record.queued_at + record.waited_seconds
        self._admission.lease_returned(record.namespace, per_sample, tokens, granted_at)

    def _remember(self, count: int) -> None:
        self._remembered += count
        while self._remembered > self._retained:
            forgotten = self._ended.popleft()
            self._remembered -= 1 + len(forgotten.releases)
            del self._records[forgotten.lease_id], self._by_request[forgotten.namespace, forgotten.request_id]

    def _answer(self, record: LeaseRecord, request: ReleaseRequest, released: int) -> ReleaseReply:
        reply = ReleaseReply(released_tokens=released, held_tokens=len(record.tokens))
        record.releases[request.request_id] = (request, reply)
        if record.is_over and record.lease_id in self._records:
            self._remember(1)
        return reply

    def _tokens_to_release(self, record: LeaseRecord, token_nos: tuple[int, ...]) -> tuple[int, ...]:
        wanted = tuple(dict.fromkeys(token_nos)) or tuple(record.tokens)
        count = _tokens_wanted(record.terms.demand)
        for token_no in wanted:
            if not 0 <= token_no < count:
                raise InvalidArgumentError(f"holds {token_no}, the lease's tokens are 0 to {count - 1}", "token_nos")
            if token_no not in record.tokens:
                raise LeaseError(f"token {token_no} of lease {record.lease_id!r} was given back already")
        return wanted

    # Helpers

    def _require_pool(self) -> PlacementPool:
        if self._pool is None:
            raise FailedPreconditionError(
                "this server has no pool to lease from: start it with a cluster layout "
                "(--env-cluster-layout, or layout in the [cluster] table)"
            )
        return self._pool


def node_view(node: NodeUsage) -> NodeView:
    """Supply of one node and what is free of it."""
    return NodeView(
        node_ip=node.node_ip,
        gpu_ids=tuple(node.gpu_ids),
        free_gpus=tuple(node.gpu_free),
        named=node.named,
        free_named=node.named_free,
        labels=node.labels,
        **{kind: getattr(node, kind) for kind in NODE_AMOUNTS},
        **{f"free_{kind}": getattr(node, f"{kind}_free") for kind in NODE_AMOUNTS},
    )


def _check(violations: Iterator[FieldViolation]) -> None:
    if found := list(violations):
        raise InvalidArgumentError(found)


def _tokens_wanted(demand: PlacementDemand) -> int:
    """Raises InvalidArgumentError for amounts that nobody can count, UnplaceableError when the budget holds no
    sample: what passes here never makes the pool raise.
    """
    return min(demand.max_tokens, tokens_in_budget(demand.ceiling, demand.per_sample))
