"""Stops tasks before their time: on request, at their deadline, for a collect that waits no longer, at a shutdown.

Invariants
  1. A stop is a fact before it is an act: the ledger ends the attempts that wait, and only then are the running ones
     told to stop.
  2. Each open task with a `task_deadline_seconds` has one timer, also after a restart.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from py_scheduler.domain.events import AbortRequested, StopCause
from py_scheduler.domain.requests import AbortReply, AbortRequest
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import NotFoundError
from py_scheduler.execution.deadlines import Deadlines
from py_scheduler.scheduler.intake import abort_digest
from py_scheduler.scheduler.ledger.commands import StopTasks
from py_scheduler.scheduler.supervisor import EVERYTHING, TaskScope

if TYPE_CHECKING:
    from py_scheduler.domain.ports import Clock
    from py_scheduler.scheduler.ledger.records import SubmissionRecord, TaskRecord
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.queue.admission import Admission
    from py_scheduler.scheduler.supervisor import Supervisor


logger = logging.getLogger(__name__)


class TaskDeadline:
    """When a task ends, whatever it is at."""

    __slots__ = ("_ledger", "seconds", "submission_id", "task_id")

    def __init__(self, ledger: LedgerState, submission_id: str, task_id: str, seconds: float) -> None:
        self._ledger = ledger
        self.submission_id = submission_id
        self.task_id = task_id
        self.seconds = seconds

    @property
    def is_over(self) -> bool:
        return self._ledger.task(self.task_id) is None


class Stops:
    """All ways in which tasks of one scheduler end early."""

    def __init__(
        self, recorder: Recorder, event_log: EventLog, supervisor: Supervisor, admission: Admission, clock: Clock
    ) -> None:
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._event_log = event_log
        self._supervisor = supervisor
        self._admission = admission
        self._clock = clock
        self._task_deadlines: Deadlines[TaskDeadline] = Deadlines(clock, self._on_task_deadline)

    def arm_deadline(self, record: TaskRecord) -> None:
        """Gets each open task that has a `task_deadline_seconds`, once."""
        now, seconds = self._clock.monotonic(), record.task.config.task_deadline_seconds
        assert seconds is not None
        elapsed = self._seconds_since_acceptance(record, now)
        deadline = TaskDeadline(self._ledger, record.submission.submission_id, record.task_id, seconds)
        self._task_deadlines.add(now + seconds - elapsed, deadline)

    def _seconds_since_acceptance(self, record: TaskRecord, now: float) -> float:
        """By the wall clock only if the machine has booted since: that clock may jump, the monotonic one does not."""
        at = record.accepted_at
        if at is not None and at.boot_id and at.boot_id == self._clock.boot_id:
            return now - at.monotonic_seconds
        return max(0.0, self._clock.unix_time() - record.accepted_unix_seconds)

    def clear_deadlines(self) -> None:
        self._task_deadlines.clear()

    def _on_task_deadline(self, deadline: TaskDeadline, _when: float) -> None:
        submission = self._ledger.submission(deadline.submission_id)
        if submission is not None:
            reason = f"task_deadline_seconds ({deadline.seconds:g}) passed"
            self.stop(submission, (deadline.task_id,), StopCause.TASK_DEADLINE, reason)

    async def abort(self, request: AbortRequest) -> AbortReply:
        """See `Engine.abort`."""
        scope, stopped = self._begin_abort(request)
        await self._event_log.wait_committed(self._ledger.last_sequence)
        if request.wait:
            try:
                async with asyncio.timeout(request.timeout_seconds):
                    await self._supervisor.wait_stopped(scope)
            except TimeoutError:
                pass  # No failure: the answer says what is still stopping.
        return AbortReply(aborted_tasks=stopped, still_stopping=self._supervisor.unconfirmed(scope))

    def _begin_abort(self, request: AbortRequest) -> tuple[TaskScope, int]:
        """The tasks that a wait is for, without those that are submitted later; and how many tasks this call stopped,
        or had stopped when it came the first time.
        """
        task_ids = frozenset(request.task_ids)
        digest = abort_digest(request) if request.request_id else b""
        done = self._ledger.requests.repeated(request.selector.namespace, request.request_id, digest)
        if done is not None:
            return TaskScope(done.submission_id, task_ids, done.task_count), done.stopped_tasks
        submission = self._ledger.require(request.selector)
        for task_id in request.task_ids:
            if not submission.has_had(task_id):
                raise NotFoundError(f"submission {submission.submission_id!r} has no task {task_id!r}")
        stopped = self.stop(
            submission,
            request.task_ids,
            StopCause.REQUEST,
            request.reason or "aborted on request",
            keeps_results=request.keep_partial,
            restarts_runners=request.restart_runners,
            request_id=request.request_id,
            request_digest=digest,
        )
        return TaskScope(submission.submission_id, task_ids, submission.next_task_no), len(stopped)

    def stop(
        self,
        submission: SubmissionRecord,
        task_ids: tuple[str, ...],
        cause: StopCause,
        reason: str,
        *,
        keeps_results: bool = False,
        restarts_runners: bool = False,
        request_id: str = "",
        request_digest: bytes = b"",
    ) -> tuple[str, ...]:
        """Ends the attempts that wait, and tells the running ones to stop. Returns the ids of the tasks that it
        stopped.

        task_ids: of this submission; none: all of it.
        """
        reason = safe_text(reason)
        command = StopTasks(
            submission.submission_id,
            task_ids,
            cause,
            reason,
            self._clock.unix_time(),
            keeps_results,
            restarts_runners,
            request_id,
            request_digest,
        )
        asked: tuple[str, ...] = ()
        for event in self._recorder.record(command, submission.key.namespace):
            if type(event) is AbortRequested:
                asked = event.task_ids
        for task_id in asked:
            self._supervisor.stop(task_id, cause, reason, restarts_runners=restarts_runners)
        if asked:
            self._admission.attempts_were_ended((submission.submission_id,))
        return asked

    async def stop_and_wait(
        self,
        submission: SubmissionRecord,
        task_ids: tuple[str, ...],
        reason: str,
        *,
        keeps_results: bool,
        restarts_runners: bool,
    ) -> None:
        """Returns when their work has been seen to stop, or was given up."""
        self.stop(
            submission,
            task_ids,
            StopCause.REQUEST,
            reason,
            keeps_results=keeps_results,
            restarts_runners=restarts_runners,
        )
        await self._supervisor.wait_stopped(TaskScope(submission.submission_id, frozenset(task_ids)))

    async def drain(self, grace_seconds: float, *, ends_what_is_open: bool) -> None:
        """Begins no attempt any more. Returns when nothing runs, or the grace is over and what it stopped has ended."""
        self._supervisor.is_draining = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._supervisor.wait_stopped(EVERYTHING)
        except TimeoutError:
            logger.warning("samples were still running after %g s of draining", grace_seconds)
        if ends_what_is_open:
            for submission in self._ledger.open_submissions():
                self.stop(submission, (), StopCause.SHUTDOWN, "the server is shutting down")
            await self._supervisor.wait_stopped(EVERYTHING)
