"""The state at start, from what the journal holds: take the snapshots, apply the events after them, then let what was
under way begin again.

Invariant: a restart makes no fact that the journal does not hold; what was running is interrupted by an event of its
own.
"""

from __future__ import annotations

import gc
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import AttemptEnded
from py_scheduler.scheduler.commands import InterruptAttempt
from py_scheduler.scheduler.intake import Intake, waiting_attempts
from py_scheduler.scheduler.snapshots import submission_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.events import EventRecord
    from py_scheduler.domain.ports import Clock, Journal
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.scheduler.ledger import Ledger
    from py_scheduler.scheduler.recorder import Recorder
    from py_scheduler.scheduler.records import TaskRecord
    from py_scheduler.scheduler.staleness_gate import StalenessGate


class Folded(msgspec.Struct):
    """snapshots: the sequence of each submission's snapshot. bare: by open task, where its samples are that were read
    without their trajectories and are still to be scored as a group.
    """

    snapshots: dict[str, int]
    bare: dict[str, list[int]] = {}


def fold(journal: Journal, ledger: Ledger, gate: StalenessGate | None = None) -> Folded:
    """Brings the ledger to where the journal's last event left it; blocks."""
    snapshots = list(journal.snapshots())
    ledger.adopt([submission_of(snapshot) for snapshot in snapshots])
    folded = Folded({snapshot.submission_id: snapshot.sequence for snapshot in snapshots})
    ledger.is_folding = True
    for records in journal.replay():
        _apply(records, ledger, gate, folded)
    ledger.last_sequence = journal.last_sequence
    ledger.end_fold()
    return folded


def _apply(records: Sequence[EventRecord], ledger: Ledger, gate: StalenessGate | None, folded: Folded) -> None:
    """Events up to a submission's snapshot are in it already."""
    covered = folded.snapshots
    for record in records:
        event = record.event
        if covered and covered.get(event.submission_id, 0) >= record.sequence:
            continue
        if type(event) is AttemptEnded and event.samples:
            task = ledger.open_task(event.task_id)
            if task.group_samples is not None:
                folded.bare.setdefault(event.task_id, []).append(record.sequence)
        # What the ledger numbers itself is what the journal says, also behind events that were skipped.
        ledger.last_sequence = record.sequence - 1
        ledger.apply(event)
        if gate is not None:
            gate.apply(event, record.namespace)


async def complete_groups(journal: Journal, ledger: Ledger, folded: Folded) -> None:
    """Reads the samples again that a handler is still to score, with their trajectories. After `journal.start`."""
    for task_id, sequences in folded.bare.items():
        task = ledger.task(task_id)
        if task is None or task.group_samples is None:
            continue
        whole: dict[int, SampleDone] = {}
        for sequence in sequences:
            for record in await journal.read(sequence - 1, 1):
                if type(record.event) is AttemptEnded:
                    whole |= {sample.sample_no: sample for sample in record.event.samples}
        task.group_samples[:] = [whole.get(sample.sample_no, sample) for sample in task.group_samples]


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """What a restart makes stays: looking for garbage among it again and again takes longer than making it."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def interrupt_running(recorder: Recorder, clock: Clock) -> None:
    """Attempts that were running when the last process ended give way to the next attempt."""
    ledger = recorder.ledger
    for submission in ledger.open_submissions():
        for task_id in list(submission.open_tasks):
            for ref in ledger.running_attempts(task_id):
                recorder.record(InterruptAttempt(ref, clock.unix_time()), submission.key.namespace)


def unscored_groups(ledger: Ledger) -> list[TaskRecord]:
    """Tasks whose samples are all there, and whose handler had not scored them together."""
    return [
        record
        for submission in ledger.open_submissions()
        for record in submission.open_tasks.values()
        if record.awaits_group_score
    ]


def open_batches(
    ledger: Ledger, intake: Intake, queued_at: float
) -> Iterator[tuple[EvaluatorSpec, list[PlannedAttempt]]]:
    """Everything that is to be started, batched anew, submission by submission."""
    for submission in ledger.open_submissions():
        records = list(submission.open_tasks.values())
        yield from waiting_attempts(intake.batch([record.task for record in records]), records, queued_at)
