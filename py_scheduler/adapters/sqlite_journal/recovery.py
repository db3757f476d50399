"""What of a damaged store is still sound, and a new store made of that.

A store is a past for watchers and a state for the server. Damage before the checkpoint costs watchers what they had not
read yet, and costs the server nothing. Damage after the checkpoint ends what can be relied on: a missing event may have
been about anything, so nothing after it is applied. With a checkpoint at 100 and damage at 120, the state is that of
119.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

import apsw
import msgspec

from py_scheduler.adapters.sqlite_journal.files import HighWater, StoreLock
from py_scheduler.adapters.sqlite_journal.frames import DIGEST_BYTES, Frame, digest_of
from py_scheduler.adapters.sqlite_journal.store import (
    APPLICATION_ID,
    DATABASE,
    FORMAT_VERSION,
    SELECT_CHECKPOINT,
    SELECT_FRAMES,
    SELECT_SNAPSHOTS,
    Checkpoint,
    JournalStore,
    connect,
    digest_of_snapshot,
    snapshot_of_row,
    sum_of_digests,
)
from py_scheduler.errors import JournalError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from py_scheduler.domain.ports import Snapshot


_NEXT_FRAME = "SELECT last_sequence FROM frame WHERE last_sequence > ? ORDER BY last_sequence LIMIT 1"
_FRAME_BEFORE = "SELECT last_sequence FROM frame WHERE last_sequence < ? ORDER BY last_sequence DESC LIMIT 1"
_RECOVERED = "journal.db.recovered"
_RECOVERED_MARK = "high_water.recovered"


class Lost(msgspec.Struct, frozen=True, order=True):
    """Events [first_sequence, last_sequence] that are no longer there, and why."""

    first_sequence: int
    last_sequence: int
    reason: str


class Examination(msgspec.Struct):
    """All that was found in a store. frames: those that are sound, in order. acknowledged: the last sequence that
    somebody was told of, as far as that can be known. checkpoint: None when it, or a snapshot, is damaged.
    """

    store_epoch: bytes | None = None
    first_fencing_token: int = 0
    frames: list[Frame] = []
    lost: list[Lost] = []
    acknowledged: int = 0
    checkpoint: Checkpoint | None = None
    snapshots: list[Snapshot] = []
    faults: list[str] = []
    """What else is wrong, beside lost events."""

    @property
    def is_sound(self) -> bool:
        return not self.lost and not self.faults

    @property
    def oldest_sequence(self) -> int:
        return self.frames[0].first_sequence if self.frames else self.last_sequence + 1

    @property
    def last_sequence(self) -> int:
        anchor = self.checkpoint.anchor_sequence if self.checkpoint else 0
        return self.frames[-1].last_sequence if self.frames else anchor


class Recovery(msgspec.Struct, frozen=True):
    """What `recover` did. lost: what no longer counts, exactly. kept: the events that watchers can still read, None: no
    event. is_state_whole: whether the server lost nothing that it acknowledged; then cursors stay good too.
    moved_to: where the damaged files are now.
    """

    lost: tuple[Lost, ...]
    kept: tuple[int, int] | None
    is_state_whole: bool
    moved_to: Path


def examine(folder: Path) -> Examination:
    """Looks at everything, also at each payload; changes nothing. Raises JournalError when it is in use, or newer."""
    lock = StoreLock(folder)
    try:
        return _examine(folder)
    finally:
        lock.close()


def _examine(folder: Path) -> Examination:
    found = Examination()
    mark = _mark_of(folder)
    if mark is None:
        found.faults.append("the file high_water is gone or illegible: how far the journal had got is not known")
    else:
        found.store_epoch, found.acknowledged, _chain = mark
    path = folder / DATABASE
    if not path.exists():
        found.faults.append(f"{DATABASE} is gone")
    else:
        try:
            database = connect(path, may_write=True)
        except apsw.Error as error:
            found.faults.append(f"{DATABASE} is no database: {error}")
        else:
            try:
                _look_into(database, found)
            finally:
                database.close()
    _find_lost(found)
    newest = found.frames[-1] if found.frames and not found.lost else None
    if mark and newest and newest.last_sequence == mark[1] and newest.chain != mark[2]:
        found.faults.append("the last events are not those that were acknowledged")
    return found


def _mark_of(folder: Path) -> tuple[bytes, int, bytes] | None:
    if not (folder / "high_water").exists():
        return None
    high_water = HighWater(folder / "high_water")
    try:
        return high_water.read()
    finally:
        high_water.close()


def _look_into(database: apsw.Connection, found: Examination) -> None:
    # What a damaged log holds is not to be written into the database by looking at it.
    database.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
    try:
        application_id, version = database.pragma("application_id"), database.pragma("user_version")
    except apsw.Error as error:
        found.faults.append(f"{DATABASE} is no database: {error}")
        return
    if application_id == APPLICATION_ID and version != FORMAT_VERSION:
        raise JournalError(f"the journal has format {version}, this version knows {FORMAT_VERSION}: use a newer one")
    try:
        epoch, found.first_fencing_token = database.execute("SELECT store_epoch, first_fencing_token FROM meta").get
        if found.store_epoch not in (None, epoch):
            found.faults.append("high_water belongs to another journal")
            found.acknowledged = 0
        found.store_epoch = epoch
    except (apsw.Error, TypeError):
        found.faults.append("the name of the journal cannot be read")
    found.frames = [frame for frame in _frames(database) if frame.is_sound and _has_payload(database, frame)]
    try:
        _read_state(database, found)
    except (apsw.Error, TypeError, ValueError) as error:
        found.checkpoint, found.snapshots = None, []
        found.faults.append(f"the state at the last checkpoint is damaged: {error}")


def _read_state(database: apsw.Connection, found: Examination) -> None:
    """Raises apsw.Error, TypeError, ValueError."""
    *fields, digest = database.execute(SELECT_CHECKPOINT).get
    checkpoint = Checkpoint(*fields)
    if checkpoint.digest != digest:
        raise ValueError("what it says of itself is not what was written")
    digests = []
    for *parts, digest in database.execute(SELECT_SNAPSHOTS):
        snapshot = snapshot_of_row(*parts)
        if digest_of_snapshot(snapshot) != digest:
            raise ValueError(f"the snapshot {snapshot.name!r}")
        digests.append(digest)
        found.snapshots.append(snapshot)
    if (len(digests), sum_of_digests(digests)) != (checkpoint.snapshot_count, checkpoint.snapshot_sum):
        raise ValueError("there are other snapshots than those that were written")
    found.checkpoint = checkpoint


def _frames(database: apsw.Connection) -> Iterator[Frame]:
    """All that can be read: from the front, over rows that cannot, and from the back where the front gives out."""
    seen: set[int] = set()
    behind: list[Frame] = []
    for is_forward in (True, False):
        last, select = (0, _NEXT_FRAME) if is_forward else (1 << 62, _FRAME_BEFORE)
        while True:
            try:
                key = database.execute(select, (last,)).get
            except apsw.Error:
                break  # The table itself is damaged here.
            if key is None or key in seen:
                break
            seen.add(key)
            last = key
            frame = _frame(database, key)
            if frame is not None and is_forward:
                yield frame
            elif frame is not None:
                behind.append(frame)
    yield from reversed(behind)


def _frame(database: apsw.Connection, last_sequence: int) -> Frame | None:
    try:
        row = database.execute(SELECT_FRAMES, (last_sequence - 1, 1)).get
        return Frame(*row) if row is not None and row[1] == last_sequence else None
    except apsw.Error:
        return None


def _has_payload(database: apsw.Connection, frame: Frame) -> bool:
    if not frame.payload_digest:
        return True
    try:
        select = "SELECT content FROM payload WHERE last_sequence = ?"
        content = database.execute(select, (frame.last_sequence,)).get
    except apsw.Error:
        return False
    return isinstance(content, bytes) and digest_of(content) == frame.payload_digest


def _find_lost(found: Examination) -> None:
    """The ranges between what is sound, and after it up to what was acknowledged."""
    checkpoint = found.checkpoint
    sequence, chain = (checkpoint.anchor_sequence, checkpoint.anchor_chain) if checkpoint else (0, None)
    following: list[Frame] = []
    for frame in found.frames:
        if frame.last_sequence <= sequence:
            continue
        if frame.first_sequence > sequence + 1:
            found.lost.append(Lost(sequence + 1, frame.first_sequence - 1, "missing or damaged"))
        elif chain is not None and frame.previous != chain:
            found.lost.append(Lost(frame.first_sequence, frame.last_sequence, "does not follow what is before it"))
            sequence, chain = frame.last_sequence, None
            continue
        following.append(frame)
        sequence, chain = frame.last_sequence, frame.chain
    found.frames = following
    through = max(found.acknowledged, checkpoint.through_sequence if checkpoint else 0)
    if sequence < through:
        found.lost.append(Lost(sequence + 1, through, "acknowledged and missing"))


def recover(folder: Path) -> Recovery | None:
    """Makes a new store of what is sound, and moves the damaged files aside; None when there is nothing to do.

    Raises JournalError, OSError.
    """
    lock = StoreLock(folder)
    try:
        found = _examine(folder)
        return None if found.is_sound else _rebuilt(folder, found)
    finally:
        lock.close()


def _rebuilt(folder: Path, found: Examination) -> Recovery:
    through = found.checkpoint.through_sequence if found.checkpoint else 0
    fatal = [lost for lost in found.lost if lost.last_sequence > through]
    # Without a checkpoint, all that happened since the beginning is as good.
    has_base = found.checkpoint is not None or found.oldest_sequence == 1
    is_state_whole = has_base and not fatal and found.store_epoch is not None
    end = min([lost.first_sequence - 1 for lost in fatal], default=max(found.last_sequence, through))
    before = max([lost.last_sequence for lost in found.lost if lost.last_sequence <= min(through, end)], default=0)
    if not has_base:
        end = before = 0  # Neither the state at some point nor all that led to it: nothing can be built on that.
    kept = [frame for frame in found.frames if before < frame.first_sequence and frame.last_sequence <= end]
    last_seen = max(found.acknowledged, found.last_sequence)
    lost = [*(each for each in found.lost if each.first_sequence <= end)]
    if end < last_seen:
        lost.append(Lost(end + 1, last_seen, "lost, or after what is lost"))
    _write_anew(folder, found, kept, end, is_state_whole=is_state_whole)
    moved_to = _swap(folder)
    return Recovery(
        lost=tuple(lost),
        kept=(kept[0].first_sequence, kept[-1].last_sequence) if kept else None,
        is_state_whole=is_state_whole,
        moved_to=moved_to,
    )


def _write_anew(folder: Path, found: Examination, kept: list[Frame], end: int, *, is_state_whole: bool) -> None:
    epoch = found.store_epoch if is_state_whole and found.store_epoch else os.urandom(DIGEST_BYTES)
    (folder / _RECOVERED).unlink(missing_ok=True)
    old = connect(folder / DATABASE, may_write=True) if kept else None
    store = JournalStore(folder / _RECOVERED, may_create=True)
    try:
        anchor_sequence, anchor_chain = (kept[0].first_sequence - 1, kept[0].previous) if kept else (end, epoch)
        through = min(found.checkpoint.through_sequence, end) if found.checkpoint else 0
        store.begin_at(
            Checkpoint(through_sequence=through, anchor_sequence=anchor_sequence, anchor_chain=anchor_chain),
            epoch,
            found.first_fencing_token,
        )
        for frame in kept:
            payload = b""
            if frame.payload_digest and old is not None:
                payload = old.execute("SELECT content FROM payload WHERE last_sequence = ?", (frame.last_sequence,)).get
            store.put_frame(frame, payload)
        # What a snapshot knows of lost events stays; later ones will carry their sequences.
        known = [msgspec.structs.replace(each, sequence=min(each.sequence, end)) for each in found.snapshots]
        store.put_snapshots(known)
        _, chain = store.verify()
        store.move_wal(truncate=True)
    finally:
        store.close()
        if old is not None:
            old.config(apsw.SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, 1)
            old.close()
    high_water = HighWater(folder / _RECOVERED_MARK)
    high_water.reset(epoch, end, chain)
    high_water.close()


def _swap(folder: Path) -> Path:
    """Moves the old files into a folder of their own and the new ones into their places."""
    aside = folder / f"damaged-{time.time_ns() // 1_000_000_000}"
    aside.mkdir(mode=0o700, exist_ok=True)
    for name in (DATABASE, f"{DATABASE}-wal", f"{DATABASE}-shm", "high_water"):
        if (folder / name).exists():
            (folder / name).rename(aside / name)
    (folder / _RECOVERED).rename(folder / DATABASE)
    (folder / _RECOVERED_MARK).rename(folder / "high_water")
    return aside
