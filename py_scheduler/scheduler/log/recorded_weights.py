"""Changes of weights as facts: the gateway notices them, the ledger decides, the journal keeps them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.events import EVERY_NAMESPACE
from py_scheduler.scheduler.ledger.commands import ChangeWeights

if TYPE_CHECKING:
    from py_scheduler.domain.episodes.weight_history import WeightHistory
    from py_scheduler.domain.ports import Clock
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.log.recorder import Recorder


class RecordedWeights:
    """Implements `execution.generation.weights.WeightLog`."""

    def __init__(self, recorder: Recorder, event_log: EventLog, clock: Clock) -> None:
        self._recorder = recorder
        self._event_log = event_log
        self._clock = clock

    def history(self, roles: tuple[str, ...]) -> WeightHistory:
        return self._recorder.ledger.weights_of(roles)

    def has(self, roles: tuple[str, ...], version: str, *, is_confirmed: bool) -> None:
        if version != self.history(roles).version:
            change = ChangeWeights(roles, version, is_confirmed, self._clock.unix_time())
            self._recorder.record(change, EVERY_NAMESPACE)

    async def committed(self) -> None:
        """Raises ResourceExhaustedError while the journal cannot write."""
        await self._event_log.wait_committed(self._recorder.ledger.last_sequence)
