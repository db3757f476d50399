"""Writes down the state that events have led to, so that the journal can let them go and a restart need not apply them.

Invariants
  1. A checkpoint through a sequence is set only when everything that the events up to there changed is in a snapshot of
     that sequence or a later one, or was forgotten before.
  2. A snapshot goes to the journal behind the events that it counts in.
  3. A submission's snapshot goes to the journal with, or behind, the results that it names.
  4. A result is called forgotten before any submission's snapshot of that checkpoint is made, so none of them names it.

The loop goes on while a checkpoint is taken. So each piece is of another moment, and its snapshot names that moment. A
submission of 100 000 tasks is one piece: it is written down in slices, and what changes of it meanwhile once more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.events import Event, TaskDone
from py_scheduler.domain.ports import SERVICE
from py_scheduler.scheduler.ledger.kept_results import result_size
from py_scheduler.scheduler.ledger.snapshots import SubmissionDraft, result_snapshot, service_snapshot, snapshot_of
from py_scheduler.scheduler.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping

    from py_scheduler.domain.collecting import TaskResult
    from py_scheduler.domain.ports import Clock, Journal, Snapshot
    from py_scheduler.scheduler.ledger.records import SubmissionRecord
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.log.recorder import Recorder

_AT_ONCE = 1_000
"""Open tasks and results that are written down in one turn of the loop."""
_BYTES_AT_ONCE = 4 << 20
"""Of results written down in one turn, unless one has more."""
_RELEASED_BYTES_WORTH_A_CHECKPOINT = 16 << 20
"""Of results that nobody will ask for again; their snapshots are still there."""


def forgotten_among(names: Iterable[str], ledger: LedgerState) -> Generator[None, None, list[str]]:
    """The snapshots that nothing is left of; in slices. What ends meanwhile may not be among them."""
    live = {SERVICE}
    for submission in ledger.submissions():
        live.add(submission.submission_id)
        if not submission.kept.size:
            continue
        # All at the same moment: what is collected meanwhile goes from one to another.
        kept, handed_out = list(submission.kept.collectable), list(submission.kept.unacknowledged.values())
        for begin in range(0, len(kept), _AT_ONCE):
            live.update(kept[begin : begin + _AT_ONCE])
            yield
        for collected in handed_out:
            for begin in range(0, len(collected.results), _AT_ONCE):
                live.update([result.task_id for result in collected.results[begin : begin + _AT_ONCE]])
                yield
    forgotten: list[str] = []
    names = list(names)
    for begin in range(0, len(names), _AT_ONCE):
        forgotten += [name for name in names[begin : begin + _AT_ONCE] if name not in live]
        yield
    return forgotten


def snapshots_of(submission: SubmissionRecord, ledger: LedgerState, written: Mapping[str, int]) -> Iterator[Snapshot]:
    """Its own behind those of the results that have none yet."""
    for result in submission.kept.results():
        if not written.get(result.task_id):
            yield result_snapshot(result, ledger)
    yield snapshot_of(submission, ledger)


class Checkpoints:
    """Takes a checkpoint whenever that is worth while."""

    def __init__(self, journal: Journal, recorder: Recorder, event_log: EventLog, clock: Clock) -> None:
        self._journal = journal
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._event_log = event_log
        self._clock = clock
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
        await in_slices(self._taking(), self._clock)

    def _taking(self) -> Generator[bool | None, None, None]:
        ledger = self._ledger
        through_sequence = ledger.last_sequence
        self._released_bytes = ledger.results.released_bytes
        submissions = ledger.submissions()
        forgotten = yield from forgotten_among(list(self._written), ledger)
        pending: list[Snapshot] = [service_snapshot(ledger)]
        size = 0
        # Also those that are forgotten while this goes on: later events may speak of them.
        for submission in submissions:
            if submission.last_sequence <= self._written.get(submission.submission_id, 0):
                continue
            its_size = len(submission.open_tasks) + submission.kept.count
            if its_size > _AT_ONCE or submission.kept.size > _BYTES_AT_ONCE:
                self._put(pending)
                pending = yield from self._large(submission)
            else:
                pending.extend(snapshots_of(submission, ledger, self._written))
            size += 1 + its_size
            if size >= _AT_ONCE:
                self._put(pending)
                pending, size = [], 0
                yield True
        self._put(pending)
        self._journal.checkpoint(through_sequence, forgotten)
        for number, name in enumerate(forgotten):
            del self._written[name]
            if number % _AT_ONCE == 0:
                yield False

    def _large(self, submission: SubmissionRecord) -> Generator[bool | None, None, list[Snapshot]]:
        """The snapshot of a submission, and of the last results that it names; the others are on their way."""
        draft = SubmissionDraft(submission)
        new: list[TaskResult] = []

        def follow(event: Event, _namespace: str) -> None:
            draft.apply(event)
            if type(event) is TaskDone and (result := submission.kept.collectable.get(event.task_id)) is not None:
                new.append(result)

        self._recorder.event_listeners.append(follow)
        try:
            yield from self._write_results(list(submission.kept.results()))
            yield from draft.write()
            while draft.tasks_left + len(new) > _AT_ONCE or sum(map(result_size, new)) > _BYTES_AT_ONCE:
                yield from draft.write()
                some, new[:] = new[:], []
                yield from self._write_results(some)
        finally:
            self._recorder.event_listeners.remove(follow)
        return [*(result_snapshot(result, self._ledger) for result in new), draft.finish(self._ledger)]

    def _write_results(self, results: list[TaskResult]) -> Generator[bool | None, None, None]:
        """Those that have no snapshot yet."""
        pending: list[Snapshot] = []
        size_bytes = 0
        for number, result in enumerate(results):
            if not self._written.get(result.task_id):
                pending.append(result_snapshot(result, self._ledger))
                size_bytes += result_size(result)
            if size_bytes >= _BYTES_AT_ONCE or len(pending) >= _AT_ONCE:
                self._put(pending)
                pending, size_bytes = [], 0
                yield True
            elif number % _AT_ONCE == 0:
                yield False
        self._put(pending)

    def _put(self, snapshots: list[Snapshot]) -> None:
        if snapshots:
            self._event_log.flush()
            self._written |= {snapshot.name: snapshot.sequence for snapshot in snapshots}
            self._journal.put_snapshots(snapshots)
