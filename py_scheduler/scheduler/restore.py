"""The state at start, from what the journal holds: fold the events, then let what was under way begin again.

Invariant: a restart makes no fact that the journal does not hold; what was running is interrupted by an event of its
own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.scheduler.commands import InterruptAttempt
from py_scheduler.scheduler.intake import Intake, waiting_attempts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import Clock, Journal
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.scheduler.ledger import Ledger
    from py_scheduler.scheduler.recorder import Recorder
    from py_scheduler.scheduler.records import TaskRecord
    from py_scheduler.scheduler.staleness_gate import StalenessGate

_READ_EVENTS = 4_096


async def fold(journal: Journal, ledger: Ledger, gate: StalenessGate | None) -> None:
    """Applies every event that the journal holds."""
    ledger.last_sequence = journal.oldest_sequence - 1
    while records := await journal.read(ledger.last_sequence, _READ_EVENTS):
        for record in records:
            ledger.apply(record.event)
            if gate is not None:
                gate.apply(record.event, record.namespace)


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
