"""Carries events from the ledger to the journal and, once committed, to everybody who watches.

Invariants
  1. Nobody sees an event before the journal has committed it.
  2. Each watcher sees consecutive (after, through] ranges, such as (0, 40] and then (40, 45]. A filter drops events
     from a frame, and never a range.
  3. Memory does not grow with a slow watcher: the tail is bounded, and whoever falls behind it reads the journal.
  4. Nor with a slow disk: while it is behind by so much, whoever makes events begins nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import (
    EVERY_NAMESPACE,
    AbortRequested,
    AttemptEnded,
    AttemptStarted,
    EndpointsSet,
    EventRecord,
    ResultsAcknowledged,
    ResultsCollected,
    ResultsDiscarded,
    TaskDone,
    TasksAccepted,
    TrainingResumed,
    WeightsChanged,
)
from py_scheduler.domain.requests import EventFilter, EventFrame, EventKind
from py_scheduler.errors import CursorExpiredError, InvalidArgumentError, JournalError, ResourceExhaustedError
from py_scheduler.scheduler.log.acknowledgements import Acknowledgements
from py_scheduler.scheduler.notifier import Notifier, rings_within

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from py_scheduler.domain.ports import Journal

logger = logging.getLogger(__name__)

KIND_OF_EVENT: dict[type, EventKind] = {
    TasksAccepted: EventKind.TASKS_ACCEPTED,
    AttemptStarted: EventKind.ATTEMPT_STARTED,
    AttemptEnded: EventKind.ATTEMPT_ENDED,
    AbortRequested: EventKind.ABORT_REQUESTED,
    TaskDone: EventKind.TASK_DONE,
    WeightsChanged: EventKind.WEIGHTS_CHANGED,
    TrainingResumed: EventKind.TRAINING_RESUMED,
    ResultsCollected: EventKind.RESULTS_COLLECTED,
    ResultsAcknowledged: EventKind.RESULTS_ACKNOWLEDGED,
    ResultsDiscarded: EventKind.RESULTS_DISCARDED,
    EndpointsSet: EventKind.ENDPOINTS_SET,
}

_TAIL_EVENTS = 65_536
_TAIL_BYTES = 64 << 20
_READ_TAIL_BYTES = 8 << 20
"""Of the tail, where nobody has anything left to read but who comes again."""
_SLACK = 1.0625
"""How much longer than that it may become. Whatever is cut off at once holds the loop."""
_FRAME_EVENTS = 512
_FRAME_BYTES = 1 << 20
_FRAME_SCAN = 8_192
"""Events looked at for one frame: a filter that drops nearly all still lets the loop breathe and the cursor advance."""
_IDLE_FRAME_SECONDS = 5.0
_RETRY_AFTER_SECONDS = 1.0


class _Wanted(msgspec.Struct, frozen=True):
    """A filter as it is applied to records. submission_id: empty for all."""

    types: frozenset[type]
    namespaces: tuple[str, ...]
    submission_id: str


class EventLog:
    """The committed events' newest part, and who waits for more."""

    def __init__(
        self,
        journal: Journal,
        max_tail_events: int = 1 << 62,
        max_tail_bytes: int = 1 << 62,
        max_uncommitted_bytes: int = 1 << 62,
    ) -> None:
        """The tail is never longer than what the journal keeps: for one in memory it would keep what that dropped.

        max_uncommitted_bytes: what the disk may be behind by, as events count themselves.
        """
        self._journal = journal
        self._max_tail_events = min(_TAIL_EVENTS, max_tail_events)
        self._max_tail_bytes = min(_TAIL_BYTES, max_tail_bytes)
        self.acknowledgements = Acknowledgements()
        self._outbox: list[EventRecord] = []
        self._flush_is_due = False
        self._uncommitted: list[EventRecord] = []
        self._max_uncommitted_bytes = max_uncommitted_bytes
        self.uncommitted_bytes = 0
        """Of events that were appended and are not committed."""
        self.is_behind = False
        """Whether those took over `max_uncommitted_bytes`, and have not come down to half of that since."""
        self.behind_listener: Callable[[bool], None] = lambda _is_behind: None
        """Told whenever that changes."""
        self._tail: list[EventRecord] = []
        self._tail_bytes = 0
        self._read_through = 0
        """Up to where nobody has anything left to read."""
        self._news = Notifier()
        self._is_closed = False
        self._appended_sequence = 0
        self.committed_sequence = 0
        self.failure: Exception | None = None
        """Why the journal takes nothing for now; None while it does."""

    def start(self, last_sequence: int) -> None:
        """Goes on after the events that the journal holds already."""
        self._appended_sequence = self.committed_sequence = last_sequence
        self._journal.start(self._on_commit, self._on_failure)

    # Writing

    def append(self, record: EventRecord) -> None:
        """Takes the next record; all records of one turn of the event loop go to the journal together."""
        assert record.sequence == self._appended_sequence + 1, "a hole in the sequence would never be noticed later"
        self._appended_sequence = record.sequence
        self._outbox.append(record)
        self.uncommitted_bytes += record.size
        if self.uncommitted_bytes > self._max_uncommitted_bytes and not self.is_behind:
            self._set_behind(is_behind=True)
        if not self._flush_is_due:
            self._flush_is_due = True
            asyncio.get_running_loop().call_soon(self.flush)

    def flush(self) -> None:
        """Hands what was appended to the journal now."""
        self._flush_is_due = False
        if self._outbox:
            records, self._outbox = self._outbox, []
            # Also when nobody ever acknowledges anything.
            self.acknowledgements.forget_before(self._journal.oldest_sequence)
            self.acknowledgements.count(records)
            self._uncommitted.extend(records)
            self._journal.append(records)

    async def wait_committed(self, sequence: int) -> None:
        """Returns once everything up to `sequence` survives a crash. Raises what `check_writable` raises."""
        self.flush()
        while self.committed_sequence < sequence:
            self.check_writable()
            await self._news.next_ring().wait()

    def check_writable(self) -> None:
        """Raises ResourceExhaustedError while the journal cannot write; with no time to come back if it never can."""
        if self.is_broken:
            raise ResourceExhaustedError(f"{self.failure}: restart the server") from self.failure
        if self.failure is not None:
            raise ResourceExhaustedError(
                "the journal cannot be written for now: send the same request again later", _RETRY_AFTER_SECONDS
            ) from self.failure

    def check_keeps_up(self) -> None:
        """Raises ResourceExhaustedError while the journal's disk is behind."""
        if self.is_behind:
            raise ResourceExhaustedError(
                f"{self.uncommitted_bytes} bytes of events wait for the journal's disk, max_uncommitted_bytes is "
                f"{self._max_uncommitted_bytes}: send the same request again later",
                _RETRY_AFTER_SECONDS,
            )

    def _set_behind(self, *, is_behind: bool) -> None:
        self.is_behind = is_behind
        if is_behind:
            logger.warning("the journal's disk is behind by %d bytes: nothing begins for now", self.uncommitted_bytes)
        else:
            logger.warning("the journal's disk keeps up again")
        self.behind_listener(is_behind)

    @property
    def is_broken(self) -> bool:
        """Whether the journal will never write again."""
        return isinstance(self.failure, JournalError)

    def _on_failure(self, error: Exception) -> None:
        """The journal keeps what it was given and goes on trying; its next commit says that it can write again."""
        self.failure = error
        self._news.ring()

    def _on_commit(self, through_sequence: int) -> None:
        self.failure = None
        count = through_sequence - self.committed_sequence
        committed, self._uncommitted = self._uncommitted[:count], self._uncommitted[count:]
        self.committed_sequence = through_sequence
        self._tail.extend(committed)
        size = sum([record.size for record in committed])
        self._tail_bytes += size
        self.uncommitted_bytes -= size
        if self.is_behind and self.uncommitted_bytes <= self._max_uncommitted_bytes // 2:
            self._set_behind(is_behind=False)
        if len(self._tail) > _SLACK * self._max_tail_events or self._tail_bytes > _SLACK * self._max_tail_bytes:
            self._cut_tail()
        self._news.ring()

    def _cut_tail(self) -> None:
        """What is cut off keeps no encoded form."""
        tail, cut = self._tail, 0
        read_bytes = min(_READ_TAIL_BYTES, self._max_tail_bytes)
        while cut < len(tail) and (
            len(tail) - cut > self._max_tail_events
            or self._tail_bytes > self._max_tail_bytes
            or (self._tail_bytes > read_bytes and tail[cut].sequence <= self._read_through)
        ):
            self._tail_bytes -= tail[cut].size
            tail[cut].encoded = None
            cut += 1
        del tail[:cut]

    def acknowledge(self, namespace: str, submission_id: str, through_sequence: int) -> None:
        """Nobody will read these events of a submission (empty: of the namespace) again.

        What nobody will read at all, the journal drops when that is worth its while.
        """
        read = self.acknowledgements
        read.acknowledge(namespace, submission_id, min(through_sequence, self.committed_sequence))
        droppable = min(read.droppable_through(self._appended_sequence), self.committed_sequence)
        if droppable >= self._journal.oldest_sequence:
            self._journal.discard_through(droppable)
        self._read_through = droppable
        if self._tail_bytes > _SLACK * _READ_TAIL_BYTES:
            self._cut_tail()

    def unread_bytes(self, namespace: str) -> int:
        """What unacknowledged events of a namespace take."""
        return self.acknowledgements.bytes_in(namespace, self._journal.oldest_sequence)

    async def wait_news(self) -> None:
        """Returns after the next commit, or failure to commit."""
        await self._news.next_ring().wait()

    def close(self) -> None:
        """Ends all watches once they have given what is committed."""
        self.flush()
        self._is_closed = True
        self._news.ring()

    # Reading

    def check_cursor(self, after_sequence: int | None) -> int:
        """The sequence to read after. Raises CursorExpiredError when the next event is no longer retained."""
        oldest = self._journal.oldest_sequence
        if after_sequence is None:
            return oldest - 1
        self.check_given_out(after_sequence)
        if after_sequence + 1 < oldest:
            raise CursorExpiredError(
                f"events up to {oldest - 1} are no longer retained: start again without a cursor", oldest
            )
        return after_sequence

    def check_given_out(self, sequence: int) -> None:
        """Raises InvalidArgumentError for a sequence that nobody can have seen."""
        if sequence > self.committed_sequence:
            raise InvalidArgumentError("this sequence has not been given out yet", "cursor")

    async def watch(self, event_filter: EventFilter, after_sequence: int | None) -> AsyncIterator[EventFrame]:
        """Frames from the cursor on, until the log is closed. The first comes at once, be it empty."""
        told = position = self.check_cursor(after_sequence)
        wanted = _wanted(event_filter)
        frame_is_due = True
        while True:
            news = self._news.next_ring()
            records, position = await self._read(position, wanted)
            if records or frame_is_due:
                yield EventFrame(after_sequence=told, through_sequence=position, records=tuple(records))
                told, frame_is_due = position, False
                self._forget_encoded(records)
            elif position < self.committed_sequence:
                await asyncio.sleep(0)  # A filter that drops nearly everything must not hold the loop.
            elif self._is_closed:
                return
            else:
                frame_is_due = await _idle(news, something_to_tell=told < position)

    def _forget_encoded(self, records: list[EventRecord]) -> None:
        """What was read back from the journal is not kept in its encoded form too."""
        oldest_in_tail = self._tail[0].sequence if self._tail else self.committed_sequence + 1
        for record in records:
            if record.sequence >= oldest_in_tail:
                break
            record.encoded = None

    async def _read(self, after: int, wanted: _Wanted) -> tuple[list[EventRecord], int]:
        records: list[EventRecord] = []
        size, through = 0, after
        types, namespaces, submission_id = wanted.types, wanted.namespaces, wanted.submission_id
        scanned = self._tail_after(after)
        if scanned is None:
            self.check_cursor(after)
            scanned = await self._journal.read(after, _FRAME_SCAN)
        for record in scanned:
            through = record.sequence
            event = record.event
            if (
                type(event) in types
                and record.namespace in namespaces
                and (not submission_id or event.submission_id == submission_id)
            ):
                records.append(record)
                size += record.size
                if len(records) >= _FRAME_EVENTS or size >= _FRAME_BYTES:
                    break
        return records, through

    def _tail_after(self, after: int) -> Sequence[EventRecord] | None:
        """None when the tail begins later."""
        if after >= self.committed_sequence:
            return ()
        tail = self._tail
        if not tail or tail[0].sequence > after + 1:
            return None
        start = after + 1 - tail[0].sequence
        return tail[start : start + _FRAME_SCAN]


async def _idle(news: asyncio.Event, *, something_to_tell: bool) -> bool:
    """Waits for a commit; True when an idle filter should be told first how far it has got."""
    if not something_to_tell:
        await news.wait()
        return False
    return not await rings_within(_IDLE_FRAME_SECONDS, news)


def _wanted(event_filter: EventFilter) -> _Wanted:
    kinds = event_filter.kinds
    return _Wanted(
        types=frozenset(kind for kind, name in KIND_OF_EVENT.items() if not kinds or name in kinds),
        namespaces=(event_filter.namespace, EVERY_NAMESPACE),
        submission_id=event_filter.submission_id,
    )
