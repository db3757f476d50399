"""In what order a checkpoint is written: cut off anywhere, a restart finds what it needs."""

from __future__ import annotations

import pytest

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.domain.results import AttemptState
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.scheduler.ledger.commands import AcceptTasks
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.log.checkpoints import Checkpoints
from py_scheduler.scheduler.log.event_log import EventLog
from py_scheduler.scheduler.log.recorder import Recorder
from py_scheduler.scheduler.restore import fold
from tests.support.journal.journal_store import Store
from tests.support.journal.ledger_driver import end, start, task


def accept(number: int) -> AcceptTasks:
    return AcceptTasks(f"r{number}", b"d", SubmissionKey(number), (task(),), f"s{number}", 1.0)


@pytest.mark.parametrize("steps", range(3))
async def test_cut_off_after_any_step_a_restart_finds_the_same_state(steps: int) -> None:
    store, ledger = Store(), Ledger(retained_submissions=1)
    log = EventLog(store)
    log.start(0)
    recorder = Recorder(ledger, log)
    checkpoints = Checkpoints(store, recorder, log, LoopClock())
    for number in range(3):
        recorder.record(accept(number), "default")
        recorder.record(start(f"s{number}-0"), "default")
    await checkpoints.take()
    assert store.kept.keys() == {"", "s0", "s1", "s2"}
    for number in range(2):
        recorder.record(end(f"s{number}-0", AttemptState.SUCCEEDED), "default")
    log.flush()
    assert ledger.state.submission("s0") is None, "finished and beyond what is retained"
    store.steps_left = steps
    await checkpoints.take()
    again = Ledger(retained_submissions=1)
    fold(store, again)
    assert again.state.last_sequence == ledger.state.last_sequence
    assert [each.submission_id for each in again.state.submissions()] == ["s1", "s2"]
    assert again.state.open_tasks == ledger.state.open_tasks == 1
    assert again.state.running_attempts("s2-0") == ledger.state.running_attempts("s2-0")
