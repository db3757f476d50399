"""What there is to be had, and who wants the same of it: the pool, permits to run, and the namespaces' quotas.

Kinds of room: GPU, CPU, memory and each named resource of the pool's nodes; permits (`max_running_samples`), of which
each sample in this server takes one and a lease takes none; and the quota of a namespace, of which its samples and its
leases take one a token.

Three questions decide everything in the queue:

- `fits_ever`: would it fit if everything came back that still can? Nodes that are gone do not come back, and room that
  a stranded handler holds may not. On 8 GPUs of which 1 is stranded a batch of 8 may wait for ever, so nobody waits for
  it. One stranded CPU of 64 makes no difference to it.
- `is_capped`: is its namespace's quota too far used? With 1 of a quota of 4 held, a batch of 4 is capped, one of 3 is
  not.
- `took_from`: did an entry that was let in take room which a waiting one, the head, could have used? It did if the head
  now *waits for* a kind of room that the entry took, on a node that could hold the head's tokens.

A head waits for a kind of room of the pool if the pool could not give it all its tokens of that kind alone. Say that it
wants 8 GPUs with 4 CPUs each, and that no GPU and 60 CPUs are free: it waits for GPUs. A sample of 1 CPU leaves it 59
of the 32 CPUs that it needs, and takes nothing from it. Once 32 are left, the next such sample does. If each kind alone
would do, but never on one node together, the head waits for all of them.

Invariants
  1. `permits_out` are the permits that were taken and not given back; `shares` counts the tokens of each namespace.
  2. What `reserve` holds is taken by `acquire` in the same turn of the loop, or given back before it returns.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

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
    from py_scheduler.scheduler.queue.entries import Kind, ReadyEntry

_MAX_KNOWN = 1_024
"""Demands of leases are without number: no end of them may be remembered."""


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


class _Demand(msgspec.Struct):
    """What is known of one demand."""

    parts: dict[str, Resource]
    """Of each kind of room that it takes: a demand of that alone, on the same nodes."""
    labels: dict[str, str]
    is_for_any_node: bool = False
    """Whether every node could hold a token of it, were it empty."""
    layout: int = -1
    """The pool's layout of which that was said."""


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
        self._samples: dict[str, Resource] = {}
        """What a sample of each evaluator holds."""
        self._most_tokens: dict[str, int] = {}
        """Of each evaluator, how many samples one batch may run at once: what budget, permits and nodes allow."""
        self._has_fixed_nodes = has_fixed_nodes
        self._demands: dict[Kind, _Demand] = {}
        self._waited_for: set[tuple[Kind, int, str]] = set()
        """A kind and number of tokens that is short of a kind of room, until something comes back."""
        self._reserved: tuple[ReadyEntry, Lease] | None = None
        self._last_taken: Sequence[PlacementToken | None] = ()
        """By the entry that was let in last."""
        self._stranded = _Stranded()

    @property
    def stranded(self) -> Sequence[StrandedToken]:
        return self._stranded.tokens

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

    def nodes_changed(self) -> None:
        """Nodes of the pool came or went."""
        self._most_tokens.clear()

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

    def lacks_permits(self, entry: ReadyEntry) -> bool:
        """Whether it needs more permits than are free."""
        return isinstance(entry, ReadyBatch) and self.max_permits - self.permits_out < entry.tokens

    # Who wants the same?

    def took_from(self, entry: ReadyEntry, head: ReadyEntry) -> bool:
        """Whether the entry, which has just been let in, took room that a waiting head could have used."""
        decided = self._decided_by_counts(entry, head, 0)
        if decided is not None:
            return decided
        kinds = self._shared_kinds(entry, head) if self.pool is not None else []
        return bool(kinds) and self._could_use(head, self._last_taken) and self._waits_for(head, kinds, is_settled=True)

    def reserve(self, entry: ReadyEntry, heads: Sequence[ReadyEntry]) -> bool:
        """Whether the entry can be let in without taking room that one of these heads could use.

        What it gets of the pool is held for it until it is acquired, which is to follow at once. True as well when it
        does not fit at all: the acquire says so then.
        """
        rivals: list[tuple[ReadyEntry, list[str]]] = []
        for head in heads:
            decided = self._decided_by_counts(entry, head, entry.tokens)
            if decided:
                return False
            if decided is None and (kinds := self._shared_kinds(entry, head)):
                rivals.append((head, kinds))
        if self.pool is None or not rivals or self.lacks_permits(entry):
            return True
        if any(self._is_for_any_node(head) and self._waits_for(head, kinds, is_settled=True) for head, kinds in rivals):
            return False
        lease = self._place(entry)
        if lease is None:
            return True
        if any(
            self._could_use(head, lease.tokens) and self._waits_for(head, kinds, is_settled=False)
            for head, kinds in rivals
        ):
            lease.release()
            lease = self._place_elsewhere(entry, [head for head, _ in rivals])
        if lease is not None:
            self._reserved = (entry, lease)
        return lease is not None

    def _decided_by_counts(self, entry: ReadyEntry, head: ReadyEntry, more: int) -> bool | None:
        """Whether an entry takes quota or permits that a head could use, once it has so many tokens more. None:
        neither.

        What waits for the quota of its own namespace waits for nobody else: another namespace takes nothing from it.
        """
        is_own = entry.flow[0] == head.flow[0]
        left = self.quota_left(head.flow[0])
        if left is not None and left - more * is_own < head.tokens:
            return is_own
        if not isinstance(entry, ReadyBatch) or not isinstance(head, ReadyBatch):
            return None
        return True if self.max_permits - self.permits_out - more < head.tokens else None

    def _could_use(self, head: ReadyEntry, tokens: Sequence[PlacementToken | None]) -> bool:
        """Whether any of these tokens is on a node that could hold one of a head's."""
        assert self.pool is not None
        nodes = {token.node_ip for token in tokens if token is not None}
        return any(self.pool.could_hold(head.per_sample, node_ip) for node_ip in nodes)

    def _waits_for(self, head: ReadyEntry, kinds: Sequence[str], *, is_settled: bool) -> bool:
        """Whether a head waits for one of these kinds of room. is_settled: whether what is held now stays so until
        something comes back.
        """
        if any(self._is_short_of(head, kind, is_settled=is_settled) for kind in kinds):
            return True
        assert self.pool is not None
        if self.pool.free_tokens_for(head.per_sample) >= head.tokens:
            return False
        others = self._demand(head).parts.keys() - kinds
        return not any(self._is_short_of(head, kind, is_settled=is_settled) for kind in others)

    def _is_short_of(self, head: ReadyEntry, kind: str, *, is_settled: bool) -> bool:
        """Whether the pool could not give a head all its tokens of one kind alone."""
        known = (head.shape[0], head.tokens, kind)
        if known in self._waited_for:
            return True
        assert self.pool is not None
        is_short = self.pool.free_tokens_for(self._demand(head).parts[kind]) < head.tokens
        if is_short and is_settled:
            self._waited_for.add(known)
        return is_short

    def _shared_kinds(self, entry: ReadyEntry, head: ReadyEntry) -> list[str]:
        """The kinds of room that both take, if a node can have the labels of both."""
        one, other = self._demand(entry), self._demand(head)
        if one.labels and any(other.labels.get(label, value) != value for label, value in one.labels.items()):
            return []
        return [kind for kind in one.parts if kind in other.parts]

    def _demand(self, entry: ReadyEntry) -> _Demand:
        demand = self._demands.get(entry.shape[0])
        if demand is None:
            if len(self._demands) >= _MAX_KNOWN:
                self._demands.clear()
            demand = self._demands[entry.shape[0]] = _Demand(
                _parts_of(entry.per_sample), entry.per_sample.required_labels
            )
        return demand

    def _is_for_any_node(self, head: ReadyEntry) -> bool:
        assert self.pool is not None
        demand, layout = self._demand(head), self.pool.layout_version
        if demand.layout != layout:
            demand.is_for_any_node, demand.layout = self.pool.could_hold_everywhere(head.per_sample), layout
        return demand.is_for_any_node

    # Taken and given back

    def acquire(self, batch: ReadyBatch) -> Sequence[PlacementToken | None] | None:
        """One token (None without a pool) for each permit that a batch takes; None when it does not fit now."""
        if self.max_permits - self.permits_out < batch.tokens:
            return None
        tokens: Sequence[PlacementToken | None]
        if self.pool is None:
            tokens = [None] * batch.tokens
        else:
            lease = self._place(batch)
            if lease is None:
                return None
            tokens = lease.tokens
        self.permits_out += batch.tokens
        self._last_taken = tokens
        return tokens

    def acquire_lease(self, entry: ReadyLease) -> Lease | None:
        """None when it does not fit now."""
        lease = self._place(entry)
        if lease is not None:
            self._last_taken = lease.tokens
        return lease

    def _place(self, entry: ReadyEntry) -> Lease | None:
        if self._reserved is not None:
            reserved, lease = self._reserved
            self._reserved = None
            if reserved is entry:
                return lease
            lease.release()
        assert self.pool is not None, "without a pool nobody asks for a lease"
        if isinstance(entry, ReadyBatch):
            return self.pool.try_acquire_batch(entry.spec.resource, entry.per_sample, entry.tokens)
        assert isinstance(entry, ReadyLease)
        return self.pool.try_acquire_batch(entry.budget, entry.per_sample, entry.tokens)

    def _place_elsewhere(self, entry: ReadyEntry, heads: Sequence[ReadyEntry]) -> Lease | None:
        """On nodes alone that none of these heads could use, where the pool by itself would have taken others."""
        assert self.pool is not None
        return self.pool.try_acquire_apart(entry.per_sample, entry.tokens, [head.per_sample for head in heads])

    def came_back(self) -> None:
        """Something was given back, or a node came: who was short may be so no longer."""
        self._waited_for.clear()

    def strand(self, tokens: Sequence[StrandedToken]) -> None:
        """These are all that handlers hold which do not stop."""
        self._stranded.strand(tokens)


def _parts_of(demand: Resource) -> dict[str, Resource]:
    labels = demand.required_labels
    parts = {
        "gpu": Resource(gpu=demand.gpu, required_labels=labels),
        "cpu": Resource(cpu=demand.cpu, required_labels=labels),
        "memory_gb": Resource(memory_gb=demand.memory_gb, required_labels=labels),
    }
    parts = {kind: part for kind, part in parts.items() if getattr(part, kind) > 0}
    return parts | {
        f"named.{name}": Resource(named={name: amount}, required_labels=labels) for name, amount in demand.named.items()
    }
