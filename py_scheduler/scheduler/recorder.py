"""The way of every fact: command -> ledger -> events -> event log."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from py_scheduler.domain.events import AttemptsLeased, EventRecord, JournalledEvent, approximate_size

if TYPE_CHECKING:
    from py_scheduler.domain.events import Event
    from py_scheduler.scheduler.commands import Command
    from py_scheduler.scheduler.event_log import EventLog
    from py_scheduler.scheduler.ledger import Ledger


class Recorder:
    """Turns commands into facts. All of a command's events are applied together, in one turn of the loop."""

    def __init__(self, ledger: Ledger, event_log: EventLog) -> None:
        self.ledger = ledger
        self._event_log = event_log

    def record(self, command: Command, namespace: str) -> list[Event]:
        """The events the command made, already applied and on their way to the journal; none when it came too late."""
        ledger = self.ledger
        events = ledger.decide(command)
        for event in events:
            ledger.apply(event)
            if type(event) is not AttemptsLeased:
                journalled = cast("JournalledEvent", event)
                record = EventRecord(ledger.last_sequence, namespace, journalled, approximate_size(event))
                self._event_log.append(record)
        return events
