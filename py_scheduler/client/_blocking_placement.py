"""The placement client for plain threads."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from py_scheduler.client._blocking import BlockingServiceClient, blocking
from py_scheduler.client._placement import PlacementClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anyio.from_thread import BlockingPortal

    from py_scheduler.client._held_lease import HeldLease
    from py_scheduler.domain.leases import LeaseToken
    from py_scheduler.domain.resources import Resource


class BlockingHeldLease:
    """`HeldLease` in a plain thread, which nobody can cancel: look at `is_lost`, or call `check`, between steps."""

    def __init__(self, held: HeldLease, portal: BlockingPortal) -> None:
        self._held = held
        self._portal = portal

    @property
    def lease_id(self) -> str:
        return self._held.lease_id

    @property
    def fencing_token(self) -> int:
        return self._held.fencing_token

    @property
    def tokens(self) -> tuple[LeaseToken, ...]:
        """Those that are still held."""
        return self._held.tokens

    @property
    def is_lost(self) -> bool:
        return self._held.loss is not None

    def check(self) -> None:
        """Raises LeaseError when the lease was lost."""
        self._held.check()

    def release(self, *tokens: LeaseToken) -> None:
        """Gives back some tokens before the block ends. Raises LeaseError."""
        self._portal.call(self._held.release, *tokens)


class BlockingPlacementClient(BlockingServiceClient[PlacementClient]):
    """`PlacementClient` with blocking methods."""

    asyncio_class = PlacementClient

    acquire = blocking(PlacementClient.acquire)
    renew = blocking(PlacementClient.renew)
    release = blocking(PlacementClient.release)
    capacity = blocking(PlacementClient.capacity)
    explain = blocking(PlacementClient.explain)

    @contextmanager
    def lease(self, per_sample: Resource, max_tokens: int = 1, **options: Any) -> Iterator[BlockingHeldLease]:
        """See PlacementClient.lease, whose options it takes but `cancel_on_loss`. Raises LeaseError at the end of the
        block when the lease was lost.
        """
        lease = self.client.lease(per_sample, max_tokens, cancel_on_loss=False, **options)
        with self.portal.wrap_async_context_manager(lease) as held:
            yield BlockingHeldLease(held, self.portal)
