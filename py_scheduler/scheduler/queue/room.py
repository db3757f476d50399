"""What there is to be had: the pool, permits to run, and the namespaces' quotas; and what is taken of it.

Kinds of room: GPU, CPU, memory and each named resource of the pool's nodes; permits (`max_running_samples`), of which
each sample in this server takes one and a lease takes none; and the quota of a namespace, of which its samples and its
leases take one a token.

Two questions are asked of it (who competes for it, `rivalry` says):

- `fits_ever`: would it fit if everything came back that still can? Nodes that are gone do not come back, and room that
  a stranded handler holds may not. On 8 GPUs of which 1 is stranded a batch of 8 may wait for ever, so nobody waits for
  it. One stranded CPU of 64 makes no difference to it.
- `is_capped`: is its namespace's quota too far used? With 1 of a quota of 4 held, a batch of 4 is capped, one of 3 is
  not.

Invariants
  1. `take`, `give_back_permit` and `give_back_leased` alone change what is taken, of everything at once. `permits_out`
     are the permits that were taken and not given back; `shares` counts the tokens of each namespace. `strand` only
     says which of that may never come back.
  2. What `reserve` holds is taken by `take` in the same turn of the loop, or given back before it returns.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, overload

import msgspec

from py_scheduler.domain.resources import Resource
from py_scheduler.placement import tokens_in_budget
from py_scheduler.scheduler.queue.entries import ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.quotas import Quotas
from py_scheduler.scheduler.queue.shares import Shares, supply_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.placement import Lease, PlacementPool
    from py_scheduler.scheduler.queue.entries import ReadyEntry

    Tokens = Sequence[PlacementToken | None]
    """One for each token that an entry takes; None without a pool."""


class StrandedToken(msgspec.Struct, frozen=True):
    """Room that a handler holds which ignores its stop. node_ip: empty without a pool."""

    namespace: str
    per_sample: Resource
    node_ip: str
    gpu_ids: tuple[int, ...]


class _Stranded:
    """All stranded tokens, and a pool in which nothing but these is held. It is of the same nodes for as long as the
    layout stays, whatever strands and comes back.
    """

    def __init__(self) -> None:
        self.tokens: Sequence[StrandedToken] = ()
        self._pool: PlacementPool | None = None
        self._layout = -1
        self._leases: dict[StrandedToken, list[Lease]] = {}
        """Those that hold them in that pool; a lease that nobody keeps is given back."""
        self._is_current = False
        """Whether those are of `tokens`."""

    def strand(self, tokens: Sequence[StrandedToken]) -> None:
        self.tokens = tuple(tokens)
        self._is_current = False

    def tokens_beside(self, pool: PlacementPool, per_sample: Resource) -> int:
        """How many would fit in a pool if everything but the stranded tokens had come back."""
        if self._pool is None or self._layout != pool.layout_version:
            self._pool, self._layout = pool.emptied(), pool.layout_version
            self._leases, self._is_current = {}, False
        if not self._is_current:
            self._follow(self._pool)
        return self._pool.free_tokens_for(per_sample)

    def _follow(self, pool: PlacementPool) -> None:
        wanted = Counter(self.tokens)
        for token, leases in self._leases.items():
            del leases[wanted[token] :]
        for token, count in wanted.items():
            leases = self._leases.setdefault(token, [])
            # A node that takes no tokens any more is not in the pool.
            while len(leases) < count and pool.could_hold(token.per_sample, token.node_ip):
                leases.append(pool.adopt(token.per_sample, [token]))
        self._leases = {token: leases for token, leases in self._leases.items() if leases}
        self._is_current = True


class Room:
    """All the room of one server. pool None: only permits and quotas are short."""

    def __init__(
        self,
        pool: PlacementPool | None = None,
        max_permits: int = 1 << 30,
        quotas: Quotas | None = None,
        shares: Shares | None = None,
        *,
        has_fixed_nodes: bool = False,
    ) -> None:
        self.pool = pool
        self.max_permits = max_permits
        self.permits_out = 0
        self.shares = shares if shares is not None else Shares(supply_of(pool, max_permits))
        self.quotas = quotas if quotas is not None else Quotas({})
        self.last_taken: Tokens = ()
        """By the entry that was let in last."""
        self._samples: dict[str, Resource] = {}
        """What a sample of each evaluator holds."""
        self._most_tokens: dict[str, int] = {}
        """Of each evaluator, how many samples one batch may run at once: what budget, permits and nodes allow."""
        self._has_fixed_nodes = has_fixed_nodes
        self._reserved: tuple[ReadyEntry, Lease] | None = None
        self._stranded = _Stranded()

    # What entries want

    def sample_of(self, spec: EvaluatorSpec) -> Resource:
        sample = self._samples.get(spec.evaluator_id)
        if sample is None:
            sample = self._samples[spec.evaluator_id] = spec.sample_resource
        return sample

    def tokens_at_once(self, spec: EvaluatorSpec, attempts: int, namespace: str) -> int:
        """How many of these attempts start at once when they are let in: as many as budget, permits, quota and nodes
        allow, so that a batch waits neither for more permits than there are nor for nodes that never come.

        100 attempts with a budget of 8 samples, of a namespace whose quota is 4: 4 start, and the others follow on
        their tokens. 16 samples of one GPU each were accepted, and 8 GPUs are left after a restart: 8. Where nodes come
        and go those wait for all 16 instead.
        """
        if attempts == 1:  # Most batches; whatever the limits are, they let one run.
            return 1
        most = self._most_tokens.get(spec.evaluator_id)
        if most is None:
            most = self._most_tokens[spec.evaluator_id] = self._most_tokens_of(spec)
        quota = self.quotas.of(namespace).max_running_samples
        return min(attempts, most) if quota is None else min(attempts, most, quota)

    def _most_tokens_of(self, spec: EvaluatorSpec) -> int:
        if self.pool is None:
            return min(spec.resource.concurrency, self.max_permits)
        most = min(tokens_in_budget(spec.resource, spec.sample_resource), self.max_permits)
        return min(most, max(1, self.pool.max_tokens_for(self.sample_of(spec)))) if self._has_fixed_nodes else most

    # Does it fit?

    def fits_ever(self, entry: ReadyEntry) -> bool:
        """Whether it would fit if everything came back that still can."""
        namespace, stranded = entry.flow[0], self._stranded.tokens
        quota = self.quotas.of(namespace).max_running_samples
        if quota is not None and entry.tokens > quota - sum([token.namespace == namespace for token in stranded]):
            return False
        if isinstance(entry, ReadyBatch) and entry.tokens > self.max_permits - len(stranded):
            return False
        if self.pool is None:
            return True
        if not stranded:
            return entry.tokens <= self.pool.max_tokens_for(entry.per_sample)
        return entry.tokens <= self._stranded.tokens_beside(self.pool, entry.per_sample)

    def is_capped(self, entry: ReadyEntry) -> bool:
        """Whether its namespace's quota keeps it from being let in now."""
        if not self.quotas.there_are_any:
            return False
        left = self.quota_left(entry.flow[0])
        return left is not None and left < entry.tokens

    def quota_left(self, namespace: str) -> int | None:
        """How many tokens its quota still allows a namespace; None: it has no quota."""
        if not self.quotas.there_are_any:
            return None
        quota = self.quotas.of(namespace).max_running_samples
        return None if quota is None else quota - self.shares.tokens_of(namespace)

    def lacks_permits(self, entry: ReadyEntry, more: int = 0) -> bool:
        """Whether it needs more permits than are free once so many more are out."""
        return isinstance(entry, ReadyBatch) and self.max_permits - self.permits_out - more < entry.tokens

    def fits_now(self, entry: ReadyEntry) -> bool:
        """Whether permits and pool have all that it takes. Its quota is asked of `is_capped`."""
        if self.lacks_permits(entry):
            return False
        fits = self.pool is None or self.reserve(entry) is not None
        self._let_go()
        return fits

    # Taken and given back

    @overload
    def take(self, entry: ReadyBatch, now: float) -> Tokens | None: ...
    @overload
    def take(self, entry: ReadyLease, now: float) -> Lease | None: ...
    @overload
    def take(self, entry: ReadyEntry, now: float) -> Tokens | Lease | None: ...
    def take(self, entry: ReadyEntry, now: float) -> Tokens | Lease | None:
        """All that an entry takes when it is let in: of the pool and of its namespace's share, and permits if it is a
        batch. Returns the batch's tokens, or a lease; None when it does not fit now, and then nothing is taken.
        """
        is_batch = isinstance(entry, ReadyBatch)
        if self.lacks_permits(entry):
            return None
        lease: Lease | None = None
        if self.pool is None:
            assert is_batch, "without a pool nobody asks for a lease"
            tokens: Tokens = [None] * entry.tokens
        else:
            lease = self._place(self.pool, entry)
            if lease is None:
                return None
            tokens = lease.tokens
        self.last_taken = tokens
        self.shares.take(entry.flow[0], entry.shape[0], entry.per_sample, entry.tokens, now)
        if is_batch:
            self.permits_out += entry.tokens
            return tokens
        return lease

    def give_back_permit(self, spec: EvaluatorSpec, namespace: str, taken_at: float, now: float) -> None:
        """A permit and its token, which the pool has back already."""
        self.permits_out -= 1
        self.shares.give_back(namespace, spec.evaluator_id, self.sample_of(spec), 1, taken_at, now)

    def give_back_leased(self, namespace: str, per_sample: Resource, tokens: int, taken_at: float, now: float) -> None:
        """Tokens of a lease, which the pool has back already."""
        self.shares.give_back(namespace, per_sample, per_sample, tokens, taken_at, now)

    def reserve(self, entry: ReadyEntry, apart_from: Sequence[ReadyEntry] = ()) -> Sequence[PlacementToken] | None:
        """Holds what an entry would get of the pool now, until it is taken or another place is reserved. None: it does
        not fit, or not on the nodes alone that none of `apart_from` could use.
        """
        assert self.pool is not None
        self._let_go()
        if apart_from:
            demands = [other.per_sample for other in apart_from]
            lease = self.pool.try_acquire_apart(entry.per_sample, entry.tokens, demands)
        else:
            lease = self._place(self.pool, entry)
        if lease is None:
            return None
        self._reserved = entry, lease
        return lease.tokens

    def _let_go(self) -> None:
        if self._reserved is not None:
            self._reserved[1].release()
            self._reserved = None

    def _place(self, pool: PlacementPool, entry: ReadyEntry) -> Lease | None:
        if self._reserved is not None:
            reserved, lease = self._reserved
            if reserved is entry:
                self._reserved = None
                return lease
            self._let_go()
        if isinstance(entry, ReadyBatch):
            return pool.try_acquire_batch(entry.spec.resource, entry.per_sample, entry.tokens)
        assert isinstance(entry, ReadyLease)
        return pool.try_acquire_batch(entry.budget, entry.per_sample, entry.tokens)

    # What there is changes

    def nodes_changed(self, now: float) -> None:
        """Nodes of the pool came or went."""
        self._most_tokens.clear()
        self.shares.supply_is(supply_of(self.pool, self.max_permits), now)

    @property
    def stranded(self) -> Sequence[StrandedToken]:
        return self._stranded.tokens

    def strand(self, tokens: Sequence[StrandedToken]) -> None:
        """These are all that handlers hold which do not stop."""
        self._stranded.strand(tokens)
