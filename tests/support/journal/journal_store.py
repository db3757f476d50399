"""A journal in memory that is to ledgers what a file is to processes: it stays, and gives back what a file would."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.adapters.sqlite_journal.frames import Frame, bare_records_of, draft_of, framed, records_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from py_scheduler.domain.events import EventRecord
    from py_scheduler.domain.ports import Snapshot


class SurvivingJournal(MemoryJournal):
    """Stays when its engine goes: to the next engine it is what a file is to the next process."""

    @property
    def is_durable(self) -> bool:
        return True


class SlowJournal(MemoryJournal):
    """Commits when it is told to."""

    def append(self, records: Sequence[EventRecord]) -> None:
        on_commit, self._on_commit = self._on_commit, None
        super().append(records)
        self._on_commit = on_commit

    def start(self, on_commit: Callable[[int], None], on_failure: Callable[[Exception], None]) -> None:
        super().start(on_commit, on_failure)
        self.fail = on_failure

    def commit(self, through_sequence: int) -> None:
        assert self._on_commit is not None
        self._on_commit(through_sequence)


class Store(MemoryJournal):
    """Keeps snapshots too, and can stop taking anything after so many steps, as a killed process does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Snapshot] = {}
        self.through = 0
        self.steps_left = 1 << 30

    @property
    def is_durable(self) -> bool:
        return True

    def _may(self) -> bool:
        self.steps_left -= 1
        return self.steps_left >= 0

    def snapshots(self) -> Iterable[Snapshot]:
        return list(self.kept.values())

    def replay(self) -> Iterator[Sequence[EventRecord]]:
        """Samples without trajectories, from bytes, as the journal in files has them."""
        for record in self._records[self._dropped :]:
            if record.sequence > self.through:
                yield bare_records_of(_written(record)[0])

    def whole(self) -> Iterator[Sequence[EventRecord]]:
        for record in self._records[self._dropped :]:
            yield records_of(*_written(record))

    def put_snapshots(self, snapshots: Sequence[Snapshot]) -> None:
        if self._may():
            self.kept |= {snapshot.name: snapshot for snapshot in snapshots}

    def checkpoint(self, through_sequence: int, forgotten: Sequence[str]) -> None:
        if self._may():
            self.through = through_sequence
            for name in forgotten:
                self.kept.pop(name, None)


def _written(record: EventRecord) -> tuple[Frame, bytes]:
    """A commit of its own, and its payload."""
    draft = draft_of([record])
    return framed(draft, b"", 0.0), draft.payload
