"""The way of every fact: command -> ledger -> events -> event log. Changes of weights and of endpoints are facts too:
the gateway notices them, the ledger decides, the journal keeps them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from py_scheduler.domain.events import (
    EVERY_NAMESPACE,
    AttemptsLeased,
    EventRecord,
    JournalledEvent,
    ResultsCollected,
    ResultsDiscarded,
    TaskDone,
    TasksAccepted,
    approximate_size,
)
from py_scheduler.scheduler.ledger.commands import ChangeWeights, SetEndpoints

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.episodes.weight_history import WeightHistory
    from py_scheduler.domain.events import Event
    from py_scheduler.domain.generation import Endpoints
    from py_scheduler.domain.ports import Clock
    from py_scheduler.scheduler.ledger.commands import Command
    from py_scheduler.scheduler.ledger.ledger import Ledger
    from py_scheduler.scheduler.ledger.records import NewTasks
    from py_scheduler.scheduler.log.event_log import EventLog

logger = logging.getLogger(__name__)

_TOLD = frozenset({TaskDone, TasksAccepted, ResultsCollected, ResultsDiscarded})


class Recorder:
    """Turns commands into facts. All of a command's events are applied together, in one turn of the loop."""

    def __init__(self, ledger: Ledger, event_log: EventLog) -> None:
        self._ledger = ledger
        self.ledger = ledger.state
        """What is known, for whoever records and asks."""
        self._event_log = event_log
        self.event_listeners: list[Callable[[Event, str], None]] = []
        """Whoever is to be told of each event and its namespace, right after the ledger has applied it."""
        self.listeners: dict[str, list[Callable[[], None]]] = {}
        """By submission: whoever is to be called when its tasks or results become more or fewer."""

    def record(self, command: Command, namespace: str, made: NewTasks | None = None) -> list[Event]:
        """The events the command made, already applied and on their way to the journal; none when it came too late.

        made: what a submit was prepared with.
        """
        ledger, state = self._ledger, self.ledger
        events = ledger.decide(command)
        for event in events:
            ledger.apply(event, namespace)
            for listener in self.event_listeners:
                listener(event, namespace)
            if type(event) is not AttemptsLeased:
                if made is None:
                    record = EventRecord(state.last_sequence, namespace, event, approximate_size(event))
                else:
                    record = EventRecord(state.last_sequence, namespace, event, made.size, None, made.encoded)
                self._event_log.append(record)
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


class RecordedBackends:
    """Implements `execution.generation.known_backend.BackendLog`."""

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

    def endpoints(self, roles: tuple[str, ...]) -> Endpoints | None:
        return self._recorder.ledger.endpoints_of(roles)

    def endpoints_are(self, roles: tuple[str, ...], endpoints: Endpoints | None) -> None:
        self._recorder.record(SetEndpoints(roles, endpoints, self._clock.unix_time()), EVERY_NAMESPACE)

    async def committed(self) -> None:
        """Raises ResourceExhaustedError while the journal cannot write."""
        await self._event_log.wait_committed(self._recorder.ledger.last_sequence)
