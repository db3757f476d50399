"""One actor of a Ray cluster that is a child, and what Ray says of its end."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters._framed_child import FramedChild

if TYPE_CHECKING:
    import concurrent.futures

    from py_scheduler.adapters._frames import FrameProtocol

_log = logging.getLogger(__name__)

END_SECONDS = 5.0
"""How long Ray may take to say that an actor has ended; a node that is gone says nothing for half a minute."""
_MAX_HOW = 300


class RayActor(FramedChild):
    """One actor."""

    def __init__(
        self, ray: Any, actor: Any, over: asyncio.Future[Any], protocol: FrameProtocol, pid: int, node: str
    ) -> None:
        self.node = node
        self._ray = ray
        self._actor = actor
        self._over = over
        super().__init__(pid, protocol)

    def resident_mib(self) -> float | None:
        return None  # On another machine: what Ray kills for memory ends like anything that dies.

    @property
    def _has_ended(self) -> bool:
        return self._over.done()

    def _end_by_force(self) -> None:
        # Ray may take a while, and meanwhile nothing that the actor says is heard.
        self._protocol.close()
        kill(self._ray, self._actor)

    async def _end(self) -> str:
        lost = asyncio.ensure_future(self._protocol.lost.wait())
        await asyncio.wait([self._over, lost], return_when=asyncio.FIRST_COMPLETED)
        self._protocol.close()
        await lost
        if not self._over.done():
            # Its end of the connection is its own: without one it has ended, or ends now.
            kill(self._ray, self._actor)
            await asyncio.wait([self._over], timeout=END_SECONDS)
        return how_it_ended(self._over) if self._over.done() else "its connection broke"


def kill(ray: Any, actor: Any) -> None:
    """Returns at once."""
    try:
        ray.kill(actor, no_restart=True)
    except Exception as error:  # noqa: BLE001 -- whatever Ray raises, who has lost its connection ends by itself
        _log.warning("Ray does not kill an actor: %s", error)


def told(ended: concurrent.futures.Future[Any]) -> asyncio.Future[Any]:
    """For the loop: of an actor's end, which nobody may be waiting for any more."""
    over = asyncio.wrap_future(ended)
    over.add_done_callback(lambda over: over.cancelled() or over.exception())
    return over


def how_it_ended(over: asyncio.Future[Any]) -> str:
    """What Ray says of it, in one line."""
    error = asyncio.CancelledError() if over.cancelled() else over.exception()
    if error is None:
        return "the actor returned"
    said = " ".join(str(error).split())
    return f"{type(error).__name__}: {said[:_MAX_HOW]}"
