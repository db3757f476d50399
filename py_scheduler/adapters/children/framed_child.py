"""What all children have in common that speak in frames over a connection of their own, whatever runs them.

Invariant: `on_end` is called once, after the child's last frame, whatever goes wrong while the child is being ended.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.adapters.children.frames import FrameProtocol

_log = logging.getLogger(__name__)


class FramedChild(ABC):
    """Implements `domain.runners.runner.Child` but for the end of its process or actor. watch: over once that ended."""

    def __init__(self, pid: int, protocol: FrameProtocol) -> None:
        self.pid = pid
        self._protocol = protocol
        self._why = ""
        self._how = ""
        self._on_end: Callable[[str], None] | None = None
        self.watch = asyncio.get_running_loop().create_task(self._watch())

    @property
    def is_alive(self) -> bool:
        return not (self._has_ended or self._protocol.lost.is_set())

    def send(self, frame: bytes) -> None:
        self._protocol.send(frame)

    def listen(self, on_frame: Callable[[bytes], None], on_end: Callable[[str], None]) -> None:
        self._protocol.listen(on_frame)
        if self._how:
            on_end(self._how)
        else:
            self._on_end = on_end

    def kill(self, why: str = "") -> None:
        if not self._has_ended:
            self._why = self._why or why
        self._end_by_force()

    @abstractmethod
    def resident_mib(self) -> float | None: ...

    @property
    @abstractmethod
    def _has_ended(self) -> bool:
        """Whether its process or actor has ended."""

    @abstractmethod
    def _end_by_force(self) -> None:
        """Ends it at once, whatever it does. Does nothing when it has ended."""

    @abstractmethod
    async def _end(self) -> str:
        """Waits for its end, or for that of its connection and then for its own. Returns how it ended."""

    async def _watch(self) -> None:
        try:
            how = await self._end()
        except Exception as error:  # noqa: BLE001 -- otherwise its session would wait for ever
            _log.exception("child %d: its end could not be seen to", self.pid)
            how = f"it cannot be seen any more: {type(error).__name__}: {error}"
        why = self._protocol.fault or self._why
        self._how = f"{why} ({how})" if why else how
        if self._on_end is not None:
            self._on_end(self._how)
