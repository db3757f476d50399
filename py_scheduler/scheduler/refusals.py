"""Ends what no node that is left can ever hold, with the reason.

Nodes go while a million tasks wait: they are ended in slices of a few milliseconds, and the loop goes on in between.

Invariants
  1. What is still to be refused waits in the ready queue like everything else. A node that comes back in between finds
     it there, and then it is not refused.
  2. One that no node can hold stands in nobody's way in the queue: `Room.fits_ever` is false for it. So what was ended
     is left out of the queue once, when all of it has been ended, or a node came back before that.
  3. What holds room is never refused: it ends as it would have, wherever it runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Final

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.results import AttemptState
from py_scheduler.scheduler.ledger.commands import RefuseAttempt
from py_scheduler.scheduler.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import Clock
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.scheduler.group_scorer import GroupScorer
    from py_scheduler.scheduler.intake import Intake
    from py_scheduler.scheduler.ledger.records import TaskRecord
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.queue.admission import Admission

logger = logging.getLogger(__name__)

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
        self._work: deque[Generator[bool | None, None, None]] = deque()
        """Each looks at what may have to be refused. What has not is passed over."""
        self._refused: dict[str, None] = {}
        """Tasks of which attempts were ended, to be left out of the queue."""
        self._at_work: asyncio.Task[None] | None = None

    def nodes_have_changed(self) -> None:
        """Ends what waits for an evaluator of which the nodes that are left could not hold one sample."""
        self._intake.nodes_have_changed()
        self._work.clear()  # What was still to be looked at is among all that is open.
        self._add(self._refuse_all())

    def requeue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        """Lets attempts wait again, and ends them if there is nothing to wait for."""
        self._admission.requeue(spec, attempts)
        if self._intake.why_never(spec):
            self._add(self._refuse_waiting(self._tasks_of(attempts)))

    def close(self) -> None:
        """Ends nothing any more."""
        self._work.clear()
        if self._at_work is not None:
            self._at_work.cancel()

    def _open_tasks(self) -> Iterator[TaskRecord]:
        for submission in self._ledger.open_submissions():
            yield from list(submission.open_tasks.values())

    def _tasks_of(self, attempts: Sequence[PlannedAttempt]) -> Iterator[TaskRecord]:
        for task_id in dict.fromkeys(attempt.ref.task_id for attempt in attempts):
            if record := self._ledger.task(task_id):
                yield record

    def _add(self, work: Generator[bool | None, None, None]) -> None:
        self._work.append(work)
        if self._at_work is None:
            going_on = in_slices(self._work_off(), self._clock)
            self._at_work = asyncio.get_running_loop().create_task(going_on, name="refusals")

    def _work_off(self) -> Generator[bool | None, None, None]:
        try:
            while self._work or self._refused:
                if not self._work:
                    self._admission.leave_out(self._refused.popitem()[0])
                    yield None
                    continue
                work = self._work[0]
                for is_over in work:
                    yield is_over
                    if not self._work or self._work[0] is not work:
                        break  # Nodes changed again, and all is looked at anew.
                else:
                    self._work.popleft()
        finally:
            # Also after a fault: nobody would hear of it while the task is kept, and nothing would be refused again.
            self._at_work = None
        self._admission.attempts_were_ended()

    def _refuse_all(self) -> Generator[bool | None, None, None]:
        lost: dict[str, str] = {}
        for spec in self._intake.specs.values():
            if reason := self._intake.why_never(spec):
                lost[spec.evaluator_id] = reason
            yield None
        for evaluator_id in lost.keys() - self._warned:
            logger.warning("%s", lost[evaluator_id])
        self._warned = set(lost)
        if lost:
            yield from self._refuse_waiting(self._open_tasks())

    def _refuse_waiting(self, records: Iterable[TaskRecord]) -> Generator[bool | None, None, None]:
        for record in records:
            spec = self._intake.spec_of(record.task)
            for subtask_no, subtask in enumerate(record.subtasks):
                while self._admission.is_calling_leased:  # Until then, what holds room may be queued in the ledger.
                    yield True
                if subtask.state is _QUEUED and (reason := self._intake.why_never(spec)):
                    self._refuse(spec, record, subtask_no, reason)
                    self._refused[record.task_id] = None
                yield None

    def _refuse(self, spec: EvaluatorSpec, record: TaskRecord, subtask_no: int, reason: str) -> None:
        ref = AttemptRef(record.task_id, subtask_no, record.subtasks[subtask_no].attempt_no)
        self._recorder.record(RefuseAttempt(ref, reason, self._clock.unix_time()), record.submission.key.namespace)
        if record.awaits_group_score and self._ledger.task(record.task_id) is not None:
            self._groups.score(record, spec)
