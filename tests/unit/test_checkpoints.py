"""In what order a checkpoint is written: cut off anywhere, a restart finds what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.domain.events import EventRecord
from py_scheduler.domain.results import AttemptState
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.scheduler.checkpoints import Checkpoints
from py_scheduler.scheduler.commands import AcceptTasks
from py_scheduler.scheduler.event_log import EventLog
from py_scheduler.scheduler.ledger import Ledger
from py_scheduler.scheduler.recorder import Recorder
from py_scheduler.scheduler.restore import fold
from tests.support.ledger_driver import end, start, task

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from py_scheduler.domain.snapshots import Snapshot


class Store(MemoryJournal):
    """Keeps snapshots too, and can stop taking anything after so many steps, as a killed process does."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Snapshot] = {}
        self.through = 0
        self.steps_left = 1 << 30

    def _may(self) -> bool:
        self.steps_left -= 1
        return self.steps_left >= 0

    def snapshots(self) -> Iterable[Snapshot]:
        return self.kept.values()

    def replay(self) -> Iterable[Sequence[EventRecord]]:
        yield [record for record in self._records if record.sequence > self.through]

    def put_snapshots(self, snapshots: Sequence[Snapshot]) -> None:
        if self._may():
            self.kept |= {snapshot.submission_id: snapshot for snapshot in snapshots}

    def checkpoint(self, through_sequence: int, forgotten: Sequence[str]) -> None:
        if self._may():
            self.through = through_sequence
            for submission_id in forgotten:
                self.kept.pop(submission_id, None)


def accept(number: int) -> AcceptTasks:
    return AcceptTasks(f"r{number}", b"d", SubmissionKey(number), (task(),), f"s{number}", 1.0)


@pytest.mark.parametrize("steps", range(3))
async def test_cut_off_after_any_step_a_restart_finds_the_same_state(steps: int) -> None:
    store, ledger = Store(), Ledger(retained_submissions=1)
    log = EventLog(store)
    log.start(0)
    recorder, checkpoints = Recorder(ledger, log), Checkpoints(store, ledger, log)
    for number in range(3):
        recorder.record(accept(number), "default")
        recorder.record(start(f"s{number}-0"), "default")
    await checkpoints.take()
    assert store.kept.keys() == {"s0", "s1", "s2"}
    for number in range(2):
        recorder.record(end(f"s{number}-0", AttemptState.SUCCEEDED), "default")
    log.flush()
    assert ledger.submission("s0") is None, "finished and beyond what is retained"
    store.steps_left = steps
    await checkpoints.take()
    again = Ledger(retained_submissions=1)
    fold(store, again)
    assert again.last_sequence == ledger.last_sequence
    assert [each.submission_id for each in again.submissions()] == ["s1", "s2"]
    assert again.open_tasks == ledger.open_tasks == 1
    assert again.running_attempts("s2-0") == ledger.running_attempts("s2-0")
