"""How namespaces share all room: by weight, in what they hold over time.

A token's share is the largest fraction that it takes of any kind of room: GPUs, CPUs, memory, each named resource, and
places to run in. On 8 GPUs and 64 CPUs a token of 0.5 GPU and 2 CPUs has the share 1/16, because of its GPU (0.5/8; its
CPUs are 2/64).

A namespace's level is what it used over its weight: the shares of its tokens times the seconds that it held them. The
namespace with the least level is served next. So over any stretch in which two wait, they hold room as their weights
are, however long their samples take and whatever they need. Four of those tokens held for 10 s make 4 x 1/16 x 10 =
2.5.

A token counts from its admission, for as long as tokens of its namespace are usually held: with 1 s usually to go,
those four make 2.75, and 0.92 at weight 3. Otherwise a namespace whose samples take long would be given all room before
the first of them ends.

Invariants
  1. What counts as held is what was taken and not given back, token by token.
  2. A namespace that waits anew starts level with those that wait: its idle time is no credit. While nobody waits,
     nothing is counted: what was used until then is forgotten.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.resources import NODE_AMOUNTS, Resource
from py_scheduler.scheduler.queue.entries import DemandKey

if TYPE_CHECKING:
    from collections.abc import Mapping

    from py_scheduler.placement import PlacementPool

_PLACES = "places"
_USUAL_SECONDS = 1.0
"""How long a token is held, until one was given back."""
_LEAST_SECONDS = 1e-3
"""What a token counts for however short its sample was: to schedule it took something too."""
_SMOOTHING = 0.1
_KEEP_IDLE = 64


class _Account(msgspec.Struct, gc=False):
    """What one namespace used. settled: share-seconds of what it gave back, and of what it never had credit for."""

    settled: float = 0.0
    held: float = 0.0
    """Dominant shares of the tokens that it holds."""
    held_since: float = 0.0
    """The same, each times the moment from which it counts."""
    tokens: int = 0
    counts_from: float = 0.0
    """Nothing before that moment counts."""
    usual_seconds: float = 0.0
    """How long its tokens are held; 0: none was given back yet."""
    tokens_of: dict[DemandKey, int] = {}
    """The tokens that it holds, by their demand."""


class Shares:
    """supply: of each kind of room, how much there is. weights: of namespaces; others weigh 1. Times are monotonic
    seconds.
    """

    def __init__(self, supply: Mapping[str, float] | None = None, weights: Mapping[str, float] | None = None) -> None:
        self._supply = supply or {_PLACES: 1.0}
        self._weights = weights or {}
        self._accounts: dict[str, _Account] = {}
        self._waiting: set[str] = set()
        self._usual_seconds = _USUAL_SECONDS
        self._share_of: dict[str, float] = {}
        self._demand_of: dict[str, Resource | None] = {}

    def supply_is(self, supply: Mapping[str, float], now: float) -> None:
        """Nodes came or went: from now on what is held is a share of what there is now."""
        if supply == self._supply:
            return
        self._supply = supply
        self._share_of = {key: self._dominant(demand, is_outside=False) for key, demand in self._demand_of.items()}
        for account in self._accounts.values():
            account.settled += account.held * now - account.held_since
            account.counts_from = now
            account.held = sum([self._share_now(key) * count for key, count in account.tokens_of.items()])
            account.held_since = account.held * now

    def weight_of(self, namespace: str) -> float:
        return self._weights.get(namespace, 1.0)

    def tokens_of(self, namespace: str) -> int:
        """How many it holds."""
        account = self._accounts.get(namespace)
        return account.tokens if account is not None else 0

    # Who waits

    def begin_to_wait(self, namespace: str, now: float) -> None:
        if not self._waiting:
            self._start_over(now)
        account = self._accounts.get(namespace)
        if account is None:
            account = self._accounts[namespace] = _Account(counts_from=now)
        lacking = min((self.level(other, now) for other in self._waiting), default=0.0) - self.level(namespace, now)
        account.settled += max(0.0, lacking) * self.weight_of(namespace)
        self._waiting.add(namespace)

    def wait_no_longer(self, namespace: str, now: float) -> None:
        self._waiting.discard(namespace)
        if self._waiting and len(self._accounts) > _KEEP_IDLE + 2 * len(self._waiting):
            self._forget(now)

    def _start_over(self, now: float) -> None:
        self._accounts = {name: account for name, account in self._accounts.items() if account.tokens}
        for account in self._accounts.values():
            account.settled, account.counts_from, account.held_since = 0.0, now, account.held * now

    def _forget(self, now: float) -> None:
        """Of those that neither wait nor hold anything: whom the others caught up with, and whoever is least ahead."""
        level = min(self.level(name, now) for name in self._waiting)
        idle = [name for name, account in self._accounts.items() if not account.tokens and name not in self._waiting]
        kept = heapq.nlargest(_KEEP_IDLE // 2, idle, key=lambda name: self.level(name, now))
        for name in set(idle) - {name for name in kept if self.level(name, now) > level}:
            del self._accounts[name]

    # What is held

    def take(self, namespace: str, key: DemandKey, demand: Resource | None, tokens: int, now: float) -> None:
        """demand: of one token; None: it takes nothing but a place."""
        account = self._accounts.get(namespace)
        if account is None:
            account = self._accounts[namespace] = _Account(counts_from=now)
        share = self._share(key, demand) * tokens
        account.tokens += tokens
        account.tokens_of[key] = account.tokens_of.get(key, 0) + tokens
        account.held += share
        account.held_since += share * now

    def give_back(
        self, namespace: str, key: DemandKey, demand: Resource | None, tokens: int, taken_at: float, now: float
    ) -> None:
        account = self._accounts[namespace]
        share, since = self._share(key, demand) * tokens, max(taken_at, account.counts_from)
        seconds = max(now - taken_at, _LEAST_SECONDS)
        account.settled += share * max(now - since, _LEAST_SECONDS)
        account.tokens -= tokens
        account.tokens_of[key] -= tokens
        if not account.tokens_of[key]:
            del account.tokens_of[key]
        account.held -= share
        account.held_since -= share * since
        if not account.tokens:
            account.held = account.held_since = 0.0  # What rounding left.
        account.usual_seconds += (seconds - account.usual_seconds) * (_SMOOTHING if account.usual_seconds else 1.0)
        self._usual_seconds += (seconds - self._usual_seconds) * _SMOOTHING

    # Whose turn it is

    def level(self, namespace: str, now: float) -> float:
        """What it used, in shares of all room times seconds, over its weight."""
        account = self._accounts.get(namespace)
        if account is None:
            return 0.0
        held_until_now = account.held * now - account.held_since
        used = account.settled + held_until_now + account.held * self._usual_seconds_of(account)
        return used / self.weight_of(namespace)

    def level_of(self, namespace: str, key: DemandKey, demand: Resource | None, tokens: int) -> float:
        """How much higher its level is for so many tokens more."""
        account = self._accounts.get(namespace)
        seconds = self._usual_seconds if account is None else self._usual_seconds_of(account)
        return self._share(key, demand) * tokens * seconds / self.weight_of(namespace)

    def _usual_seconds_of(self, account: _Account) -> float:
        return account.usual_seconds or self._usual_seconds

    def _share(self, key: DemandKey, demand: Resource | None) -> float:
        """A token's dominant share. Of evaluators it is kept; demands of leases are without number."""
        if not isinstance(key, str):
            return self._dominant(demand, is_outside=True)
        share = self._share_of.get(key)
        if share is None:
            self._demand_of[key] = demand
            share = self._share_of[key] = self._dominant(demand, is_outside=False)
        return share

    def _share_now(self, key: DemandKey) -> float:
        """Of a demand that is held."""
        return self._share(key, key if isinstance(key, Resource) else self._demand_of[key])

    def _dominant(self, demand: Resource | None, *, is_outside: bool) -> float:
        """A scheduler outside runs its samples in places of its own."""
        wanted = {} if is_outside and demand is not None else {_PLACES: 1.0}
        if demand is not None:
            wanted |= demand.taken
        return max(
            (amount / self._supply[name] for name, amount in wanted.items() if self._supply.get(name, 0.0) > 0),
            default=0.0,
        )


def supply_of(pool: PlacementPool | None, max_running_samples: int) -> dict[str, float]:
    """All the room of a server that can be given out."""
    supply = {_PLACES: float(max_running_samples)}
    for node in pool.nodes() if pool is not None else ():
        if node.phase != "active":
            continue
        amounts = {"gpu": len(node.gpu_ids)} | {kind: getattr(node, kind) for kind in NODE_AMOUNTS}
        amounts |= {f"named.{name}": amount for name, amount in node.named.items()}
        for name, amount in amounts.items():
            supply[name] = supply.get(name, 0.0) + amount
    return supply
