"""Writes down the state that events have led to, so that the journal can let them go and a restart need not apply them.

Invariants
  1. A checkpoint through a sequence is set only when everything that the events up to there changed is in a snapshot of
     that sequence or a later one, or was forgotten before.
  2. A snapshot goes to the journal behind the events that it counts in.
  3. A submission's snapshot goes to the journal with, or behind, the results that it names.

The loop goes on while a checkpoint is taken. So each piece is of another moment, and its snapshot names that moment.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.domain.ports import SERVICE
from py_scheduler.scheduler.ledger.kept_results import result_size
from py_scheduler.scheduler.ledger.snapshots import result_snapshot, service_snapshot, snapshot_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from py_scheduler.domain.ports import Journal, Snapshot
    from py_scheduler.scheduler.ledger.records import SubmissionRecord
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.log.event_log import EventLog

_TASKS_A_TURN = 1_000
"""Open tasks written down in one turn of the loop, unless one submission has more."""
_BYTES_A_TURN = 4 << 20
"""Of results written down in one turn, unless one has more."""
_RELEASED_BYTES_WORTH_A_CHECKPOINT = 16 << 20
"""Of results that nobody will ask for again; their snapshots are still there."""


def forgotten_among(names: Iterable[str], ledger: LedgerState) -> list[str]:
    """The snapshots that nothing is left of."""
    submissions = ledger.submissions()
    live = {SERVICE, *(submission.submission_id for submission in submissions)}
    live.update(result.task_id for submission in submissions for result in submission.kept.results())
    return [name for name in names if name not in live]


def snapshots_of(submission: SubmissionRecord, ledger: LedgerState, written: Mapping[str, int]) -> Iterator[Snapshot]:
    """Its own behind those of the results that have none yet."""
    for result in submission.kept.results():
        if not written.get(result.task_id):
            yield result_snapshot(result, ledger)
    yield snapshot_of(submission, ledger)


class Checkpoints:
    """Takes a checkpoint whenever that is worth while."""

    def __init__(self, journal: Journal, ledger: LedgerState, event_log: EventLog) -> None:
        self._journal = journal
        self._ledger = ledger
        self._event_log = event_log
        self._written: dict[str, int] = {}
        """By name, the sequence of each snapshot in the journal; 0: it is there and means nothing."""
        self._released_bytes = 0
        """Of results, at the last checkpoint."""

    def start(self, written: dict[str, int]) -> None:
        """Goes on from the snapshots that the journal has already."""
        self._written = dict(written)
        self._released_bytes = self._ledger.results.released_bytes

    async def run(self) -> None:
        while True:
            await self._event_log.wait_news()
            released_bytes = self._ledger.results.released_bytes - self._released_bytes
            if self._journal.wants_checkpoint or released_bytes > _RELEASED_BYTES_WORTH_A_CHECKPOINT:
                await self.take()

    def put_service(self) -> None:
        """Writes down what is of no submission: what counts by rules that have changed."""
        self._put([service_snapshot(self._ledger)])

    async def take(self) -> None:
        """One checkpoint; returns when it is on its way to the journal."""
        ledger = self._ledger
        through_sequence = ledger.last_sequence
        self._released_bytes = ledger.results.released_bytes
        submissions = ledger.submissions()
        forgotten = forgotten_among(self._written, ledger)
        pending: list[Snapshot] = [service_snapshot(ledger)]
        tasks = 0
        # Also those that are forgotten while this goes on: later events may speak of them.
        for submission in submissions:
            if submission.last_sequence <= self._written.get(submission.submission_id, 0):
                continue
            await self._write_results(submission)
            pending.extend(snapshots_of(submission, ledger, self._written))
            tasks += 1 + len(submission.open_tasks)
            if tasks >= _TASKS_A_TURN:
                self._put(pending)
                pending, tasks = [], 0
                await asyncio.sleep(0)
        self._put(pending)
        for name in forgotten:
            del self._written[name]
        self._journal.checkpoint(through_sequence, forgotten)

    async def _write_results(self, submission: SubmissionRecord) -> None:
        """Most of a submission's results, while the loop goes on."""
        pending: list[Snapshot] = []
        size_bytes = 0
        for result in list(submission.kept.results()):
            if self._written.get(result.task_id):
                continue
            pending.append(result_snapshot(result, self._ledger))
            size_bytes += result_size(result)
            if size_bytes >= _BYTES_A_TURN:
                self._put(pending)
                pending, size_bytes = [], 0
                await asyncio.sleep(0)
        self._put(pending)

    def _put(self, snapshots: list[Snapshot]) -> None:
        if snapshots:
            self._event_log.flush()
            self._written |= {snapshot.name: snapshot.sequence for snapshot in snapshots}
            self._journal.put_snapshots(snapshots)
