"""The journal's database: its tables, the proof that it is whole, and each change as one transaction.

    frame       one row a commit: its events, chained by hash          payload     trajectories of that commit
    snapshot    one row a piece of the state, as of some event         checkpoint  one row: what may be relied on
    meta        one row: the name of the store, and where fencing tokens begin

Invariants
  1. Frames follow one another without a hole, in sequences and in hashes, from the checkpoint's anchor on.
  2. What a restart needs is the snapshots and the frames after the checkpoint; frames before it are for watchers.
  3. The checkpoint row counts the snapshots and sums up their digests, in the transaction that changes them.
  4. Nothing here knows threads or loops: a connection writes, another one reads, each used by one thread at a time.
"""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING

import apsw
import msgspec

from py_scheduler.adapters.sqlite_journal.frames import DIGEST_BYTES, Frame, digest_of
from py_scheduler.domain.ports import Snapshot
from py_scheduler.errors import JournalDamagedError, JournalError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

FORMAT_VERSION = 1
APPLICATION_ID = 0x70795363
OLDEST_SQLITE = (3, 51, 3)
"""Releases before could corrupt a database in WAL mode when a checkpoint and a write met."""
DATABASE = "journal.db"
_WAL_LIMIT_BYTES = 64 << 20

_SCHEMA = f"""
PRAGMA page_size = 16384; -- A commit is a large blob: a third cheaper than in pages of 4 KiB.
PRAGMA auto_vacuum = INCREMENTAL;
PRAGMA journal_mode = WAL;
BEGIN IMMEDIATE;
PRAGMA application_id = {APPLICATION_ID};
PRAGMA user_version = {FORMAT_VERSION};
CREATE TABLE meta (store_epoch BLOB NOT NULL, first_fencing_token INTEGER NOT NULL);
CREATE TABLE frame (
    last_sequence INTEGER PRIMARY KEY, first_sequence INTEGER NOT NULL, unix_seconds REAL NOT NULL,
    previous BLOB NOT NULL, chain BLOB NOT NULL, payload_digest BLOB NOT NULL, events BLOB NOT NULL);
CREATE TABLE payload (last_sequence INTEGER PRIMARY KEY, content BLOB NOT NULL);
CREATE TABLE snapshot (
    name TEXT PRIMARY KEY, sequence INTEGER NOT NULL, is_final INTEGER NOT NULL, digest BLOB NOT NULL,
    content BLOB NOT NULL);
CREATE TABLE checkpoint (
    through_sequence INTEGER NOT NULL, anchor_sequence INTEGER NOT NULL, anchor_chain BLOB NOT NULL,
    snapshot_count INTEGER NOT NULL, snapshot_sum BLOB NOT NULL, digest BLOB NOT NULL);
"""
SELECT_FRAMES = (
    "SELECT first_sequence, last_sequence, unix_seconds, previous, chain, payload_digest, events FROM frame "
    "WHERE last_sequence > ? ORDER BY last_sequence LIMIT ?"
)
SELECT_CHECKPOINT = (
    "SELECT through_sequence, anchor_sequence, anchor_chain, snapshot_count, snapshot_sum, digest FROM checkpoint"
)
SELECT_SNAPSHOTS = "SELECT name, sequence, content, is_final, digest FROM snapshot"
_INSERT_FRAME = (
    "INSERT INTO frame (first_sequence, last_sequence, unix_seconds, previous, chain, payload_digest, events) "
    "VALUES (?, ?, ?, ?, ?, ?, ?)"
)


class Checkpoint(msgspec.Struct, frozen=True):
    """through_sequence: a restart applies the events after it. anchor: the newest event that was discarded, and its
    frame's chain hash. snapshot_sum: the digests of all snapshots, added without carry.
    """

    through_sequence: int
    anchor_sequence: int
    anchor_chain: bytes
    snapshot_count: int = 0
    snapshot_sum: bytes = bytes(DIGEST_BYTES)

    @property
    def digest(self) -> bytes:
        return digest_of(msgspec.msgpack.encode(self))


class FrameSize(msgspec.Struct, frozen=True, gc=False):
    """What is kept in memory of each stored frame."""

    last_sequence: int
    event_count: int
    event_bytes: int
    payload_bytes: int
    unix_seconds: float

    @property
    def size_bytes(self) -> int:
        return self.event_bytes + self.payload_bytes


def size_of(frame: Frame, payload_bytes: int) -> FrameSize:
    count = frame.last_sequence - frame.first_sequence + 1
    return FrameSize(frame.last_sequence, count, len(frame.events), payload_bytes, frame.unix_seconds)


def snapshot_of_row(name: str, sequence: int, content: bytes, is_final: int) -> Snapshot:
    return Snapshot(name, sequence, content, bool(is_final))


def digest_of_snapshot(snapshot: Snapshot) -> bytes:
    return digest_of(b"%s\0%d\0%s" % (snapshot.name.encode(), snapshot.sequence, snapshot.content))


def sum_of_digests(digests: Iterable[bytes]) -> bytes:
    """Without carry, so that adding one again takes it out."""
    total = 0
    for digest in digests:
        total ^= int.from_bytes(digest, "big")
    return total.to_bytes(DIGEST_BYTES, "big")


def check_sqlite() -> None:
    """Raises JournalError when the SQLite that apsw brings is too old to be trusted."""
    version = tuple(map(int, apsw.sqlite_lib_version().split(".")))
    if version < OLDEST_SQLITE:
        needed = ".".join(map(str, OLDEST_SQLITE))
        raise JournalError(f"SQLite {apsw.sqlite_lib_version()} is too old for the journal: install apsw>={needed}")


def connect(path: Path, *, may_write: bool) -> apsw.Connection:
    flags = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE if may_write else apsw.SQLITE_OPEN_READONLY
    database = apsw.Connection(str(path), flags=flags)
    database.set_busy_timeout(10_000)
    if may_write:
        database.wal_autocheckpoint(0)  # Whoever commits does that too, after the commit was told of.
        database.execute(f"PRAGMA synchronous = FULL; PRAGMA journal_size_limit = {_WAL_LIMIT_BYTES}").fetchall()
    return database


def check_format(database: apsw.Connection, path: Path) -> None:
    """Raises JournalError unless it is a journal of this format."""
    application_id, version = database.pragma("application_id"), database.pragma("user_version")
    if application_id != APPLICATION_ID:
        raise JournalDamagedError(f"{path} is no journal of py-scheduler: name another --state-dir")
    if version != FORMAT_VERSION:
        raise JournalError(
            f"{path} has format {version}, this version reads {FORMAT_VERSION}: serve with the version that wrote it, "
            "or name another --state-dir"
        )


class JournalStore:
    """The writing side of one database. Every method may raise apsw.Error; what was not committed changed nothing."""

    def __init__(self, path: Path, *, may_create: bool) -> None:
        """Opens it, or makes it. Raises JournalError, apsw.Error."""
        self.path = path
        if not may_create and not path.exists():
            raise damaged(path, "the file is gone")
        self._database = connect(path, may_write=True)
        try:
            # Also where a process was killed while it made one.
            if may_create and not self._database.execute("SELECT count(*) FROM sqlite_master").get:
                self._create()
            check_format(self._database, path)
            self.store_epoch, self.first_fencing_token = self._open_meta()
            self._checkpoint = self._read_checkpoint()
            self._digests = dict(self._database.execute("SELECT name, digest FROM snapshot"))
            self._page_bytes = int(self._database.pragma("page_size"))
            self._moved_pages = self._pages_written() - self._wal_file_bytes() // self._page_bytes
        except BaseException:
            self._database.close()
            raise

    def _create(self) -> None:
        epoch = os.urandom(DIGEST_BYTES)
        with self._rolled_back():
            self._database.execute(_SCHEMA).fetchall()
            self._database.execute("INSERT INTO meta VALUES (?, 0)", (epoch,))
            self._insert_checkpoint(Checkpoint(through_sequence=0, anchor_sequence=0, anchor_chain=epoch))
            self._database.execute("COMMIT")

    def begin_at(self, checkpoint: Checkpoint, epoch: bytes, first_fencing_token: int) -> None:
        """Makes a store that was just created one that goes on from another."""
        with self._rolled_back():
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute(
                "UPDATE meta SET store_epoch = ?, first_fencing_token = ?", (epoch, first_fencing_token)
            )
            self._insert_checkpoint(checkpoint)
            self._database.execute("COMMIT")
        self.store_epoch, self._checkpoint = epoch, checkpoint

    def _open_meta(self) -> tuple[bytes, int]:
        """Also moves the fencing tokens on, for good, before any is given out."""
        epoch, before = self._database.execute("SELECT store_epoch, first_fencing_token FROM meta").get
        first_fencing_token = max(time.time_ns() // 1_000, before + (1 << 32))
        self._database.execute("UPDATE meta SET first_fencing_token = ?", (first_fencing_token,))
        return epoch, first_fencing_token

    def _read_checkpoint(self) -> Checkpoint:
        row = self._database.execute(SELECT_CHECKPOINT).get
        checkpoint = Checkpoint(*row[:-1]) if row else None
        if checkpoint is None or checkpoint.digest != row[-1]:
            raise damaged(self.path, "what it says of its own checkpoint is not what was written")
        return checkpoint

    # Reading

    @property
    def checkpoint(self) -> Checkpoint:
        return self._checkpoint

    def verify(self) -> tuple[list[FrameSize], bytes]:
        """The size of each frame, and the chain hash of the last. Raises JournalDamagedError at the first fault.

        Payloads are only looked for: what they hold is proven when it is read.
        """
        checkpoint = self._checkpoint
        sequence, chain = checkpoint.anchor_sequence, checkpoint.anchor_chain
        payload_bytes = dict(self._database.execute("SELECT last_sequence, length(content) FROM payload"))
        sizes = []
        for frame in frames(self._database, 0):
            if frame.first_sequence != sequence + 1 or frame.previous != chain:
                raise damaged(self.path, f"the events from {sequence + 1} on are missing")
            if not frame.is_sound or (frame.payload_digest and frame.last_sequence not in payload_bytes):
                raise damaged(self.path, f"the events {frame.first_sequence} to {frame.last_sequence} are damaged")
            sequence, chain = frame.last_sequence, frame.chain
            sizes.append(size_of(frame, payload_bytes.get(sequence, 0)))
        if sequence < checkpoint.through_sequence:
            raise damaged(self.path, f"the events from {sequence + 1} to {checkpoint.through_sequence} are missing")
        return sizes, chain

    def frames(self, after_sequence: int) -> Iterator[Frame]:
        return frames(self._database, after_sequence)

    def snapshots(self) -> Iterator[Snapshot]:
        """Raises JournalDamagedError, at the latest after the last one."""
        count, total = 0, bytes(DIGEST_BYTES)
        for *fields, digest in self._database.execute(f"{SELECT_SNAPSHOTS} ORDER BY rowid"):
            snapshot = snapshot_of_row(*fields)
            if digest_of_snapshot(snapshot) != digest:
                raise damaged(self.path, f"the snapshot {snapshot.name!r} is damaged")
            count, total = count + 1, sum_of_digests((total, digest))
            yield snapshot
        if (count, total) != (self._checkpoint.snapshot_count, self._checkpoint.snapshot_sum):
            raise damaged(self.path, "the snapshots are not those that were written")

    # Writing: each method is one transaction

    def put_frame(self, frame: Frame, payload: bytes) -> None:
        """One statement when there is no payload: each costs a turn of the interpreter's lock."""
        row = msgspec.structs.astuple(frame)
        if not payload:
            self._database.execute(_INSERT_FRAME, row)
            return
        with self._rolled_back():
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("INSERT INTO payload VALUES (?, ?)", (frame.last_sequence, payload))
            self._database.execute(_INSERT_FRAME, row)
            self._database.execute("COMMIT")

    def put_snapshots(self, snapshots: Iterable[Snapshot]) -> None:
        changed: dict[str, bytes | None] = {}
        with self._rolled_back():
            self._database.execute("BEGIN IMMEDIATE")
            for snapshot in snapshots:
                digest = changed[snapshot.name] = digest_of_snapshot(snapshot)
                self._database.execute(
                    "INSERT OR REPLACE INTO snapshot VALUES (?, ?, ?, ?, ?)",
                    (snapshot.name, snapshot.sequence, snapshot.is_final, digest, snapshot.content),
                )
            self._commit_checkpoint(self._checkpoint.through_sequence, changed)

    def set_checkpoint(self, through_sequence: int, forgotten: Iterable[str]) -> None:
        changed: dict[str, bytes | None] = dict.fromkeys(forgotten)
        with self._rolled_back():
            self._database.execute("BEGIN IMMEDIATE")
            for name in changed:
                self._database.execute("DELETE FROM snapshot WHERE name = ?", (name,))
            self._commit_checkpoint(through_sequence, changed)

    def _commit_checkpoint(self, through_sequence: int, changed: dict[str, bytes | None]) -> None:
        """changed: by name, the digests of snapshots that were written; None: it is gone."""
        before = [digest for name in changed if (digest := self._digests.get(name)) is not None]
        after = [digest for digest in changed.values() if digest is not None]
        checkpoint = self._checkpoint
        checkpoint = msgspec.structs.replace(
            checkpoint,
            through_sequence=through_sequence,
            snapshot_count=checkpoint.snapshot_count - len(before) + len(after),
            snapshot_sum=sum_of_digests([checkpoint.snapshot_sum, *before, *after]),
        )
        self._insert_checkpoint(checkpoint)
        self._database.execute("COMMIT")
        self._checkpoint = checkpoint
        for name, digest in changed.items():
            if digest is None:
                self._digests.pop(name, None)
            else:
                self._digests[name] = digest

    def discard_frames(self, last_sequence: int) -> None:
        """The frames up to the one that ends there go, with their payloads."""
        row = self._database.execute("SELECT chain FROM frame WHERE last_sequence = ?", (last_sequence,)).get
        changed = msgspec.structs.replace(self._checkpoint, anchor_sequence=last_sequence, anchor_chain=row)
        with self._rolled_back():
            self._database.execute("BEGIN IMMEDIATE")
            self._database.execute("DELETE FROM frame WHERE last_sequence <= ?", (last_sequence,))
            self._database.execute("DELETE FROM payload WHERE last_sequence <= ?", (last_sequence,))
            self._insert_checkpoint(changed)
            self._database.execute("COMMIT")
        self._checkpoint = changed

    def _insert_checkpoint(self, checkpoint: Checkpoint) -> None:
        self._database.execute("DELETE FROM checkpoint")
        self._database.execute(
            "INSERT INTO checkpoint VALUES (?, ?, ?, ?, ?, ?)",
            (*msgspec.structs.astuple(checkpoint), checkpoint.digest),
        )

    @contextmanager
    def _rolled_back(self) -> Iterator[None]:
        """What fails leaves no transaction open."""
        try:
            yield
        except BaseException:
            if self._database.in_transaction:
                self._database.execute("ROLLBACK")
            raise

    # Room

    @property
    def wal_bytes(self) -> int:
        """Of the write-ahead log, what is still to be moved. Its file keeps its size when it begins anew."""
        return (self._pages_written() - self._moved_pages) * self._page_bytes

    def _pages_written(self) -> int:
        return self._database.status(apsw.SQLITE_DBSTATUS_CACHE_WRITE)[0]

    def _wal_file_bytes(self) -> int:
        try:
            return (self.path.parent / f"{self.path.name}-wal").stat().st_size
        except FileNotFoundError:
            return 0

    def move_wal(self, *, truncate: bool = False) -> None:
        """Writes what the write-ahead log holds into the database, so that the log begins anew."""
        mode = apsw.SQLITE_CHECKPOINT_TRUNCATE if truncate else apsw.SQLITE_CHECKPOINT_PASSIVE
        in_log, moved = self._database.wal_checkpoint(mode=mode)
        if in_log == moved:  # A reader may have kept some.
            self._moved_pages = self._pages_written()

    def shrink(self, pages: int) -> None:
        """Gives up to so many free pages back to the file system."""
        self._database.execute(f"PRAGMA incremental_vacuum({pages})").fetchall()

    @property
    def free_bytes(self) -> int:
        """Of pages that hold nothing any more."""
        return int(self._database.pragma("freelist_count")) * self._page_bytes

    @property
    def snapshot_bytes(self) -> int:
        """Of those that a checkpoint writes anew."""
        select = "SELECT coalesce(sum(length(content)), 0) FROM snapshot WHERE NOT is_final"
        return int(self._database.execute(select).get)

    def rebuild(self) -> None:
        """Writes the database anew, as small as it gets; needs as much room again meanwhile."""
        self._database.execute("VACUUM")

    def close(self) -> None:
        self._database.close()


def frames(database: apsw.Connection, after_sequence: int, limit: int = -1) -> Iterator[Frame]:
    """Frames that hold events after that sequence, in order; whether they are sound is for the caller to ask."""
    for row in database.execute(SELECT_FRAMES, (after_sequence, limit)):
        yield Frame(*row)


def ends_after(database: apsw.Connection, after_sequence: int, limit: int) -> list[int]:
    """The last sequences of the frames that `frames` would give."""
    select = "SELECT last_sequence FROM frame WHERE last_sequence > ? ORDER BY last_sequence LIMIT ?"
    return [int(str(row[0])) for row in database.execute(select, (after_sequence, limit)).fetchall()]


def payload_of(database: apsw.Connection, frame: Frame, path: Path) -> bytes:
    """Raises JournalDamagedError."""
    if not frame.payload_digest:
        return b""
    content = database.execute("SELECT content FROM payload WHERE last_sequence = ?", (frame.last_sequence,)).get
    if content is None or digest_of(content) != frame.payload_digest:
        raise damaged(path, f"the trajectories of events {frame.first_sequence} to {frame.last_sequence} are damaged")
    assert isinstance(content, bytes)
    return content


def damaged(path: Path, reason: str) -> JournalDamagedError:
    return JournalDamagedError(
        f"the journal {path} is damaged: {reason}. `py-scheduler journal recover --state-dir {path.parent}` says what "
        "is lost and makes it usable again"
    )
