"""Stops tasks before their time: on request, at their deadline, for a collect that waits no longer, at a shutdown.

Invariants
  1. A stop is a fact before it is an act: the ledger ends the attempts that wait, and only then are the running ones
     told to stop.
  2. However many tasks are stopped, the loop goes on meanwhile. First all of them are called stopped: from then on none
     of them begins anything. Then they end, one by one. A restart ends what was called stopped and had not ended.
  3. Each open task with a `task_deadline_seconds` has one timer, also after a restart. Those that were accepted
     together share it.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from py_scheduler.domain.events import AbortRequested, StopCause
from py_scheduler.domain.requests import AbortReply, AbortRequest
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import AlreadyExistsError, NotFoundError, ResourceExhaustedError
from py_scheduler.execution.deadlines import Deadlines
from py_scheduler.scheduler.ledger.commands import EndStopped, StopTasks
from py_scheduler.scheduler.ledger.state import abort_digest
from py_scheduler.scheduler.slices import Backlog, at_once
from py_scheduler.scheduler.supervisor import EVERYTHING, TaskScope

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from py_scheduler.domain.ports import Clock
    from py_scheduler.scheduler.ledger.records import SubmissionRecord, TaskRecord
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.queue.admission import Admission
    from py_scheduler.scheduler.supervisor import Supervisor


logger = logging.getLogger(__name__)

_LAST_COMMIT_SECONDS = 2.0

_AT_ONCE = 64
"""So many tasks are stopped and ended within one turn of the loop, if they have no more SubTasks than that."""
_SUBTASKS_AT_ONCE = 500
"""Of one task, so many are ended before the loop may be given back."""
_TOLD_AT_ONCE = 64
"""So many handlers are told to stop within one turn of the loop: each of them takes some of the next one."""
_NAMED_AT_ONCE = 2_000
"""Tasks that one event names."""


class _Abort(NamedTuple):
    """scope: the tasks that a wait is for, without those that are submitted later. stopped: how many tasks it stopped;
    over when all of them were told.
    """

    digest: bytes
    scope: TaskScope
    stopped: asyncio.Future[int]


class TaskDeadline:
    """When tasks of one submission end, whatever they are at: those that were accepted together share it.

    when: monotonic seconds.
    """

    __slots__ = ("_ledger", "seconds", "submission_id", "task_ids", "when")

    def __init__(self, ledger: LedgerState, submission_id: str, seconds: float, when: float) -> None:
        self._ledger = ledger
        self.submission_id = submission_id
        self.seconds = seconds
        self.when = when
        self.task_ids: list[str] = []

    @property
    def is_over(self) -> bool:
        while self.task_ids and self._ledger.task(self.task_ids[-1]) is None:
            self.task_ids.pop()
        return not self.task_ids


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
        self._armed_last: TaskDeadline | None = None
        self._due: list[TaskDeadline] = []
        """What has come, to be stopped in the next turn."""
        self._backlog = Backlog(clock)
        self._told = 0
        """How many handlers were told to stop."""
        self._under_way: dict[tuple[str, str], _Abort] = {}
        """Aborts that take several slices, by namespace and request id."""

    def arm_deadline(self, record: TaskRecord) -> None:
        """Gets each open task that has a `task_deadline_seconds`, once."""
        seconds = record.task.config.task_deadline_seconds
        assert seconds is not None
        submission_id, when = record.submission.submission_id, self._accepted_at(record) + seconds
        last = self._armed_last
        if last is None or (last.submission_id, last.seconds, last.when) != (submission_id, seconds, when):
            last = self._armed_last = TaskDeadline(self._ledger, submission_id, seconds, when)
            last.task_ids.append(record.task_id)
            self._task_deadlines.add(when, last)
        else:
            last.task_ids.append(record.task_id)

    def _accepted_at(self, record: TaskRecord) -> float:
        """In monotonic seconds. By the wall clock, to the next millisecond, only if the machine has booted since: that
        clock may jump, the monotonic one does not.
        """
        at = record.accepted_at
        if at is not None and at.boot_id and at.boot_id == self._clock.boot_id:
            return at.monotonic_seconds
        elapsed = max(0.0, self._clock.unix_time() - record.accepted_unix_seconds)
        return math.ceil((self._clock.monotonic() - elapsed) * 1_000) / 1_000

    def close(self) -> None:
        """Stops nothing any more."""
        self._task_deadlines.clear()
        self._due.clear()
        self._backlog.close()

    def _on_task_deadline(self, deadline: TaskDeadline, _when: float) -> None:
        if deadline is self._armed_last:
            self._armed_last = None
        if not self._due:
            asyncio.get_running_loop().call_soon(self._stop_due)
        self._due.append(deadline)

    def _stop_due(self) -> None:
        if self._task_deadlines.is_behind:  # What is due together is stopped together.
            asyncio.get_running_loop().call_soon(self._stop_due)
            return
        due, self._due = self._due, []
        _ = self._backlog.add(self._stopping_due(due))

    def _stopping_due(self, due: list[TaskDeadline]) -> Generator[bool | None, None, None]:
        """Stops what is due together, as one: none of it begins because another made room."""
        stopped: list[tuple[SubmissionRecord, StopTasks, list[str]]] = []
        for deadline in due:
            submission = self._ledger.submission(deadline.submission_id)
            if submission is not None:
                reason = f"task_deadline_seconds ({deadline.seconds:g}) passed"
                named, now = tuple(deadline.task_ids), self._clock.unix_time()
                command = StopTasks(deadline.submission_id, named, StopCause.TASK_DEADLINE, reason, now)
                asked = yield from self._stop_many(submission, command, named)
                stopped.append((submission, command, asked))
        self._admission.attempts_were_ended()
        for submission, command, asked in stopped:
            for task_id in asked:
                yield from self._end_stopped(submission, command, task_id)

    async def abort(self, request: AbortRequest) -> AbortReply:
        """See `Engine.abort`."""
        under_way = self._begin_abort(request)
        # What has begun goes on to its end, whether or not the call lives to see it.
        stopped = await asyncio.shield(under_way.stopped)
        await self._event_log.wait_committed(self._ledger.last_sequence)
        if request.wait:
            try:
                async with asyncio.timeout(request.timeout_seconds):
                    await self._supervisor.wait_stopped(under_way.scope)
            except TimeoutError:
                pass  # No failure: the answer says what is still stopping.
        return AbortReply(aborted_tasks=stopped, still_stopping=self._supervisor.unconfirmed(under_way.scope))

    def _begin_abort(self, request: AbortRequest) -> _Abort:
        """The abort of this call, or the one that a call with its request id began before."""
        namespace, task_ids = request.selector.namespace, frozenset(request.task_ids)
        digest = abort_digest(request) if request.request_id else b""
        key = namespace, request.request_id
        under_way = self._under_way.get(key)
        if under_way is not None and under_way.digest == digest:
            return under_way
        done = self._ledger.requests.repeated(namespace, request.request_id, digest)
        if done is not None:
            scope = TaskScope(done.submission_id, task_ids, done.task_count)
            stopped: asyncio.Future[int] = asyncio.get_running_loop().create_future()
            stopped.set_result(done.stopped_tasks)
            return _Abort(digest, scope, stopped)
        if under_way is not None:
            raise AlreadyExistsError(
                f"request_id {request.request_id!r} is another call's, which is under way: send a fresh request_id"
            )
        submission = self._ledger.require(request.selector)
        for task_id in request.task_ids:
            if not submission.has_had(task_id):
                raise NotFoundError(f"submission {submission.submission_id!r} has no task {task_id!r}")
        scope = TaskScope(submission.submission_id, task_ids, submission.next_task_no)
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
        abort = _Abort(digest, scope, stopped)
        if request.request_id and not stopped.done():
            self._under_way[key] = abort
            stopped.add_done_callback(lambda _: self._under_way.pop(key))
        return abort

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
    ) -> asyncio.Future[int]:
        """Ends the attempts that wait, and tells the running ones to stop: few within this call, many in slices. Comes
        to how many tasks it stopped.

        task_ids: of this submission; none: all of it.
        """
        command = StopTasks(
            submission.submission_id,
            task_ids,
            cause,
            safe_text(reason),
            self._clock.unix_time(),
            keeps_results,
            restarts_runners,
            request_id,
            request_digest,
        )
        return self._backlog.add(self._stopping(submission, command))

    def _stopping(self, submission: SubmissionRecord, command: StopTasks) -> Generator[bool | None, None, int]:
        named = command.task_ids or tuple(submission.open_tasks)
        if is_small := len(named) <= _AT_ONCE and self._subtasks_of(named) <= _AT_ONCE:
            asked = [*self._record_stop(submission, command)]
        else:
            asked = yield from self._stop_many(submission, command, named)
        if asked:  # They start no more, and in the queue nobody waits for them from now on.
            self._admission.attempts_were_ended()
        for task_id in asked:
            if is_small:
                at_once(self._end_stopped(submission, command, task_id))
            else:
                yield from self._end_stopped(submission, command, task_id)
        return len(asked)

    def _subtasks_of(self, task_ids: Iterable[str]) -> int:
        return sum([len(task.subtasks) for task_id in task_ids if (task := self._ledger.task(task_id)) is not None])

    def _end_stopped(
        self, submission: SubmissionRecord, command: StopTasks, task_id: str
    ) -> Generator[bool | None, None, None]:
        """Ends what waits of a task that was called stopped, and tells what runs of it."""
        namespace = submission.key.namespace
        ending = EndStopped(task_id, command.unix_seconds, _SUBTASKS_AT_ONCE)
        while len(self._recorder.record(ending, namespace)) >= _SUBTASKS_AT_ONCE:
            yield None
        self._admission.leave_out(task_id)
        restarts = command.restarts_runners
        for _ in self._supervisor.stop(task_id, command.cause, command.reason, restarts_runners=restarts):
            self._told += 1
            if self._told % _TOLD_AT_ONCE == 0:
                yield True
        yield None

    def _stop_many(
        self, submission: SubmissionRecord, command: StopTasks, named: tuple[str, ...]
    ) -> Generator[None, None, list[str]]:
        """The ids of the tasks that were stopped; what waits of them is still to be ended.

        The last of its events has the request id: a process that dies before leaves a call that nobody has answered,
        and that stops the rest when it is sent again.
        """
        asked: list[str] = []
        command = msgspec.structs.replace(command, ends_waiting=False, before_task_no=submission.next_task_no)
        for begin in range(0, len(named), _NAMED_AT_ONCE):
            some = named[begin : begin + _NAMED_AT_ONCE]
            part = msgspec.structs.replace(command, task_ids=some, stopped_earlier=len(asked))
            if begin + len(some) < len(named):
                part = msgspec.structs.replace(part, request_id="", request_digest=b"")
            asked += self._record_stop(submission, part)
            yield
        return asked

    def _record_stop(self, submission: SubmissionRecord, command: StopTasks) -> tuple[str, ...]:
        """The ids of the tasks that it stopped."""
        for event in self._recorder.record(command, submission.key.namespace):
            if type(event) is AbortRequested:
                return event.task_ids
        return ()

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
        stopped = self.stop(
            submission,
            task_ids,
            StopCause.REQUEST,
            reason,
            keeps_results=keeps_results,
            restarts_runners=restarts_runners,
        )
        await asyncio.shield(stopped)
        await self._supervisor.wait_stopped(TaskScope(submission.submission_id, frozenset(task_ids)))

    async def drain(self, grace_seconds: float, *, ends_what_is_open: bool) -> None:
        """Begins no attempt any more. Returns when nothing runs, or the grace is over and what it stopped has ended;
        and when the journal has what happened.
        """
        self._supervisor.is_draining = True
        try:
            async with asyncio.timeout(grace_seconds):
                await self._supervisor.wait_stopped(EVERYTHING)
        except TimeoutError:
            logger.warning("samples were still running after %g s of draining", grace_seconds)
        if ends_what_is_open:
            for submission in self._ledger.open_submissions():
                await asyncio.shield(self.stop(submission, (), StopCause.SHUTDOWN, "the server is shutting down"))
            await self._supervisor.wait_stopped(EVERYTHING)
        try:
            # Streams end with what is committed by then: what happened last is to be in it.
            async with asyncio.timeout(_LAST_COMMIT_SECONDS):
                await self._event_log.wait_committed(self._ledger.last_sequence)
        except (TimeoutError, ResourceExhaustedError):
            logger.warning("the journal did not take the last events: streams end without them")
