"""What the lease manager knows of one lease. `leases/manager.py` alone changes it, and states the invariants."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.leases import AcquireRequest, LeaseState, LeaseTerms, LeaseToken, LeaseView

if TYPE_CHECKING:
    import asyncio

    from py_scheduler.domain.leases import ReleaseReply, ReleaseRequest
    from py_scheduler.placement import Lease, PlacementToken
    from py_scheduler.scheduler.queue.entries import ReadyLease


class LeaseRecord:
    """What one request id stands for, from its first call until it is forgotten. Times are monotonic seconds."""

    __slots__ = (
        "bypassed",
        "calls",
        "end_reason",
        "entry",
        "expires_at",
        "fencing_token",
        "lease",
        "lease_id",
        "namespace",
        "queued_at",
        "releases",
        "request_id",
        "state",
        "terms",
        "tokens",
        "waited_seconds",
        "waiters",
    )

    def __init__(self, lease_id: str, request: AcquireRequest, now: float) -> None:
        self.lease_id = lease_id
        self.namespace = request.namespace
        self.request_id = request.request_id
        self.terms: LeaseTerms = request.terms
        self.state = LeaseState.PENDING
        self.queued_at = now
        self.expires_at = now + request.terms.ttl_seconds
        self.entry: ReadyLease | None = None
        self.lease: Lease | None = None
        self.tokens: dict[int, PlacementToken] = {}
        """Those that are held, by their number."""
        self.fencing_token = 0
        self.waited_seconds = 0.0
        self.bypassed = 0
        self.end_reason = ""
        self.calls = 0
        """How many calls that asked for it while it was pending have no answer yet."""
        self.waiters: set[asyncio.Future[None]] = set()
        """One for each call that waits for the record to leave PENDING."""
        self.releases: dict[str, tuple[ReleaseRequest, ReleaseReply]] = {}

    @property
    def is_over(self) -> bool:
        return self.state is LeaseState.ENDED

    def touch(self, now: float) -> None:
        """Holds it, or keeps it in the queue, for another ttl."""
        self.expires_at = now + self.terms.ttl_seconds

    def wake(self) -> None:
        for waiter in self.waiters:
            resolve(waiter)

    def view(self, now: float, reason: str) -> LeaseView:
        """What its owner is told. `reason`: why it is pending, or how it ended."""
        entry = self.entry
        return LeaseView(
            lease_id=self.lease_id,
            state=self.state,
            fencing_token=self.fencing_token,
            tokens=tuple(
                LeaseToken(token_no=token_no, node_ip=token.node_ip, gpu_ids=tuple(token.gpu_ids))
                for token_no, token in self.tokens.items()
            ),
            expires_in_seconds=0.0 if self.is_over else self.expires_at - now,
            reason=reason,
            waiting_seconds=self.waited_seconds if entry is None else now - self.queued_at,
            bypassed=self.bypassed if entry is None else entry.bypassed,
        )


def resolve(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)
