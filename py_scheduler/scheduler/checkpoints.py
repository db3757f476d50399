"""Writes down what became of the events, so that the journal can let them go and a restart need not apply them.

Invariant: a checkpoint through a sequence is set only after each submission that the events up to there speak of was
put into a snapshot of that sequence or a later one, or forgotten before; snapshots go to the journal behind the events
that they count in.

The loop goes on meanwhile: each submission is written as of another moment, which its snapshot names.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.scheduler.snapshots import snapshot_of

if TYPE_CHECKING:
    from py_scheduler.domain.ports import Journal
    from py_scheduler.domain.snapshots import Snapshot
    from py_scheduler.scheduler.event_log import EventLog
    from py_scheduler.scheduler.ledger import Ledger

_TASKS_A_TURN = 1_000
"""Open tasks written down in one turn of the loop, unless one submission has more."""


class Checkpoints:
    """Takes a checkpoint whenever the journal thinks it worth while."""

    def __init__(self, journal: Journal, ledger: Ledger, event_log: EventLog) -> None:
        self._journal = journal
        self._ledger = ledger
        self._event_log = event_log
        self._written: dict[str, int] = {}
        """By submission, the sequence of its snapshot in the journal."""

    def start(self, written: dict[str, int]) -> None:
        """Goes on from the snapshots that the journal has already."""
        self._written = dict(written)

    async def run(self) -> None:
        while True:
            await self._event_log.wait_news()
            if self._journal.wants_checkpoint:
                await self.take()

    async def take(self) -> None:
        """One checkpoint; returns when it is on its way to the journal."""
        ledger = self._ledger
        through_sequence = ledger.last_sequence
        submissions = ledger.submissions()
        forgotten = [submission_id for submission_id in self._written if ledger.submission(submission_id) is None]
        pending: list[Snapshot] = []
        tasks = 0
        # Also those that are forgotten while this goes on: later events may speak of them.
        for submission in submissions:
            if submission.last_sequence <= self._written.get(submission.submission_id, 0):
                continue
            pending.append(snapshot_of(submission, ledger))
            tasks += 1 + len(submission.open_tasks)
            if tasks >= _TASKS_A_TURN:
                self._put(pending)
                pending, tasks = [], 0
                await asyncio.sleep(0)
        self._put(pending)
        for submission_id in forgotten:
            del self._written[submission_id]
        self._journal.checkpoint(through_sequence, forgotten)

    def _put(self, snapshots: list[Snapshot]) -> None:
        if snapshots:
            self._event_log.flush()
            self._written |= {snapshot.submission_id: snapshot.sequence for snapshot in snapshots}
            self._journal.put_snapshots(snapshots)
