"""Which endpoint of a fleet takes the next generation."""

from __future__ import annotations

from collections import OrderedDict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.fleet.endpoint import Endpoint
    from py_scheduler.adapters.fleet.settings import FleetSettings

STICKY_SLACK = 8
"""Requests more than the ratio allows: with few of them, a difference of some is no difference."""


class EndpointChoice:
    """The least loaded endpoint, or the session's own as long as that is not much more loaded.

    With a ratio of 1.5 and a least load of 20, a session stays at its endpoint up to a load of 1.5 x 20 + 8 = 38.

    Invariant: at most `remembered_sessions` are remembered, those chosen for most recently.
    """

    def __init__(self, endpoints: Sequence[Endpoint], settings: FleetSettings) -> None:
        self._endpoints = endpoints
        self._settings = settings
        self._homes: OrderedDict[str, Endpoint] = OrderedDict()

    def choose(self, session_id: str, avoid: Endpoint | None = None) -> Endpoint | None:
        """None when no endpoint is up and has room. `avoid` is chosen only when there is no other."""
        free = [endpoint for endpoint in self._endpoints if endpoint.has_room]
        if not free:
            return None
        best = min(free, key=lambda each: (each is avoid, each.is_silent, each.load, each.taken))
        home = self._homes.get(session_id)
        if home is not None and home is not avoid and home in free and self._is_good_enough(home, best):
            best = home
        self._remember(session_id, best)
        return best

    def forget(self, endpoint: Endpoint) -> None:
        """It has left the fleet: sessions that were there go elsewhere."""
        for session_id in [session_id for session_id, home in self._homes.items() if home is endpoint]:
            del self._homes[session_id]

    def _is_good_enough(self, home: Endpoint, best: Endpoint) -> bool:
        most = self._settings.sticky_load_ratio * best.load + STICKY_SLACK
        return home.is_silent <= best.is_silent and home.load <= most

    def _remember(self, session_id: str, endpoint: Endpoint) -> None:
        if not session_id:
            return
        self._homes[session_id] = endpoint
        self._homes.move_to_end(session_id)
        if len(self._homes) > self._settings.remembered_sessions:
            self._homes.popitem(last=False)
