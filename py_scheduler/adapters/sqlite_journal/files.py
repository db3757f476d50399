"""The small files beside the database: who holds the store, how far it had got, and room put aside."""

from __future__ import annotations

import fcntl
import os
import struct
import time
import zlib
from typing import TYPE_CHECKING

from py_scheduler.errors import JournalError

if TYPE_CHECKING:
    from pathlib import Path

_MARK = struct.Struct(">4s16sQ16s")
_CRC = struct.Struct(">I")
_MAGIC = b"hwm1"
_SLOT_BYTES = 512
"""A disk writes a sector whole or not at all."""
_SYNC_SECONDS = 1.0

_WAL_HEADER_BYTES = 32
_WAL_FRAME = struct.Struct(">II8s8x")


class StoreLock:
    """One process at a time uses a store; the lock ends with the process, however that ends."""

    def __init__(self, folder: Path) -> None:
        """Raises JournalError when somebody holds it."""
        self._descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = os.pread(self._descriptor, 20, 0).decode("ascii", "replace").strip()
            os.close(self._descriptor)
            raise JournalError(
                f"the state directory {folder} is in use by process {holder or '(unknown)'}: stop that first; a second "
                "server needs another by --state-dir, or --no-journal"
            ) from None
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def close(self) -> None:
        os.close(self._descriptor)


class HighWater:
    """How far the store had got, outside of it: an old or lost write-ahead log is noticed by that.

    It is written after each commit and before anybody hears of the commit. So it never names more than the database
    holds, and it outlives a killed process. It is forced to the disk only now and then: after a power cut it may be too
    low, and a mark that is too low only notices less.
    """

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._writes = 0
        self._synced_at = time.monotonic()

    def read(self) -> tuple[bytes, int, bytes] | None:
        """Store epoch, last sequence and its frame's chain hash; None when nothing legible is there."""
        marks = []
        for slot in range(2):
            said = os.pread(self._descriptor, _MARK.size + _CRC.size, slot * _SLOT_BYTES)
            if len(said) == _MARK.size + _CRC.size and _CRC.pack(zlib.crc32(said[: _MARK.size])) == said[_MARK.size :]:
                magic, epoch, sequence, chain = _MARK.unpack(said[: _MARK.size])
                if magic == _MAGIC:
                    marks.append((sequence, epoch, chain))
        if not marks:
            return None
        sequence, epoch, chain = max(marks)
        return epoch, sequence, chain

    def write(self, epoch: bytes, sequence: int, chain: bytes) -> None:
        """In turn into one of two slots, so that a torn write leaves the other. Raises OSError."""
        said = _MARK.pack(_MAGIC, epoch, sequence, chain)
        os.pwrite(self._descriptor, said + _CRC.pack(zlib.crc32(said)), (self._writes % 2) * _SLOT_BYTES)
        self._writes += 1
        if time.monotonic() - self._synced_at > _SYNC_SECONDS:
            self.sync()

    def reset(self, epoch: bytes, sequence: int, chain: bytes) -> None:
        """Says this and nothing else: the mark of a store that was made anew."""
        os.ftruncate(self._descriptor, 0)
        for _ in range(2):
            self.write(epoch, sequence, chain)
        self.sync()

    def sync(self) -> None:
        os.fdatasync(self._descriptor)
        self._synced_at = time.monotonic()

    def close(self) -> None:
        os.close(self._descriptor)


class Ballast:
    """Room that is given up when a full disk would keep the journal from dropping what nobody needs."""

    def __init__(self, path: Path, size_bytes: int) -> None:
        self._path = path
        self._size_bytes = size_bytes
        self.is_there = not size_bytes or path.exists()

    def lay(self) -> None:
        """Puts the room aside, when there is twice as much."""
        if self.is_there:
            return
        disk = os.statvfs(self._path.parent)
        if disk.f_bavail * disk.f_frsize < 2 * self._size_bytes:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self._size_bytes)
            self.is_there = True
        except OSError:
            self.give_up()
        finally:
            os.close(descriptor)

    def give_up(self) -> None:
        self._path.unlink(missing_ok=True)
        self.is_there = not self._size_bytes


def torn_wal_pages(wal: Path) -> int:
    """Pages at the end of a write-ahead log that belong to a commit which never came about; SQLite ignores them."""
    try:
        log = wal.open("rb")
    except FileNotFoundError:
        return 0
    with log:
        header = log.read(_WAL_HEADER_BYTES)
        if len(header) < _WAL_HEADER_BYTES:
            return 0
        page_bytes, salts = int.from_bytes(header[8:12], "big"), header[16:24]
        torn = 0
        while len(frame := log.read(_WAL_FRAME.size)) == _WAL_FRAME.size:
            _page, size_after_commit, frame_salts = _WAL_FRAME.unpack(frame)
            if frame_salts != salts:
                break
            is_whole = len(log.read(page_bytes)) == page_bytes
            torn = 0 if size_after_commit and is_whole else torn + 1
        return torn + bool(frame and len(frame) < _WAL_FRAME.size)
