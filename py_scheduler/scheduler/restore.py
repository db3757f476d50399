"""Makes the state at start from what the journal holds: it takes the snapshots, applies the events after them, and lets
what was under way begin again.

Invariant: a restart makes no fact that the journal does not hold. An attempt that was running ends by an event of its
own.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
from bisect import bisect_right
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import AttemptEnded
from py_scheduler.domain.ports import SERVICE
from py_scheduler.scheduler.ledger.commands import EndStopped, InterruptAttempt
from py_scheduler.scheduler.ledger.snapshots import is_of_result, result_of, service_of, submission_of
from py_scheduler.scheduler.ledger.staleness import StalenessSettings
from py_scheduler.scheduler.queue.admission import waiting_attempts

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from contextlib import AsyncExitStack

    from py_scheduler.domain.collecting import TaskResult
    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.events import EventRecord
    from py_scheduler.domain.ports import Clock, Journal, Snapshot
    from py_scheduler.domain.trajectory import Trajectory
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.scheduler.intake import Intake
    from py_scheduler.scheduler.ledger.ledger import Ledger
    from py_scheduler.scheduler.ledger.records import TaskRecord
    from py_scheduler.scheduler.ledger.service_facts import ServiceFacts
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.log.checkpoints import Checkpoints
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.log.recorder import Recorder

_READ_EVENTS = 512


class FoldResult(msgspec.Struct):
    """What was found on the way."""

    snapshots: dict[str, int] = {}
    """By name, the sequence of each; 0 for one that the state has no use for."""
    bare: dict[str, list[int]] = {}
    """By task, the events whose samples are kept and were read without their trajectories."""
    limits: dict[str, StalenessSettings] = {}
    """The limits of staleness by which the events were counted."""

    def missing(self, ledger: LedgerState) -> list[int]:
        """The events whose trajectories are wanted, in order."""
        kept = {result.task_id for submission in ledger.submissions() for result in submission.kept.results()}
        bare = self.bare.items()
        return sorted(
            itertools.chain.from_iterable(
                sequences for task_id, sequences in bare if task_id in kept or ledger.task(task_id) is not None
            )
        )


class StoredState:
    """What an engine's journal holds: taken and read once, also before the engine starts."""

    def __init__(self, journal: Journal, ledger: Ledger) -> None:
        self._journal = journal
        self._ledger = ledger
        self._is_taken = False
        self.folded: FoldResult | None = None
        """Of what was read."""

    async def open(self, stack: AsyncExitStack) -> None:
        """See `Engine.open_journal`."""
        if self._is_taken:
            return
        self._is_taken = True
        stack.push_async_callback(self._journal.close)
        opening = asyncio.create_task(asyncio.to_thread(self._journal.open))
        try:
            await asyncio.shield(opening)
        finally:
            while not opening.done():  # A thread takes no cancel, and `close` gives back only what it has taken.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([opening])

    def read(self) -> bool:
        """Brings the ledger to where the last process left it, and blocks meanwhile. False: it was read before. After
        `open`. Raises JournalError.
        """
        if self.folded is not None:
            return False
        with collector_at_rest():
            self.folded = fold(self._journal, self._ledger)
        return True


async def restore(
    journal: Journal,
    ledger: Ledger,
    folded: FoldResult,
    recorder: Recorder,
    event_log: EventLog,
    checkpoints: Checkpoints,
    clock: Clock,
) -> None:
    """All that follows `fold`, in order: afterwards all is as it was, nothing runs, and what is new comes behind it."""
    state = ledger.state
    event_log.start(state.last_sequence)
    event_log.acknowledgements.restore(state.submissions(), journal.oldest_sequence)
    checkpoints.start(folded.snapshots)
    await complete(journal, ledger, folded)
    if folded.limits != state.service.limits:
        checkpoints.put_service()
    interrupt_running(recorder, clock)


def fold(journal: Journal, ledger: Ledger) -> FoldResult:
    """Brings the ledger to where the journal's last event left it; blocks."""
    folded = _adopt(journal.snapshots(), ledger)
    ledger.is_folding = True
    for records in journal.replay():
        _apply(records, ledger, folded)
    ledger.skip_to(journal.last_sequence)
    ledger.end_fold()
    return folded


def _adopt(snapshots: Iterable[Snapshot], ledger: Ledger) -> FoldResult:
    folded = FoldResult()
    results: dict[str, TaskResult] = {}
    of_submissions: list[Snapshot] = []
    service: ServiceFacts | None = None
    for snapshot in snapshots:
        folded.snapshots[snapshot.name] = snapshot.sequence
        if snapshot.name == SERVICE:
            service = service_of(snapshot)
            folded.limits = service.limits
        elif is_of_result(snapshot):
            results[snapshot.name] = result_of(snapshot)
        else:
            of_submissions.append(snapshot)
    ledger.adopt([submission_of(snapshot, results) for snapshot in of_submissions], service)
    kept = {result.task_id for submission in ledger.state.submissions() for result in submission.kept.results()}
    # Of a checkpoint that was not finished: the events behind it may still make something else of these tasks.
    folded.snapshots |= dict.fromkeys(results.keys() - kept, 0)
    return folded


def _apply(records: Sequence[EventRecord], ledger: Ledger, folded: FoldResult) -> None:
    """Each event counts once for its submission and once for the service, whose snapshots are of other moments."""
    covered = folded.snapshots
    service_sequence = covered.get(SERVICE, 0)
    for record in records:
        event, sequence = record.event, record.sequence
        if sequence > service_sequence:
            ledger.apply_to_service(event, record.namespace)
        if covered and covered.get(event.submission_id, 0) >= sequence:
            continue
        if type(event) is AttemptEnded and event.samples:
            task = ledger.state.open_task(event.task_id)
            if task.group_samples is not None or task.staged is not None:
                folded.bare.setdefault(event.task_id, []).append(sequence)
        # What the ledger numbers itself is what the journal says, also behind events that were skipped.
        ledger.skip_to(sequence - 1)
        ledger.apply_to_submission(event)


async def complete(journal: Journal, ledger: Ledger, folded: FoldResult) -> None:
    """Reads the samples again that are kept, with their trajectories. After `journal.start`."""
    missing = folded.missing(ledger.state)
    whole = _Trajectories(missing)
    position = 0
    while position < len(missing):
        records = await journal.read(missing[position] - 1, _READ_EVENTS)
        whole.take(records)
        position = bisect_right(missing, records[-1].sequence)
    ledger.complete(whole.by_task)


def complete_from(batches: Iterable[Sequence[EventRecord]], ledger: Ledger, folded: FoldResult) -> None:
    """`complete` from records that have everything."""
    whole = _Trajectories(folded.missing(ledger.state))
    for records in batches:
        whole.take(records)
    ledger.complete(whole.by_task)


class _Trajectories:
    """Of the samples of some events, by task and sample_no."""

    def __init__(self, sequences: Iterable[int]) -> None:
        self._wanted = frozenset(sequences)
        self.by_task: dict[str, dict[int, Trajectory]] = {}

    def take(self, records: Sequence[EventRecord]) -> None:
        for record in records:
            if record.sequence in self._wanted and type(record.event) is AttemptEnded:
                of_task = self.by_task.setdefault(record.event.task_id, {})
                of_task |= {sample.sample_no: sample.trajectory for sample in record.event.samples}


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
    """Attempts that were running when the last process ended give way to the next attempt, unless they were stopped."""
    ledger = recorder.ledger
    for submission in ledger.open_submissions():
        for task_id in list(submission.open_tasks):
            for ref in ledger.running_attempts(task_id):
                recorder.record(InterruptAttempt(ref, clock.unix_time()), submission.key.namespace)
            # The process ended between the stop of a task and the end of what waited of it.
            recorder.record(EndStopped(task_id, clock.unix_time()), submission.key.namespace)


def unscored_groups(ledger: LedgerState) -> list[TaskRecord]:
    """Tasks whose samples are all there, and whose handler had not scored them together."""
    return [
        record
        for submission in ledger.open_submissions()
        for record in submission.open_tasks.values()
        if record.awaits_group_score
    ]


def open_batches(
    ledger: LedgerState, intake: Intake, queued_at: float
) -> Iterator[tuple[EvaluatorSpec, list[PlannedAttempt]]]:
    """Everything that is to be started, batched anew, submission by submission."""
    for submission in ledger.open_submissions():
        records = list(submission.open_tasks.values())
        waiting = waiting_attempts(intake.batch([record.task for record in records]).batches, records, queued_at)
        yield from (batch for batch in waiting if batch is not None)
