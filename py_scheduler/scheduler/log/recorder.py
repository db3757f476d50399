"""The way of every fact: command -> ledger -> events -> event log."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from py_scheduler.domain.events import (
    AttemptsLeased,
    EventRecord,
    JournalledEvent,
    ResultsCollected,
    ResultsDiscarded,
    TaskDone,
    TasksAccepted,
    approximate_size,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.events import Event
    from py_scheduler.scheduler.ledger.commands import Command
    from py_scheduler.scheduler.ledger.ledger import Ledger
    from py_scheduler.scheduler.log.event_log import EventLog

logger = logging.getLogger(__name__)

_TOLD = frozenset({TaskDone, TasksAccepted, ResultsCollected, ResultsDiscarded})


class Recorder:
    """Turns commands into facts. All of a command's events are applied together, in one turn of the loop."""

    def __init__(self, ledger: Ledger, event_log: EventLog) -> None:
        self.ledger = ledger
        self._event_log = event_log
        self.event_listeners: list[Callable[[Event, str], None]] = []
        """Whoever is to be told of each event and its namespace, right after the ledger has applied it."""
        self.listeners: dict[str, list[Callable[[], None]]] = {}
        """By submission: whoever is to be called when its tasks or results become more or fewer."""

    def record(self, command: Command, namespace: str) -> list[Event]:
        """The events the command made, already applied and on their way to the journal; none when it came too late."""
        ledger = self.ledger
        events = ledger.decide(command)
        for event in events:
            ledger.apply(event, namespace)
            for listener in self.event_listeners:
                listener(event, namespace)
            if type(event) is not AttemptsLeased:
                self._event_log.append(EventRecord(ledger.last_sequence, namespace, event, approximate_size(event)))
                if type(event) in _TOLD:
                    self._tell(event)
        return events

    def _tell(self, event: JournalledEvent) -> None:
        if self.listeners:
            for listener in self.listeners.get(event.submission_id, ()):
                listener()
        if type(event) is TaskDone or type(event) is TasksAccepted:
            self._log(event)

    def _log(self, event: TaskDone | TasksAccepted) -> None:
        """A submission's first tasks and its last TaskDone: two lines, however many tasks and calls lie between."""
        submission = self.ledger.submission(event.submission_id)
        if submission is None:
            return
        batch_id = submission.key.batch_id
        if type(event) is TasksAccepted:
            if len(submission.open_tasks) == len(event.tasks):
                logger.info("batch_id %s (%s): %d tasks accepted", batch_id, event.submission_id, len(event.tasks))
        elif not submission.open_tasks:
            counts = ", ".join(f"{count} {state}" for state, count in submission.done_tasks.items() if count)
            logger.info("batch_id %s (%s): every task is done: %s", batch_id, event.submission_id, counts)
