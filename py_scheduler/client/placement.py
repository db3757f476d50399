"""The asyncio client of the placement service, for schedulers that live elsewhere.

Invariant: a call that may have taken effect unseen is repeated with its own request id, never with a fresh one.
"""

from __future__ import annotations

import asyncio
import math
import uuid
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from py_scheduler._generated.rollout_scheduler.v1.placement_service_pb2_grpc import PlacementServiceStub
from py_scheduler.client.connection import CALL_SECONDS, ServiceClient
from py_scheduler.client.held_lease import GIVE_UP_SECONDS, HeldLease
from py_scheduler.domain.leases import (
    AcquireRequest,
    LeaseState,
    LeaseTerms,
    PlacementDemand,
    ReleaseRequest,
    RenewRequest,
)
from py_scheduler.errors import LeaseError, ResourceExhaustedError, SchedulerError, ServerError
from py_scheduler.wire import placement as wire

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.leases import CapacityView, LeaseView, PlacementView, ReleaseReply
    from py_scheduler.domain.resources import Resource
    from py_scheduler.domain.task import BatchId

DEFAULT_TTL_SECONDS = 30.0


class Ask(Protocol):
    """Asks for the same lease once more."""

    async def __call__(self, *, wait: bool, seconds: float) -> LeaseView: ...


class PlacementClient(ServiceClient):
    """Leases room of a server's pool. Takes what SchedulerClient takes.

    Every method raises FailedPreconditionError when the server has no pool, InvalidArgumentError and ServerError.
    """

    async def acquire(  # noqa: PLR0913 -- what a lease is, and how to ask for it
        self,
        per_sample: Resource,
        max_tokens: int = 1,
        *,
        budget: Resource | None = None,
        batch_id: BatchId = 0,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        wait: bool = True,
        timeout_seconds: float = CALL_SECONDS,
        request_id: str | None = None,
        namespace: str | None = None,
    ) -> LeaseView:
        """Asks for tokens, all or none. The answer says how the lease stands: granted, pending or ended, and why.

        Call again with the same request_id while a lease is pending; the server drops it `ttl_seconds` after the last
        call. wait: the server answers when it grants the lease, or shortly before `timeout_seconds`.
        Raises UnplaceableError (it can never fit), AlreadyExistsError, ResourceExhaustedError.
        """
        terms = LeaseTerms(
            batch_id=batch_id,
            demand=PlacementDemand(per_sample=per_sample, max_tokens=max_tokens, budget=budget),
            ttl_seconds=ttl_seconds,
        )
        request = AcquireRequest(
            request_id=request_id or uuid.uuid4().hex,
            terms=terms,
            namespace=namespace or self._namespace,
            wait=wait,
        )
        reply = await self._connection.call(
            lambda: self._stub.AcquireLease, wire.encode_acquire_request(request), timeout_seconds
        )
        return wire.decode_lease(reply)

    async def renew(
        self, lease: LeaseView, *, timeout_seconds: float = CALL_SECONDS, namespace: str | None = None
    ) -> float:
        """Holds a lease for another ttl; returns its seconds. Raises LeaseError when the lease is not held."""
        request = RenewRequest(
            lease_id=lease.lease_id, fencing_token=lease.fencing_token, namespace=namespace or self._namespace
        )
        reply = await self._connection.call(
            lambda: self._stub.RenewLease, wire.encode_renew_request(request), timeout_seconds
        )
        return float(reply.expires_in_seconds)

    async def release(
        self,
        lease: LeaseView,
        *token_nos: int,
        request_id: str | None = None,
        timeout_seconds: float = CALL_SECONDS,
        namespace: str | None = None,
    ) -> ReleaseReply:
        """Gives back some tokens, or (none named) all that are held; takes back a lease that is pending.

        The same request_id with the same tokens releases them once. Raises LeaseError when the lease is not held.
        """
        request = ReleaseRequest(
            request_id=request_id or uuid.uuid4().hex,
            lease_id=lease.lease_id,
            fencing_token=lease.fencing_token,
            token_nos=token_nos,
            namespace=namespace or self._namespace,
        )
        reply = await self._connection.call(
            lambda: self._stub.ReleaseLease, wire.encode_release_request(request), timeout_seconds
        )
        return wire.decode_release_reply(reply)

    async def capacity(self, per_sample: Resource) -> CapacityView:
        """How many tokens of this demand the pool holds when empty and now, and its nodes."""
        reply = await self._connection.call(lambda: self._stub.GetCapacity, wire.encode_capacity_request(per_sample))
        return wire.decode_capacity(reply)

    async def explain(
        self, per_sample: Resource, max_tokens: int = 1, *, budget: Resource | None = None
    ) -> PlacementView:
        """What each node is short of for this demand. Raises UnplaceableError when the budget holds no sample."""
        demand = PlacementDemand(per_sample=per_sample, max_tokens=max_tokens, budget=budget)
        reply = await self._connection.call(lambda: self._stub.ExplainPlacement, wire.encode_explain_request(demand))
        return wire.decode_placement(reply)

    @asynccontextmanager
    async def lease(
        self,
        per_sample: Resource,
        max_tokens: int = 1,
        *,
        budget: Resource | None = None,
        batch_id: BatchId = 0,
        ttl_seconds: float = DEFAULT_TTL_SECONDS,
        timeout_seconds: float | None = None,
        cancel_on_loss: bool = True,
    ) -> AsyncIterator[HeldLease]:
        """Waits for a lease, renews it in the background and gives back what is left of it at the end.

        A lease is lost when it expired, or when the server was gone for a ttl. Then the block is cancelled and raises
        LeaseError; with `cancel_on_loss=False` it goes on, `HeldLease.lost` is set, and its end raises LeaseError.
        timeout_seconds: how long to wait for the lease; None waits as long as it takes. Raises what `acquire` raises,
        and ResourceExhaustedError when that time is over.
        """
        request_id = uuid.uuid4().hex

        async def ask(*, wait: bool, seconds: float) -> LeaseView:
            return await self.acquire(
                per_sample,
                max_tokens,
                budget=budget,
                batch_id=batch_id,
                ttl_seconds=ttl_seconds,
                wait=wait,
                timeout_seconds=seconds,
                request_id=request_id,
            )

        try:
            view, asked_at = await _until_granted(ask, timeout_seconds)
        except BaseException:
            # It may stand in the queue, or have been granted unseen: it need not wait for its ttl to go.
            await self._give_up(ask)
            raise
        held = HeldLease(self, view, ttl_seconds, asked_at)
        async with held.kept(cancel_on_loss=cancel_on_loss):
            yield held

    @property
    def _stub(self) -> PlacementServiceStub:
        return self._connection.stub(PlacementServiceStub)

    async def _give_up(self, ask: Ask) -> None:
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                view = await ask(wait=False, seconds=GIVE_UP_SECONDS)
                if view.state is not LeaseState.ENDED:
                    await self.release(view)
        except (SchedulerError, TimeoutError):
            pass  # the ttl does it


async def _until_granted(ask: Ask, timeout_seconds: float | None) -> tuple[LeaseView, float]:
    """The lease, and the loop's time when the call was made that brought it."""
    loop = asyncio.get_running_loop()
    until = math.inf if timeout_seconds is None else loop.time() + timeout_seconds
    reason = "the server did not say why"
    while (asked_at := loop.time()) < until:
        try:
            view = await ask(wait=True, seconds=min(until - asked_at, CALL_SECONDS))
        except ServerError as error:
            if error.code != "DEADLINE_EXCEEDED":
                raise
            continue
        if view.state is LeaseState.GRANTED:
            return view, asked_at
        if view.state is LeaseState.ENDED:
            raise LeaseError(f"the lease was {view.reason}")
        reason = view.reason
    raise ResourceExhaustedError(f"no room within {timeout_seconds:g} s: {reason}")
