"""A lease that renews itself.

Invariant: the client calls a lease lost no later than the server may give its room to somebody else. It counts the ttl
from before it sends a renewal, not from when the answer comes: with a ttl of 30 s and an answer after 2 s, the lease is
good for another 28 s. Until the first renewal, which follows at once on a lease that was waited for, it counts from the
answer that brought the lease.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol

from py_scheduler.errors import LeaseError, SchedulerError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.leases import LeaseToken, LeaseView, ReleaseReply

GIVE_UP_SECONDS = 5.0
"""How long giving back may take at the end: after that the ttl does it."""
_RENEWALS_PER_TTL = 3
_RETRIES_PER_TTL = 10


class LeaseCalls(Protocol):
    """The calls that hold a lease and give it back: those of `PlacementClient`."""

    async def renew(self, lease: LeaseView) -> float: ...

    async def release(self, lease: LeaseView, *token_nos: int) -> ReleaseReply: ...


class HeldLease:
    """What `PlacementClient.lease` gives its block: a lease that renews itself, three times in each ttl.

    fencing_token: rises with every lease, so that whoever guards what the room is used for can refuse an older holder.
    lost: set when the lease is lost; `loss` then says why.
    """

    def __init__(self, calls: LeaseCalls, view: LeaseView, ttl_seconds: float, asked_at: float) -> None:
        """`asked_at`: the loop's time when the call was made that brought the lease."""
        self.lost = asyncio.Event()
        self.loss: LeaseError | None = None
        self._calls = calls
        self._view = view
        self._ttl_seconds = ttl_seconds
        self._renew_at = asked_at + ttl_seconds / _RENEWALS_PER_TTL
        self._valid_until = asyncio.get_running_loop().time() + view.expires_in_seconds
        self._tokens = {token.token_no: token for token in view.tokens}
        self._is_ending = False

    @property
    def lease_id(self) -> str:
        return self._view.lease_id

    @property
    def fencing_token(self) -> int:
        return self._view.fencing_token

    @property
    def tokens(self) -> tuple[LeaseToken, ...]:
        """Those that are still held."""
        return tuple(self._tokens.values())

    def check(self) -> None:
        """Raises LeaseError when the lease was lost."""
        if self.loss is not None:
            raise self.loss

    async def release(self, *tokens: LeaseToken) -> None:
        """Gives back some tokens before the block ends. Raises LeaseError."""
        self.check()
        if tokens:
            await self._calls.release(self._view, *[token.token_no for token in tokens])
        for token in tokens:
            self._tokens.pop(token.token_no, None)

    @asynccontextmanager
    async def kept(self, *, cancel_on_loss: bool) -> AsyncIterator[None]:
        """Renews the lease while the block runs, and gives it back at its end. For `PlacementClient.lease`."""
        renewing: asyncio.Task[None] | None = None
        try:
            # Never times out by itself: a loss makes it end the block, and tells that from any other cancellation.
            async with asyncio.timeout(None) as scope:
                renewing = asyncio.create_task(self._renew(scope if cancel_on_loss else None))
                yield
        except TimeoutError:
            self.check()
            raise
        finally:
            self._is_ending = True
            if renewing is not None:
                renewing.cancel()
                await asyncio.wait([renewing])
            await self._give_back()
        self.check()

    async def _renew(self, scope: asyncio.Timeout | None) -> None:
        """Renews until the block ends or the lease is lost."""
        loop = asyncio.get_running_loop()
        try:
            while self.loss is None:
                await asyncio.sleep(self._renew_at - loop.time())
                await self._renew_once()
        except asyncio.CancelledError:
            if self._is_ending:
                raise
            # grpc ends the calls of a closed channel with this, though nobody cancelled the renewal.
            self.loss = LeaseError(f"lease {self.lease_id!r} is not renewed any more: its client was closed")
        self.lost.set()
        if scope is not None:
            scope.reschedule(loop.time())

    async def _renew_once(self) -> None:
        loop = asyncio.get_running_loop()
        sent_at = loop.time()
        try:
            async with asyncio.timeout_at(self._valid_until):
                await self._calls.renew(self._view)
        except LeaseError as error:
            self.loss = error
        except (SchedulerError, TimeoutError) as error:
            if loop.time() >= self._valid_until:
                self.loss = LeaseError(
                    f"lease {self.lease_id!r} could not be renewed within its ttl ({self._ttl_seconds:g} s): "
                    f"{error or 'no answer'}"
                )
            self._renew_at = min(self._valid_until, loop.time() + self._ttl_seconds / _RETRIES_PER_TTL)
        else:
            self._renew_at = sent_at + self._ttl_seconds / _RENEWALS_PER_TTL
            self._valid_until = sent_at + self._ttl_seconds

    async def _give_back(self) -> None:
        if self.loss is not None or not self._tokens:
            return
        try:
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await self._calls.release(self._view)
        except LeaseError as error:
            self.loss = error
            self.lost.set()
        except (SchedulerError, TimeoutError):
            pass  # the ttl does it
