"""Who may take whose room: the rules of the ready queue word by word, on a pool without an index and without memory.

Shares no code with `scheduler/queue/room.py`: each answer is made anew by placing tokens one after another.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from tests.support.reference_pool import Demand, Node, ReferencePool, Token

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.resources import NodeResource, Resource

_NO_END = 1 << 30


def demand_of(resource: Resource) -> Demand:
    return Demand.of(
        resource.gpu, resource.cpu, resource.memory_gb, dict(resource.named), dict(resource.required_labels)
    )


def kinds_of(demand: Demand) -> dict[str, Demand]:
    """The demand as if it were of one kind of room alone, for each kind that it takes."""
    alone = {
        "gpu": Demand(demand.gpu, 0, 0, {}, demand.labels),
        "cpu": Demand(0, demand.cpu, 0, {}, demand.labels),
        "memory": Demand(0, 0, demand.memory, {}, demand.labels),
    }
    kinds = {kind: part for kind, part in alone.items() if getattr(part, kind)}
    return kinds | {name: Demand(0, 0, 0, {name: amount}, demand.labels) for name, amount in demand.named.items()}


class Want(msgspec.Struct):
    """What an entry takes when it is let in."""

    namespace: str
    demand: Demand
    tokens: int
    takes_permits: bool


class Held(msgspec.Struct, eq=False):
    """One token that somebody holds; two that look the same are two."""

    want: Want
    token: Token
    is_stranded: bool = False


class RoomOracle:
    """What is held and what is free."""

    def __init__(self, nodes: Sequence[NodeResource], max_permits: int) -> None:
        self.pool = ReferencePool()
        for node in nodes:
            self.pool.add(node.node_ip, node.gpus, node.cpu, node.memory_gb, node.named, node.labels)
        self.max_permits = max_permits
        self.quotas: dict[str, int] = {}
        self.held: list[Held] = []

    # What is free

    def permits_free(self, *, with_stranded_only: bool = False) -> int:
        held = [held for held in self.held if held.is_stranded or not with_stranded_only]
        return self.max_permits - sum(held.want.takes_permits for held in held)

    def quota_left(self, namespace: str, *, with_stranded_only: bool = False) -> int:
        held = [held for held in self.held if held.is_stranded or not with_stranded_only]
        return self.quotas.get(namespace, _NO_END) - Counter(held.want.namespace for held in held)[namespace]

    def fits_now(self, want: Want) -> bool:
        if want.takes_permits and self.permits_free() < want.tokens:
            return False
        return self.quota_left(want.namespace) >= want.tokens and self.tokens_free(want.demand) >= want.tokens

    def fits_ever(self, want: Want) -> bool:
        """Beside what is stranded, once everything else came back."""
        if want.takes_permits and self.permits_free(with_stranded_only=True) < want.tokens:
            return False
        if self.quota_left(want.namespace, with_stranded_only=True) < want.tokens:
            return False
        emptied = copy.deepcopy(self)
        for held in emptied.held:
            if not held.is_stranded:
                held.token.node.change(held.token.demand, held.token.gpu_ids, +1)
        return emptied.tokens_free(want.demand) >= want.tokens

    def tokens_free(self, demand: Demand, pool: ReferencePool | None = None) -> int:
        pool = self.pool if pool is None else pool
        if not kinds_of(demand):
            return _NO_END if any(_may_hold(node, demand) for node in pool.present()) else 0
        return pool.free_tokens(demand)

    # Who takes what another waits for

    def waits_for(self, head: Want) -> set[str]:
        """The kinds of room that the pool has too little of for a head: each alone, or else all of them together."""
        kinds = kinds_of(head.demand)
        short = {kind for kind, alone in kinds.items() if self.tokens_free(alone) < head.tokens}
        if short or self.tokens_free(head.demand) >= head.tokens:
            return short
        return set(kinds)

    def nodes_for(self, head: Want) -> set[str]:
        """Those that would hold a token of it if they were empty."""
        emptied = copy.deepcopy(self)
        for held in emptied.held:
            held.token.node.change(held.token.demand, held.token.gpu_ids, +1)
        return {node.name for node in emptied.pool.present() if _may_hold(node, head.demand)}

    def took_from(self, entry: Want, tokens: Sequence[Token], head: Want) -> bool:
        """Whether an entry, which holds these tokens by now, took room that a head could have used."""
        is_own = entry.namespace == head.namespace
        if self.quota_left(head.namespace) < head.tokens:
            return is_own
        if entry.takes_permits and head.takes_permits and self.permits_free() < head.tokens:
            return True
        if not self.share_kinds(entry, head) or self.nodes_for(head).isdisjoint(token.node.name for token in tokens):
            return False
        return not self.waits_for(head).isdisjoint(kinds_of(entry.demand))

    def share_kinds(self, entry: Want, head: Want) -> bool:
        labels = head.demand.labels
        if any(labels.get(label, value) != value for label, value in entry.demand.labels.items()):
            return False
        return not kinds_of(entry.demand).keys().isdisjoint(kinds_of(head.demand))

    def can_go_beside(self, entry: Want, heads: Sequence[Want]) -> bool:
        """Whether an entry that fits now takes nothing that one of these heads could use: where the pool places it, or
        on nodes alone that none of them could use.
        """
        after = copy.deepcopy(self)
        tokens = after.take(entry)
        if not any(after.took_from(entry, tokens, head) for head in heads):
            return True
        rivals = [head for head in heads if self.share_kinds(entry, head)]
        kept = set().union(*(self.nodes_for(head) for head in rivals))
        after = copy.deepcopy(self)
        rest = ReferencePool([node for node in after.pool.present() if node.name not in kept])
        if after.tokens_free(entry.demand, rest) < entry.tokens:
            return False
        tokens = after.take(entry, rest)
        return not any(after.took_from(entry, tokens, head) for head in heads)

    # In and out

    def take(self, want: Want, pool: ReferencePool | None = None) -> list[Token]:
        """By the pool's own choice."""
        tokens = (self.pool if pool is None else pool).acquire(want.demand, want.tokens)
        assert tokens is not None
        self.held += [Held(want, token) for token in tokens]
        return tokens

    def take_at(self, want: Want, node_ip: str, gpu_ids: Sequence[int]) -> Held:
        """Where somebody else chose."""
        node = self.pool.find(node_ip)
        assert node.takes_tokens
        assert _may_hold(node, want.demand)
        token = Token(node, list(gpu_ids), want.demand)
        node.change(want.demand, token.gpu_ids, -1)
        assert all(free >= 0 for free in (node.cpu, node.memory, *node.gpus.values(), *node.named.values()))
        held = Held(want, token)
        self.held.append(held)
        return held

    def give_back(self, held: Held) -> None:
        self.held.remove(held)
        self.pool.release(held.token)


def _may_hold(node: Node, demand: Demand) -> bool:
    return node.takes_tokens and node.choose_gpus(demand) is not None
