"""What schedulers that live elsewhere ask of the pool and what it answers (design words: Lease, Token).

A lease is pending until it is granted, and keeps one `lease_id` from the request to its end.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.limits import Range, name_fault
from py_scheduler.domain.requests import NodeView
from py_scheduler.domain.resources import AMOUNTS, Resource, check_extras
from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId
from py_scheduler.errors import FieldViolation

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_LEASE_TOKENS = 16_384
"""Of one lease, so that one answer stays small and makes nobody else wait."""
_TTL = Range(0.1, 86_400.0)


class LeaseState(StrEnum):
    """How a lease stands. PENDING: it waits for room. ENDED: given back, expired or refused."""

    PENDING = "pending"
    GRANTED = "granted"
    ENDED = "ended"


class PlacementDemand(msgspec.Struct, frozen=True, kw_only=True):
    """As many tokens of `per_sample` as fit into `budget`, and at most `max_tokens`, together or not at all.

    budget None: `max_tokens` alone is the limit.
    """

    per_sample: Resource
    max_tokens: int
    budget: Resource | None = None

    @property
    def ceiling(self) -> Resource:
        """The budget, or what holds all of `max_tokens`."""
        if self.budget is not None:
            return self.budget
        # One more than is needed, so that rounding takes none away: concurrency is what limits.
        sample, count = self.per_sample, self.max_tokens + 1
        return Resource(
            concurrency=self.max_tokens,
            named={name: amount * count for name, amount in sample.named.items()},
            **{kind: getattr(sample, kind) * count for kind in AMOUNTS},
        )


class LeaseTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a request id stands for: asked for again with other terms, it is refused.

    batch_id: the place in the order of service. ttl_seconds: how long a lease is held without being renewed, and a
    pending one without being asked for.
    """

    batch_id: BatchId
    demand: PlacementDemand
    ttl_seconds: float


class AcquireRequest(msgspec.Struct, frozen=True, kw_only=True):
    """wait: answer when the lease is granted or ends, at most after `timeout_seconds` (None: however long it takes)."""

    request_id: str
    terms: LeaseTerms
    namespace: str = DEFAULT_NAMESPACE
    wait: bool = False
    timeout_seconds: float | None = None


class LeaseToken(msgspec.Struct, frozen=True, kw_only=True):
    """Room for one sample on one node; `token_no` counts the tokens of a lease from 0."""

    token_no: int
    node_ip: str
    gpu_ids: tuple[int, ...]


class LeaseView(msgspec.Struct, frozen=True, kw_only=True):
    """How a lease stands.

    fencing_token: higher than that of every lease granted before, 0 until it is granted. tokens: those still held.
    expires_in_seconds: unless it is renewed; of a pending one, unless it is asked for again.
    reason: why it is pending, or how it ended. bypassed: how often something later took room that
    it could have used.
    """

    lease_id: str
    state: LeaseState
    fencing_token: int = 0
    tokens: tuple[LeaseToken, ...] = ()
    expires_in_seconds: float = 0.0
    reason: str = ""
    waiting_seconds: float = 0.0
    bypassed: int = 0


class RenewRequest(msgspec.Struct, frozen=True, kw_only=True):
    lease_id: str
    fencing_token: int
    namespace: str = DEFAULT_NAMESPACE


class ReleaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Gives back tokens of a lease, all of them when `token_nos` is empty; or, with fencing token 0, takes back a
    pending one.
    """

    request_id: str
    lease_id: str
    fencing_token: int
    token_nos: tuple[int, ...] = ()
    namespace: str = DEFAULT_NAMESPACE


class ReleaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """held_tokens: what is left; 0 when the lease has ended."""

    released_tokens: int
    held_tokens: int


class CapacityView(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of one demand that the pool holds when empty and has free now, and its nodes."""

    max_tokens: int
    free_tokens: int
    nodes: tuple[NodeView, ...]


class Shortage(StrEnum):
    """What keeps one more token off a node."""

    GPU = "gpu"
    FRAGMENTATION = "fragmentation"
    CPU = "cpu"
    MEMORY = "memory"
    DRAINING = "draining"
    NAMED = "named"
    LABEL = "label"


class NodeShortageView(msgspec.Struct, frozen=True, kw_only=True):
    """short: what stops the next token; empty when all that is wanted fits on this node alone.

    short_named, lacking_labels: which named resources, and which of the required labels, when those are among it.
    """

    node_ip: str
    free_tokens: int
    max_tokens: int
    short: tuple[Shortage, ...]
    short_named: tuple[str, ...] = ()
    lacking_labels: dict[str, str] = {}

    @property
    def words(self) -> tuple[str, ...]:
        """All that is short, as the pool says it: `cpu`, `named.licence`, `label zone=a`."""
        plain = [short for short in self.short if short not in {Shortage.NAMED, Shortage.LABEL}]
        named = [f"named.{name}" for name in self.short_named]
        return (*plain, *named, *(f"label {key}={value}" for key, value in self.lacking_labels.items()))


class PlacementView(msgspec.Struct, frozen=True, kw_only=True):
    """Why a demand would, or would not, be placed now. wanted_tokens: what a lease of it has."""

    wanted_tokens: int
    free_tokens: int
    max_tokens: int
    nodes: tuple[NodeShortageView, ...]


def check_acquire(request: AcquireRequest) -> Iterator[FieldViolation]:
    """What can be seen to be wrong without a pool; amounts are judged by the pool."""
    if fault := name_fault(request.request_id):
        yield FieldViolation("request_id", fault)
    if fault := name_fault(request.namespace):
        yield FieldViolation("namespace", fault)
    if request.terms.ttl_seconds not in _TTL:
        yield FieldViolation("ttl_seconds", f"is {request.terms.ttl_seconds:g}, must be {_TTL}")
    yield from check_demand(request.terms.demand)


def check_demand(demand: PlacementDemand) -> Iterator[FieldViolation]:
    """See `check_acquire`."""
    if not 1 <= demand.max_tokens <= MAX_LEASE_TOKENS:
        yield FieldViolation(
            "max_tokens", f"is {demand.max_tokens}, must be at least 1 and at most {MAX_LEASE_TOKENS}: split the lease"
        )
    sample = demand.per_sample
    if not sample.taken:
        yield FieldViolation("per_sample", f"asks for nothing: set {', '.join(AMOUNTS)} or named")
    yield from _prefixed("per_sample", check_extras(sample))
    if demand.budget is not None:
        yield from _prefixed("budget", check_extras(demand.budget, is_budget=True))


def _prefixed(path: str, violations: Iterator[FieldViolation]) -> Iterator[FieldViolation]:
    for violation in violations:
        yield FieldViolation(f"{path}.{violation.field}", violation.description)
