"""Journals on real files, driven without an engine, and events to put into them."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits
from py_scheduler.domain.events import AttemptEnded, EventRecord, TaskDone, approximate_size
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, TaskState
from py_scheduler.domain.trajectory import Trajectory

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from pathlib import Path

    from py_scheduler.domain.events import JournalledEvent


class OpenJournal:
    """A started journal: appends, and waits until that is committed."""

    def __init__(self, journal: SqliteJournal) -> None:
        self.journal = journal
        self.last_sequence = journal.last_sequence
        self.committed = journal.last_sequence
        self.failures: list[Exception] = []
        self._news = asyncio.Event()
        journal.start(self._on_commit, self._on_failure)

    def _on_commit(self, through_sequence: int) -> None:
        self.committed = through_sequence
        self._tell()

    def _on_failure(self, error: Exception) -> None:
        self.failures.append(error)
        self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    def append(self, *events: JournalledEvent) -> list[EventRecord]:
        records = [
            EventRecord(self.last_sequence + number, "default", event, approximate_size(event))
            for number, event in enumerate(events, 1)
        ]
        self.last_sequence += len(records)
        self.journal.append(records)
        return records

    async def committed_through(self, sequence: int) -> None:
        while self.committed < sequence:
            await self._news.wait()

    async def failed(self) -> Exception:
        while not self.failures:
            await self._news.wait()
        return self.failures[-1]

    async def commit(self, *events: JournalledEvent) -> list[EventRecord]:
        """One frame of these events, acknowledged."""
        records = self.append(*events)
        await self.committed_through(self.last_sequence)
        return records

    async def read_all(self, after_sequence: int = 0) -> list[EventRecord]:
        records: list[EventRecord] = []
        while found := await self.journal.read(after_sequence, 1_000):
            records += found
            after_sequence = found[-1].sequence
        return records


@asynccontextmanager
async def open_journal(
    folder: Path, limits: JournalLimits | None = None, *, at: Callable[[str], None] = lambda _point: None
) -> AsyncIterator[OpenJournal]:
    journal = SqliteJournal(folder, limits or JournalLimits(), at=at)
    journal.open()
    opened = OpenJournal(journal)
    try:
        yield opened
    finally:
        await journal.close()


async def filled(folder: Path, *, commits: int = 5, events: int = 3, tokens: int = 0) -> list[EventRecord]:
    """A closed journal of so many commits, and what it holds."""
    async with open_journal(folder) as opened:
        for _ in range(commits):
            await opened.commit(*[ended(opened.last_sequence + number, tokens) for number in range(1, events + 1)])
        return await opened.read_all()


def done(number: int) -> TaskDone:
    return TaskDone(
        submission_id="s",
        task_id=f"s-{number}",
        client_key="",
        state=TaskState.SUCCEEDED,
        planned_samples=1,
        outcomes={Outcome.SOLVED: 1},
        reason="",
        unix_seconds=float(number),
    )


def ended(number: int, tokens: int = 0) -> AttemptEnded:
    """With one sample of so many tokens."""
    sample = SampleDone(
        task_id=f"s-{number}", sample_no=0, attempt_no=1, outcome=Outcome.SOLVED, trajectory=trajectory_of(tokens)
    )
    return AttemptEnded(
        submission_id="s",
        task_id=f"s-{number}",
        subtask_no=0,
        attempt_no=1,
        state=AttemptState.SUCCEEDED,
        samples=(sample,),
        message="",
        next_attempt_no=0,
        unix_seconds=float(number),
    )


def trajectory_of(tokens: int) -> Trajectory:
    return Trajectory(
        token_id_bytes=bytes(range(256)) * (tokens // 64) + bytes(4 * (tokens % 64)),
        log_prob_bytes=bytes(4 * tokens),
        loss_mask_bytes=b"\x01" * tokens,
    )


def same_events(left: Sequence[EventRecord], right: Sequence[EventRecord]) -> bool:
    """Of the same sequences too."""
    return [(r.sequence, r.namespace, r.event) for r in left] == [(r.sequence, r.namespace, r.event) for r in right]
