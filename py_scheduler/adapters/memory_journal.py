"""A journal that lives as long as the process: what was acknowledged does not survive a crash.

Invariants: `_records` are consecutive sequences; the oldest are dropped when either limit is passed, so memory is
bounded.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from py_scheduler.domain.events import EventRecord
    from py_scheduler.domain.ports import Snapshot

_DROPPED: Final = cast("EventRecord", None)
"""In place of a record that no longer counts, so that it is freed: all of them at the same moment would take long."""
_DISCARDED_AT_ONCE = 10_000


_KEPT_DROPPED = 16
"""One record in so many may have been dropped: what is cut off one by one would move all others each time."""


class MemoryJournal:
    """Implements `domain.ports.Journal`; commits at once."""

    def __init__(
        self,
        *,
        retained_events: int = 1_000_000,
        retained_bytes: int = 1 << 30,
        unix_time: Callable[[], float] = time.time,
    ) -> None:
        """unix_time: what fencing tokens begin at, so that those of a later process are higher."""
        self._unix_time = unix_time
        self._store_epoch = os.urandom(16)
        self._retained_events = retained_events
        self._retained_bytes = retained_bytes
        self._records: list[EventRecord] = []
        self._dropped = 0
        """Records at the head of `_records` that no longer count; they are cut off together."""
        self._discarded_through = 0
        """Up to where nobody wants them; some are still there."""
        self._discarding: asyncio.Handle | None = None
        self._bytes = 0
        self._on_commit: Callable[[int], None] | None = None

    def open(self) -> None:
        pass

    @property
    def store_epoch(self) -> bytes:
        return self._store_epoch

    @property
    def is_durable(self) -> bool:
        return False

    @property
    def oldest_sequence(self) -> int:
        return self._records[self._dropped].sequence if self._records else 1

    @property
    def last_sequence(self) -> int:
        return self._records[-1].sequence if self._records else 0

    @property
    def first_fencing_token(self) -> int:
        return int(self._unix_time() * 1_000_000)

    def snapshots(self) -> Iterable[Snapshot]:
        return ()

    def replay(self) -> Iterable[Sequence[EventRecord]]:
        yield self._records[self._dropped :]

    def start(self, on_commit: Callable[[int], None], on_failure: Callable[[Exception], None]) -> None:
        del on_failure  # Memory that runs out is no failure of a journal.
        self._on_commit = on_commit

    def append(self, records: Sequence[EventRecord]) -> None:
        self._records.extend(records)
        self._bytes += sum([record.size for record in records])
        self._drop_oldest()
        if self._on_commit is not None:
            self._on_commit(records[-1].sequence)

    async def read(self, after_sequence: int, limit: int) -> list[EventRecord]:
        start = max(after_sequence + 1 - self.oldest_sequence, 0) + self._dropped
        return self._records[start : start + limit]

    def discard_through(self, sequence: int) -> None:
        """Many are dropped in several turns of the loop."""
        self._discarded_through = max(self._discarded_through, sequence)
        if self._discarding is None:
            self._discard()

    def _discard(self) -> None:
        self._discarding = None
        for _ in range(_DISCARDED_AT_ONCE):
            if len(self._records) - self._dropped <= 1 or self.oldest_sequence > self._discarded_through:
                return
            self._drop()
        self._discarding = asyncio.get_running_loop().call_soon(self._discard)

    @property
    def wants_checkpoint(self) -> bool:
        return False

    def put_snapshots(self, snapshots: Sequence[Snapshot]) -> None:
        pass

    def checkpoint(self, through_sequence: int, forgotten: Sequence[str]) -> None:
        pass

    async def close(self) -> None:
        self._on_commit = None
        if self._discarding is not None:
            self._discarding.cancel()
            self._discarding = None

    def _drop_oldest(self) -> None:
        records = self._records
        while len(records) - self._dropped > 1 and (
            self._bytes > self._retained_bytes or len(records) - self._dropped > self._retained_events
        ):
            self._drop()

    def _drop(self) -> None:
        self._bytes -= self._records[self._dropped].size
        self._records[self._dropped] = _DROPPED
        self._dropped += 1
        if self._dropped > len(self._records) // _KEPT_DROPPED:
            del self._records[: self._dropped]
            self._dropped = 0
