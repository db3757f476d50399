"""Which frames may go, and when a checkpoint or a discard is worth its price. Figures only: no database here.

Invariants
  1. Frames are expendable from the oldest on: when frame 7 is, frames 1 to 6 are too, and all of them stay so.
  2. A frame may be discarded when it is expendable and the checkpoint covers it; the newest one is expendable by
     acknowledgement alone.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import islice
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from py_scheduler.adapters.sqlite_journal.store import FrameSize

_FRAMES_WORTH_A_DISCARD = 64
_BYTES_WORTH_A_DISCARD = 8 << 20
_BYTES_OF_A_DISCARD = 32 << 20
"""At most in one transaction, so that a commit need not wait for long."""


class JournalLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept for watchers at most, and when the state is written down."""

    retained_events: int = 1_000_000
    """Of all namespaces together."""
    retained_bytes: int = 1 << 30
    """Likewise."""
    retained_seconds: float | None = None
    """None: any age."""
    checkpoint_bytes: int = 64 << 20
    """Of events that a restart would apply one by one, before their outcome is written down instead."""
    wal_bytes: int = 16 << 20
    """Of the write-ahead log, before it is written into the database."""
    ballast_bytes: int = 16 << 20
    """Put aside, and given up on a full disk to be able to discard; 0: none."""


class Retention:
    """Knows the size of every stored frame."""

    def __init__(
        self, limits: JournalLimits, sizes: list[FrameSize], checkpoint_sequence: int, snapshot_bytes: int
    ) -> None:
        self._limits = limits
        self._sizes = list(sizes)
        self._kept_events = sum([size.event_count for size in sizes])
        self._kept_bytes = sum([size.size_bytes for size in sizes])
        self._expendable = 0
        """How many frames from the oldest on are expendable; the kept ones are the others."""
        self._acknowledged = 0
        self.cover(checkpoint_sequence, snapshot_bytes)

    def cover(self, checkpoint_sequence: int, snapshot_bytes: int) -> None:
        """A checkpoint was written, whose snapshots have so many bytes."""
        self._checkpoint_sequence = checkpoint_sequence
        self._snapshot_bytes = snapshot_bytes
        uncovered = [size for size in self._sizes[: self._expendable] if size.last_sequence > checkpoint_sequence]
        self._uncovered_events = sum([size.event_count for size in uncovered])
        self._uncovered_bytes = sum([size.size_bytes for size in uncovered])
        self._replay_bytes = sum([size.event_bytes for size in self._sizes if size.last_sequence > checkpoint_sequence])

    def add(self, size: FrameSize) -> None:
        self._sizes.append(size)
        self._kept_events += size.event_count
        self._kept_bytes += size.size_bytes
        self._replay_bytes += size.event_bytes
        self._expire(size.unix_seconds)

    def acknowledge(self, sequence: int, unix_seconds: float) -> None:
        self._acknowledged = max(self._acknowledged, sequence)
        self._expire(unix_seconds)

    def _expire(self, unix_seconds: float) -> None:
        while self._expendable < len(self._sizes) and self._is_expendable(self._sizes[self._expendable], unix_seconds):
            size = self._sizes[self._expendable]
            self._kept_events -= size.event_count
            self._kept_bytes -= size.size_bytes
            self._expendable += 1
            if size.last_sequence > self._checkpoint_sequence:
                self._uncovered_events += size.event_count
                self._uncovered_bytes += size.size_bytes

    def _is_expendable(self, size: FrameSize, unix_seconds: float) -> bool:
        if size.last_sequence <= self._acknowledged:
            return True
        if size is self._sizes[-1]:
            return False
        limits = self._limits
        return (
            self._kept_events > limits.retained_events
            or self._kept_bytes > limits.retained_bytes
            or (limits.retained_seconds is not None and unix_seconds - size.unix_seconds > limits.retained_seconds)
        )

    @property
    def has_expendable(self) -> bool:
        return self._expendable > 0

    def wants_checkpoint(self, *, is_short_of_room: bool) -> bool:
        """A checkpoint writes what lives, so it waits until as much else has come together."""
        limits = self._limits
        return (
            self._uncovered_events > (0 if is_short_of_room else limits.retained_events // 8)
            or self._uncovered_bytes > max(limits.retained_bytes // 8, self._snapshot_bytes // 2)
            or self._replay_bytes > max(limits.checkpoint_bytes, 2 * self._snapshot_bytes)
        )

    def to_discard(self, *, is_short_of_room: bool) -> int | None:
        """The last sequence of the frames that are to be discarded next, in one transaction; None: not worth it."""
        last, count, size_bytes, more = None, 0, 0, False
        for size in islice(self._sizes, self._expendable):
            if size.last_sequence > self._checkpoint_sequence:
                break
            if size_bytes > _BYTES_OF_A_DISCARD:
                more = True
                break
            last, count, size_bytes = size.last_sequence, count + 1, size_bytes + size.size_bytes
        worth = is_short_of_room or more or count >= _FRAMES_WORTH_A_DISCARD or size_bytes >= _BYTES_WORTH_A_DISCARD
        return last if worth else None

    def discarded(self, last_sequence: int) -> None:
        count = bisect_right(self._sizes, last_sequence, hi=self._expendable, key=lambda size: size.last_sequence)
        del self._sizes[:count]
        self._expendable -= count
