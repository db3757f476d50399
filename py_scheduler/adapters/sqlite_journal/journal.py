"""The journal in a SQLite database: what was acknowledged survives the end of the process, however it ends.

    event loop:  append, encode ──► writer thread: one INSERT a commit, fsync ─► high-water mark ─► on_commit
                 read   ──────────► reader thread: whole frames, proven before they are decoded
    files:       journal.db (+ -wal, -shm), high_water, lock, ballast, all in one state directory

Invariants
  1. One process uses a state directory; its lock ends with it.
  2. A store that does not hold all that its high-water mark names, or whose frames do not follow one another, is not
     opened. What was never acknowledged (a torn end of the log) is dropped, and that is logged.
  3. Memory does not grow with what is stored, but for one small figure a commit; a reader holds a few frames.
  4. While a commit is under way, what is appended gathers, and the next commit takes all of it. So a busy loop makes
     few and large commits, and an idle one waits for nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING

import apsw

from py_scheduler.adapters.sqlite_journal.files import Ballast, HighWater, StoreLock, torn_wal_pages
from py_scheduler.adapters.sqlite_journal.frames import (
    bare_records_of,
    draft_of,
    drafting,
    is_large,
    portions,
    records_of,
)
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits, Retention
from py_scheduler.adapters.sqlite_journal.store import (
    DATABASE,
    JournalStore,
    check_sqlite,
    connect,
    damaged,
    ends_after,
    frames,
    payload_of,
)
from py_scheduler.adapters.sqlite_journal.writer import JournalWriter, PutSnapshots, SetCheckpoint, Unwritable
from py_scheduler.errors import CursorExpiredError, JournalError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from pathlib import Path

    from py_scheduler.domain.events import EventRecord
    from py_scheduler.domain.ports import Snapshot

_log = logging.getLogger(__name__)

_DEFAULT_LIMITS = JournalLimits()
_READ_BYTES = 4 << 20
"""One read ends after the frame that brings it to so much."""
_CACHED_FRAMES = 4
"""Watchers read a frame in several steps, and stand near one another."""


def _nowhere(_point: str) -> None:
    pass


class SqliteJournal:
    """Implements `domain.ports.Journal`."""

    def __init__(
        self, folder: Path, limits: JournalLimits = _DEFAULT_LIMITS, *, at: Callable[[str], None] = _nowhere
    ) -> None:
        """at: called in the writer thread with the name of the point that it reaches: before_commit, after_commit,
        before_ack, after_ack.
        """
        self.folder = folder
        self.path = folder / DATABASE
        self._limits = limits
        self._at = at
        self._lock: StoreLock | None = None
        self._high_water: HighWater | None = None
        self._store: JournalStore | None = None
        self._writer: JournalWriter | None = None
        self._gathered: list[EventRecord] = []
        """Appended, and not yet the writer's."""
        self._drafting: Iterator[None] = iter(())
        """Encodes what was appended before that, for the writer."""
        self._committed_sequence = 0

    def open(self) -> None:
        if self._lock is not None:
            return
        check_sqlite()
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._lock = StoreLock(self.folder)
            self._open_store()
        except OSError as error:
            self._release()
            raise JournalError(f"the state directory {self.folder} cannot be used: {error}") from error
        except BaseException:
            self._release()
            raise

    def _open_store(self) -> None:
        torn = torn_wal_pages(self.path.with_name(f"{DATABASE}-wal"))
        self._high_water = high_water = HighWater(self.folder / "high_water")
        mark = high_water.read()
        try:
            self._store = store = JournalStore(self.path, may_create=mark is None)
            self._sizes, self._chain = store.verify()
        except (apsw.CorruptError, apsw.NotADBError) as error:
            raise damaged(self.path, str(error)) from error
        except apsw.Error as error:
            raise JournalError(f"the journal {self.path} cannot be opened: {error}") from error
        self._last_sequence = self._sizes[-1].last_sequence if self._sizes else store.checkpoint.anchor_sequence
        if mark is None and not self._last_sequence:
            high_water.reset(store.store_epoch, 0, self._chain)
        else:
            self._compare(mark)
        if torn:
            _log.warning("the journal's last commit was torn and never acknowledged: its %d pages are dropped", torn)

    def _compare(self, mark: tuple[bytes, int, bytes] | None) -> None:
        """The mark may be behind the store, never before it. Raises JournalDamagedError."""
        last = self._last_sequence
        if mark is None:
            raise damaged(self.path, "the file high_water beside it is gone, so nobody knows how far it had got")
        epoch, sequence, chain = mark
        if epoch != self.store_epoch:
            raise damaged(self.path, "the file high_water beside it belongs to another journal")
        if sequence > last:
            raise damaged(self.path, f"the events {last + 1} to {sequence} were acknowledged and are missing")
        if sequence == last and chain != self._chain:
            raise damaged(self.path, f"its events up to {sequence} are not those that were acknowledged")

    def _opened(self) -> JournalStore:
        assert self._store is not None, "the journal is not open"
        return self._store

    def _release(self) -> None:
        """Whatever `open` had got; nothing when that was given back already."""
        for part in (self._store, self._high_water, self._lock):
            if part is not None:
                part.close()
        self._store = self._high_water = self._lock = None

    @property
    def store_epoch(self) -> bytes:
        return self._opened().store_epoch

    @property
    def is_durable(self) -> bool:
        return True

    @property
    def oldest_sequence(self) -> int:
        return self._opened().checkpoint.anchor_sequence + 1 if self._writer is None else self._writer.oldest_sequence

    @property
    def last_sequence(self) -> int:
        return self._last_sequence

    @property
    def first_fencing_token(self) -> int:
        return self._opened().first_fencing_token

    def snapshots(self) -> Iterable[Snapshot]:
        return self._opened().snapshots()

    def replay(self) -> Iterator[Sequence[EventRecord]]:
        store = self._opened()
        through_sequence = store.checkpoint.through_sequence
        for frame in store.frames(through_sequence):
            # The first may begin before the checkpoint, with events of what was forgotten by it.
            yield bare_records_of(frame)[max(0, through_sequence + 1 - frame.first_sequence) :]

    # Without a server

    def export(self, after_sequence: int = 0) -> Iterator[list[EventRecord]]:
        """All that is retained after a sequence, with everything; between `open` and `abandon`.

        Raises JournalDamagedError.
        """
        reader = connect(self.path, may_write=False)
        try:
            for frame in self._opened().frames(after_sequence):
                yield records_of(frame, payload_of(reader, frame, self.path))
        finally:
            reader.close()

    def compact(self, snapshots: Sequence[Snapshot], forgotten: Sequence[str]) -> None:
        """Makes the file as small as what is still wanted; the snapshots are of all events."""
        store, last = self._opened(), self._last_sequence
        store.put_snapshots(snapshots)
        store.set_checkpoint(last, forgotten)
        retention = Retention(self._limits, self._sizes, last, store.snapshot_bytes)
        retention.acknowledge(0, time.time())
        while (end := retention.to_discard(is_short_of_room=True)) is not None:
            store.discard_frames(end)
            retention.discarded(end)
        store.rebuild()
        store.move_wal(truncate=True)

    def abandon(self) -> None:
        """Gives the store back without having been started."""
        self._release()

    # Running

    def start(self, on_commit: Callable[[int], None], on_failure: Callable[[Exception], None]) -> None:
        loop, store = asyncio.get_running_loop(), self._opened()
        assert self._high_water is not None
        self._reading = ThreadPoolExecutor(1, "journal-read", self._connect_reader)
        self._cache: OrderedDict[int, list[EventRecord]] = OrderedDict()
        checkpoint_sequence = store.checkpoint.through_sequence
        retention = Retention(self._limits, self._sizes, checkpoint_sequence, store.snapshot_bytes)
        self._sizes = []
        self._committed_sequence = self._handed_over = self._last_sequence
        self._on_commit = on_commit
        self._writer = JournalWriter(
            store=store,
            high_water=self._high_water,
            ballast=Ballast(self.folder / "ballast", self._limits.ballast_bytes),
            retention=retention,
            limits=self._limits,
            chain=self._chain,
            on_commit=lambda through_sequence: _tell(loop, self._committed, through_sequence),
            on_failure=lambda error: _tell(loop, on_failure, error),
            at=self._at,
        )
        self._writer.start()

    def _running(self) -> JournalWriter:
        assert self._writer is not None, "the journal is not started"
        return self._writer

    def append(self, records: Sequence[EventRecord]) -> None:
        if self._running().is_broken:
            return
        self._gathered += records
        if self._handed_over <= self._committed_sequence:
            self._hand_over()

    def _committed(self, through_sequence: int) -> None:
        self._committed_sequence = through_sequence
        self._on_commit(through_sequence)
        if self._handed_over <= through_sequence:
            self._hand_over()

    def _hand_over(self) -> None:
        """Takes several turns where there is much to encode."""
        if self._gathered:
            records, self._gathered = self._gathered, []
            self._handed_over = records[-1].sequence
            self._drafting = self._draft(records)
            self._go_on_drafting()

    def _draft(self, records: Sequence[EventRecord]) -> Iterator[None]:
        writer = self._running()
        try:
            for number, some in enumerate(portions(records)):
                if number:
                    yield
                writer.put((yield from drafting(some)) if is_large(some) else draft_of(some))
        except Exception as error:  # noqa: BLE001 -- the writer says so, and why, to whoever waits for a commit
            writer.put(Unwritable(error))

    def _go_on_drafting(self) -> None:
        if next(self._drafting, self) is not self:
            asyncio.get_running_loop().call_soon(self._go_on_drafting)

    def _hand_over_all(self) -> None:
        """In this turn, however much it is."""
        for _ in self._drafting:
            pass
        self._hand_over()
        for _ in self._drafting:
            pass

    def discard_through(self, sequence: int) -> None:
        self._running().acknowledge(sequence)

    @property
    def wants_checkpoint(self) -> bool:
        return self._running().wants_checkpoint

    def put_snapshots(self, snapshots: Sequence[Snapshot]) -> None:
        self._hand_over_all()  # What a snapshot counts in comes before it.
        self._running().put(PutSnapshots(snapshots))

    def checkpoint(self, through_sequence: int, forgotten: Sequence[str]) -> None:
        self._running().put(SetCheckpoint(through_sequence, forgotten))

    async def close(self) -> None:
        if self._writer is not None:
            self._hand_over_all()
            writer, self._writer = self._writer, None
            await asyncio.to_thread(writer.stop)
            await asyncio.to_thread(self._reading.shutdown)
        self._release()

    # Reading, in a thread of its own

    async def read(self, after_sequence: int, limit: int) -> list[EventRecord]:
        records = await asyncio.get_running_loop().run_in_executor(self._reading, self._read, after_sequence, limit)
        if (not records or records[0].sequence != after_sequence + 1) and after_sequence + 1 < self.oldest_sequence:
            oldest = self.oldest_sequence
            raise CursorExpiredError(
                f"events up to {oldest - 1} are no longer retained: start again without a cursor", oldest
            )
        return records

    def _connect_reader(self) -> None:
        self._reader = connect(self.path, may_write=False)

    def _read(self, after_sequence: int, limit: int) -> list[EventRecord]:
        records: list[EventRecord] = []
        size_bytes = 0
        # Fetched at once: a statement that is left half read would keep the write-ahead log from beginning anew.
        for last_sequence in ends_after(self._reader, after_sequence, limit):
            frame_records = self._frame(last_sequence)
            if not frame_records:
                break
            start = max(0, after_sequence + 1 - frame_records[0].sequence)
            records += frame_records[start : start + limit - len(records)]
            size_bytes += sum([record.size for record in frame_records])
            if len(records) >= limit or size_bytes >= _READ_BYTES:
                break
        return records

    def _frame(self, last_sequence: int) -> list[EventRecord]:
        """A frame's records with everything; none when it was discarded meanwhile. Raises JournalDamagedError."""
        cached = self._cache.get(last_sequence)
        if cached is not None:
            self._cache.move_to_end(last_sequence)
            return cached
        frame = next(frames(self._reader, last_sequence - 1, limit=1), None)
        if frame is None or frame.last_sequence != last_sequence:
            return []
        if not frame.is_sound:
            raise damaged(self.path, f"the events {frame.first_sequence} to {last_sequence} are damaged")
        records = records_of(frame, payload_of(self._reader, frame, self.path))
        self._cache[last_sequence] = records
        if len(self._cache) > _CACHED_FRAMES:
            self._cache.popitem(last=False)
        return records


def _tell(loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object) -> None:
    """Calls back in the loop, unless that ended while the last commit was under way."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
