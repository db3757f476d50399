"""The one thread that writes the journal: commits frame by frame, and tidies up in between.

    inbox -> a draft becomes a frame -> commit (fsync) -> high-water mark -> reported, so acknowledged

Invariants
  1. What comes in is done in order: a snapshot is written after the events that it counts in.
  2. The high-water mark is never beyond the database, and nothing is reported that it does not name.
  3. What cannot be written is kept and tried again, and everything behind it waits; meanwhile the disk may be full.
  4. The thread ends by `stop` alone, or after it has said by a JournalError why it never writes again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from functools import partial
from queue import SimpleQueue
from typing import TYPE_CHECKING

import apsw
import msgspec

from py_scheduler.adapters.sqlite_journal.frames import Draft, framed
from py_scheduler.adapters.sqlite_journal.store import size_of
from py_scheduler.domain.values.plain import words_of
from py_scheduler.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from py_scheduler.adapters.sqlite_journal.files import Ballast, HighWater
    from py_scheduler.adapters.sqlite_journal.retention import JournalLimits, Retention
    from py_scheduler.adapters.sqlite_journal.store import JournalStore
    from py_scheduler.domain.ports import Snapshot

_log = logging.getLogger(__name__)

_RETRY_SECONDS = 0.5
_SILENT_SECONDS = 60.0
_SHRINK_PAGES = 512
_FREE_BYTES_KEPT = 64 << 20
"""Free pages are used again; only what is far more than that goes back to the file system."""

_WRITE_ERRORS = (apsw.Error, OSError)


class PutSnapshots(msgspec.Struct, frozen=True):
    snapshots: Sequence[Snapshot]


class SetCheckpoint(msgspec.Struct, frozen=True):
    through_sequence: int
    forgotten: Sequence[str]


class Unwritable(msgspec.Struct, frozen=True):
    """What should have come here could not be made, so nothing behind it may be written either."""

    error: Exception


class _Look(msgspec.Struct, frozen=True):
    """Something may be discarded by now."""


class _Stop(msgspec.Struct, frozen=True):
    pass


Item = Draft | PutSnapshots | SetCheckpoint | Unwritable | _Look | _Stop


class _GaveUpError(Exception):
    """The process ends and the store still cannot be written."""


class JournalWriter:
    """Owns the writing side of the store from `start` to `stop`."""

    def __init__(  # noqa: PLR0913 -- the parts of one store, made by whoever opened it
        self,
        *,
        store: JournalStore,
        high_water: HighWater,
        ballast: Ballast,
        retention: Retention,
        limits: JournalLimits,
        chain: bytes,
        on_commit: Callable[[int], None],
        on_failure: Callable[[Exception], None],
        at: Callable[[str], None],
    ) -> None:
        """on_commit, on_failure: called from the thread. at: told where it stands, for tests that end it there."""
        self._store = store
        self._high_water = high_water
        self._ballast = ballast
        self._retention = retention
        self._limits = limits
        self._chain = chain
        self._on_commit = on_commit
        self._on_failure = on_failure
        self._at = at
        self._inbox: SimpleQueue[Item] = SimpleQueue()
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        """Since when it cannot be written, or had to give up its ballast, why."""
        self._reported = self._acknowledged = 0
        self._silent_until = 0.0
        self.is_broken = False
        """Whether it has failed for good: what it is given is dropped."""
        self._has_discarded = False
        """Anything since it could not be written."""
        self._may_shrink = True
        """Whether there may be free pages that nobody has looked for."""
        self._clock_began = time.time() - time.monotonic()
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self.oldest_sequence = store.checkpoint.anchor_sequence + 1
        self.wants_checkpoint = False

    def start(self) -> None:
        self._ballast.lay()
        self._thread.start()

    def put(self, item: Item) -> None:
        if not self.is_broken:  # What nobody will ever take would only pile up.
            self._inbox.put(item)

    def acknowledge(self, through_sequence: int) -> None:
        """Not by the inbox alone: what comes in waits while the disk is full, and this is what may help."""
        self._acknowledged = max(self._acknowledged, through_sequence)
        self.put(_Look())

    def stop(self) -> None:
        """Writes what came in before, unless the store cannot be written; blocks."""
        self._stopping.set()
        self._inbox.put(_Stop())
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            while type(item := self._inbox.get()) is not _Stop:
                if type(item) is Draft:
                    self._commit(item)
                else:
                    self._do(item)
                self._tidy()
            self._settle()
        except _GaveUpError:
            _log.error("the journal could not be written to the end: what was not acknowledged is lost")
        except Exception as error:  # noqa: BLE001 -- no disk's fault: trying again gives the same, and somebody must know
            _log.critical("the journal has failed and writes nothing any more", exc_info=error)
            self.is_broken, self.wants_checkpoint = True, False
            reason = f"the journal has failed by a fault of its own: {words_of(error)}"
            self._on_failure(JournalError(reason))

    def _unix_seconds(self) -> float:
        """Without the jumps that the wall clock has made since the start: they make nothing older."""
        return self._clock_began + time.monotonic()

    def _commit(self, draft: Draft) -> None:
        frame = framed(draft, self._chain, self._unix_seconds())
        self._at("before_commit")
        self._persist(partial(self._store.put_frame, frame, draft.payload))
        self._at("after_commit")
        self._chain = frame.chain
        self._persist(partial(self._high_water.write, self._store.store_epoch, frame.last_sequence, frame.chain))
        self._retention.add(size_of(frame, len(draft.payload)))
        self._at("before_ack")
        self._report(frame.last_sequence)
        self._at("after_ack")

    def _do(self, item: Item) -> None:
        if type(item) is PutSnapshots:
            self._persist(partial(self._store.put_snapshots, item.snapshots))
        elif type(item) is SetCheckpoint:
            self._persist(partial(self._store.set_checkpoint, item.through_sequence, item.forgotten))
            self._retention.cover(item.through_sequence, self._store.snapshot_bytes)
            self._may_shrink = True
        elif type(item) is Unwritable:
            raise item.error

    def _persist(self, write: Callable[[], None]) -> None:
        """Does it until it is done. Raises _GaveUpError when it is not, and the process ends."""
        while True:
            try:
                write()
            except _WRITE_ERRORS as error:
                self._failed(error)
            else:
                self._recovered()
                return
            if self._stopping.wait(_RETRY_SECONDS) and self._failure is not None:
                with contextlib.suppress(*_WRITE_ERRORS):
                    write()
                    return
                raise _GaveUpError

    def _failed(self, error: Exception) -> None:
        if self._failure is None:
            _log.error("the journal cannot be written, and nothing is acknowledged meanwhile: %s", error)
            self._has_discarded = False
        self._failure = error
        self._judge()
        if self._retention.has_expendable:
            self._ballast.give_up()
        self._on_failure(error)
        self._discard()

    def _recovered(self) -> None:
        """Not while the ballast is away: what is written then takes of the room that it made for dropping things."""
        if self._failure is not None and self._ballast.is_there:
            _log.warning("the journal is written again")
            self._failure = None

    def _report(self, through_sequence: int) -> None:
        self._judge()
        self._reported = through_sequence
        self._on_commit(through_sequence)
        if self._failure is not None:
            self._on_failure(self._failure)

    def _judge(self) -> None:
        self._retention.acknowledge(self._acknowledged, self._unix_seconds())
        self.wants_checkpoint = self._retention.wants_checkpoint(is_short_of_room=self._failure is not None)

    # Tidying up, which may fail without harm

    def _tidy(self) -> None:
        with self._only_logged():
            if self._store.wal_bytes > self._limits.wal_bytes:
                self._store.move_wal()
                self._high_water.sync()
        self._judge()
        self._discard()
        if not self._ballast.is_there:
            with self._only_logged():
                self._make_room()

    def _discard(self) -> None:
        """In steps, between which commits come first; when there is no room, all of it."""
        with self._only_logged():
            is_short = self._failure is not None
            while (last := self._retention.to_discard(is_short_of_room=is_short)) is not None:
                # Before it is done: who reads by the old one must not find a hole.
                self.oldest_sequence = last + 1
                self._store.discard_frames(last)
                self._retention.discarded(last)
                self._has_discarded = self._may_shrink = True
                if not is_short and not self._inbox.empty():
                    return
            if self._may_shrink:
                self._may_shrink = self._store.free_bytes > _FREE_BYTES_KEPT
                if self._may_shrink:
                    self._store.shrink(_SHRINK_PAGES)

    def _make_room(self) -> None:
        """Puts the ballast back once what was dropped has become room for files again; it is what dropping needs."""
        if self._failure is not None and self._retention.has_expendable and not self._has_discarded:
            return
        self._store.shrink(self._limits.ballast_bytes // 4_096)
        self._store.move_wal(truncate=True)
        self._ballast.lay()
        if self._failure is not None and self._ballast.is_there:
            self._recovered()
            self._on_commit(self._reported)

    @contextlib.contextmanager
    def _only_logged(self) -> Iterator[None]:
        """Once in a while: on a full disk it fails after every commit."""
        try:
            yield
        except _WRITE_ERRORS as error:
            if time.monotonic() > self._silent_until:
                self._silent_until = time.monotonic() + _SILENT_SECONDS
                _log.warning("the journal could not be tidied up for now: %s", error)

    def _settle(self) -> None:
        with self._only_logged():
            self._high_water.sync()
            self._store.move_wal(truncate=True)
