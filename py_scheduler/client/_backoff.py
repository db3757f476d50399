"""How long to wait before a broken connection is tried again, and when to give up."""

from __future__ import annotations

import asyncio
import logging
import math

from py_scheduler.domain.values.backoff import backoff_seconds

_log = logging.getLogger("py_scheduler.client")

_FIRST_SECONDS = 0.05
_LONGEST_SECONDS = 2.0


class Backoff:
    """Waits that double, with jitter, until one connection has been broken for `patience_seconds` on end.

    target: the server's address, for the log.
    """

    __slots__ = ("_broken_since", "_failures", "_patience_seconds", "_target")

    def __init__(self, target: str, patience_seconds: float) -> None:
        self._target = target
        self._patience_seconds = patience_seconds
        self._broken_since: float | None = None
        self._failures = 0

    def connected(self) -> None:
        """Something came through: the next break starts from the beginning."""
        self._broken_since = None
        self._failures = 0

    async def wait(self, until: float = math.inf) -> bool:
        """Waits its time; False, at once, when patience is over or the time would be later than `until`."""
        now = asyncio.get_running_loop().time()
        if self._broken_since is None:
            self._broken_since = now
            if self._patience_seconds > 0:
                _log.warning("waiting for %s, giving up after %g s", self._target, self._patience_seconds)
        self._failures += 1
        delay = backoff_seconds(self._failures, _FIRST_SECONDS, _LONGEST_SECONDS)
        if now - self._broken_since >= self._patience_seconds or now + delay >= until:
            return False
        await asyncio.sleep(delay)
        return True
