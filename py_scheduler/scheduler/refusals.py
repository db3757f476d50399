"""Ends what no node that is left can ever hold, with the reason.

Nodes go while a million tasks wait: they are ended in slices of a few milliseconds, and the loop goes on in between.

Invariants
  1. What is still to be refused waits in the ready queue like everything else. A node that comes back in between finds
     it there, and then it is not refused.
  2. One that no node can hold stands in nobody's way in the queue: `Room.fits_ever` is false for it. So what was ended
     is left out of the queue once, when all of it has been ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Final

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.results import AttemptState
from py_scheduler.scheduler.ledger.commands import RefuseAttempt

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import Clock
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.scheduler.group_scorer import GroupScorer
    from py_scheduler.scheduler.intake import Intake
    from py_scheduler.scheduler.ledger.records import TaskRecord
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.queue.admission import Admission

logger = logging.getLogger(__name__)

_TURN_SECONDS = 0.005
# By name: Python 3.11 looks a member up through the metaclass, five times slower.
_QUEUED: Final = AttemptState.QUEUED


class Refusals:
    """`intake` says what can never be held. Groups of which a refusal ended the last sample are scored by `groups`."""

    def __init__(
        self, intake: Intake, recorder: Recorder, admission: Admission, groups: GroupScorer, clock: Clock
    ) -> None:
        self._intake = intake
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._admission = admission
        self._groups = groups
        self._clock = clock
        self._warned: set[str] = set()
        """Evaluators that no node can hold, as the log says already."""
        self._found: deque[Iterator[tuple[TaskRecord, int]]] = deque()
        """SubTasks that may have something to refuse. What has nothing is passed over."""
        self._next_slice: asyncio.Handle | None = None

    def nodes_have_changed(self) -> None:
        """Ends what waits for an evaluator of which the nodes that are left could not hold one sample."""
        lost = {spec.evaluator_id: reason for spec in self._intake.specs.values() if (reason := self._reason(spec))}
        for evaluator_id in lost.keys() - self._warned:
            logger.warning("%s", lost[evaluator_id])
        self._warned = set(lost)
        if lost:
            self._found.clear()  # The tasks that were still to be looked at are among all of them.
            self._add(self._open_tasks())

    def requeue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        """Lets attempts wait again, and ends them if there is nothing to wait for."""
        self._admission.requeue(spec, attempts)
        if self._reason(spec):
            self._add(self._tasks_of(attempts))

    def close(self) -> None:
        """Ends nothing any more."""
        self._found.clear()
        if self._next_slice is not None:
            self._next_slice.cancel()

    def _reason(self, spec: EvaluatorSpec) -> str:
        return self._intake.why_never(spec)

    def _open_tasks(self) -> Iterator[TaskRecord]:
        for submission in self._ledger.open_submissions():
            yield from list(submission.open_tasks.values())

    def _tasks_of(self, attempts: Sequence[PlannedAttempt]) -> Iterator[TaskRecord]:
        for task_id in dict.fromkeys(attempt.ref.task_id for attempt in attempts):
            if record := self._ledger.task(task_id):
                yield record

    def _add(self, records: Iterable[TaskRecord]) -> None:
        self._found.append(_subtasks_of(records))
        if self._next_slice is None:
            self._next_slice = asyncio.get_running_loop().call_soon(self._refuse_some)

    def _refuse_some(self) -> None:
        """One slice; the next follows behind whatever else the loop has to do."""
        turn_ends = time.monotonic() + _TURN_SECONDS
        reasons = {spec.evaluator_id: self._reason(spec) for spec in self._intake.specs.values()}
        while self._found:
            for record, subtask_no in self._found[0]:
                if record.subtasks[subtask_no].state is _QUEUED:
                    spec = self._intake.spec_of(record.task)
                    if reason := reasons[spec.evaluator_id]:
                        self._refuse(spec, record, subtask_no, reason)
                if time.monotonic() >= turn_ends:
                    self._next_slice = asyncio.get_running_loop().call_soon(self._refuse_some)
                    return
            self._found.popleft()
        self._next_slice = None
        self._admission.attempts_were_ended(())

    def _refuse(self, spec: EvaluatorSpec, record: TaskRecord, subtask_no: int, reason: str) -> None:
        ref = AttemptRef(record.task_id, subtask_no, record.subtasks[subtask_no].attempt_no)
        self._recorder.record(RefuseAttempt(ref, reason, self._clock.unix_time()), record.submission.key.namespace)
        if record.awaits_group_score and self._ledger.task(record.task_id) is not None:
            self._groups.score(record, spec)


def _subtasks_of(records: Iterable[TaskRecord]) -> Iterator[tuple[TaskRecord, int]]:
    return ((record, subtask_no) for record in records for subtask_no in range(len(record.subtasks)))
