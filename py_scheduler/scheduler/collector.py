"""Hands out kept results to whoever collects them.

Invariants
  1. A call is told something only after the journal has it. The same request id is told the same until that is
     acknowledged, also where two calls under it wait at the same time.
  2. A wait ends by itself: when all tasks are done, when enough of them are, or at its timeout. It never raises for
     that.
  3. A call that is given up before it was answered has handed out nothing. Sent again it tells what it had stopped by
     then, and stops nothing else. Only the end of this process forgets that.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

import msgspec

from py_scheduler.domain.collecting import CollectReply, CollectRequest, UnfinishedTask
from py_scheduler.domain.limits import MAX_UNFINISHED_SHOWN, check_collect
from py_scheduler.domain.results import AttemptState
from py_scheduler.errors import AlreadyExistsError, InvalidArgumentError
from py_scheduler.scheduler.ledger.commands import AcknowledgeResults, CollectResults, DiscardResults
from py_scheduler.scheduler.ledger.kept_results import leaves_result, why_incomplete
from py_scheduler.scheduler.ledger.state import discard_digest
from py_scheduler.scheduler.slices import Backlog, in_slices

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Generator, Iterator, Sequence

    from py_scheduler.domain.collecting import TaskResult
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.requests import SubmissionSelector
    from py_scheduler.scheduler.ledger.records import CollectedSet, SubmissionRecord, TaskRecord
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.settings import EngineSettings

logger = logging.getLogger(__name__)

_STEP = 500
"""Results that are looked at before the loop may be given back."""
_KEPT_PARTINGS = 100
"""Of calls that were given up while they stopped tasks: not all are sent again."""


class StopAndWait(Protocol):
    def __call__(
        self,
        submission: SubmissionRecord,
        task_ids: tuple[str, ...],
        reason: str,
        *,
        keeps_results: bool,
        restarts_runners: bool,
    ) -> Awaitable[None]:
        """Stops these tasks; returns when their work has been seen to stop, or was given up."""
        ...


class Collector:
    """One scheduler's kept results. `stop_and_wait` stops what a call does not wait for any longer. `wait_decided`
    returns when the submits that had arrived for a submission are in it.
    """

    def __init__(
        self,
        recorder: Recorder,
        event_log: EventLog,
        clock: Clock,
        settings: EngineSettings,
        stop_and_wait: StopAndWait,
        wait_decided: Callable[[SubmissionSelector | CollectRequest], Awaitable[None]],
    ) -> None:
        self._recorder = recorder
        self._ledger = recorder.ledger
        self._event_log = event_log
        self._clock = clock
        self._wait_after_min_seconds = settings.wait_after_min_seconds
        self._stop_and_wait = stop_and_wait
        self._wait_decided = wait_decided
        self._leftovers: dict[tuple[str, str], _Leftover] = {}
        """By namespace and request id, of calls that stop tasks, until they are answered."""
        self._released = Backlog(clock)

    def close(self) -> None:
        """Frees nothing any more."""
        self._released.close()

    async def collect(self, request: CollectRequest) -> CollectReply:
        """Of tasks that were submitted with `Delivery.COLLECT`: waits as the request says, and hands out what is there
        then. A submission that is unknown: nothing, at once.

        Raises InvalidArgumentError, AlreadyExistsError (a request_id that was used for another submission),
        ResourceExhaustedError.
        """
        if violations := tuple(check_collect(request)):
            raise InvalidArgumentError(violations)
        await self._wait_decided(request)
        submission = self._ledger.find(request)
        if (known := self._known(request, submission)) is not None:
            return await self._answer(known, request)
        if submission is None:
            name = request.submission_id or request.batch_id
            return CollectReply(warnings=(f"no submission is known as {name!r}: there is nothing to collect",))
        warnings = self._clamped(request, submission)
        if (leftover := self._leftover(request, submission)) is None:
            ending = await self._wait(request, submission)
            if (known := self._known(request, submission)) is not None:
                return await self._answer(known, request)
            leftover = self._leftover(request, submission) or self._part(request, submission, ending)
        submission = leftover.submission
        unfinished = await self._stopped(request, leftover)
        if len(unfinished) > MAX_UNFINISHED_SHOWN:
            warnings += (f"{len(unfinished)} tasks are unfinished: {MAX_UNFINISHED_SHOWN} of them are named",)
        named = unfinished[:MAX_UNFINISHED_SHOWN]
        reply = CollectReply(
            submission_id=submission.submission_id,
            unfinished=tuple([_unfinished(task, is_stopped=leftover.is_stop) for task in named]),
            is_timed_out=leftover.ending.is_timeout,
            warnings=warnings,
        )
        self._leftovers.pop((request.namespace, request.request_id), None)
        if (known := self._known(request, submission)) is None:
            known = self._hand_out(request, submission, reply)
        if known is None:
            await self._event_log.wait_committed(self._ledger.last_sequence)
            return reply
        return await self._answer(known, request)

    async def drain(self, request: CollectRequest) -> CollectReply:
        """Hands out what is finished now, and waits for nothing; the rest goes on."""
        now = msgspec.structs.replace(request, timeout_seconds=0.0, clear_unfinished=False, min_num=None)
        return msgspec.structs.replace(await self.collect(now), is_timed_out=False)

    async def acknowledge(self, namespace: str, request_id: str) -> None:
        """What was handed out under this id has arrived, and is kept no longer. An id that is not known (any more) is
        no error.
        """
        command = AcknowledgeResults(namespace, request_id, self._clock.unix_time())
        collected = self._ledger.results.collected(namespace, request_id)
        released = [*collected.results] if collected is not None else []
        del collected
        if self._recorder.record(command, namespace):
            _ = self._released.add(_letting_go(released))
            await self._event_log.wait_committed(self._ledger.last_sequence)

    async def discard(self, selector: SubmissionSelector, request_id: str = "") -> None:
        """Forgets what a submission keeps, and how many tasks it had; under one request_id once. Its open tasks go on.

        Raises NotFoundError, AlreadyExistsError when the request_id is another call's.
        """
        await self._wait_decided(selector)
        digest = discard_digest(selector) if request_id else b""
        is_new = self._ledger.requests.repeated(selector.namespace, request_id, digest) is None
        if not is_new or self._forget(selector, request_id, digest):
            await self._event_log.wait_committed(self._ledger.last_sequence)

    def forget(self, selector: SubmissionSelector) -> None:
        """`discard` within this turn of the loop; the journal hears of it a little later. Raises NotFoundError."""
        self._forget(selector, "", b"")

    # Inside

    def _forget(self, selector: SubmissionSelector, request_id: str, request_digest: bytes) -> bool:
        """Whether there is anything to write down."""
        submission = self._ledger.require(selector)
        command = DiscardResults(submission.submission_id, self._clock.unix_time(), request_id, request_digest)
        released = [*submission.kept.results()]
        if not self._recorder.record(command, submission.key.namespace):
            return False
        _ = self._released.add(_letting_go(released))
        return True

    def _known(self, request: CollectRequest, submission: SubmissionRecord | None) -> CollectedSet | None:
        """What this request id was told already."""
        known = self._ledger.results.collected(request.namespace, request.request_id)
        if known is None:
            return None
        owner = self._ledger.submission(known.submission_id)
        assert owner is not None
        _check_same(request, submission, owner)
        return known

    def _leftover(self, request: CollectRequest, submission: SubmissionRecord) -> _Leftover | None:
        """What this request id is stopping already."""
        leftover = self._leftovers.get((request.namespace, request.request_id))
        if leftover is not None:
            _check_same(request, submission, leftover.submission)
        return leftover

    async def _answer(self, known: CollectedSet, request: CollectRequest) -> CollectReply:
        await self._event_log.wait_committed(self._ledger.last_sequence)
        results = known.results
        if not request.with_payloads:
            results = await in_slices(_without_payloads(results), self._clock)
        return CollectReply(
            submission_id=known.submission_id,
            results=results,
            unfinished=known.unfinished,
            is_timed_out=known.is_timed_out,
            warnings=known.warnings,
        )

    def _clamped(self, request: CollectRequest, submission: SubmissionRecord) -> tuple[str, ...]:
        left = len(submission.kept.collectable) + submission.kept.open_tasks
        if request.min_num is None or request.min_num <= left:
            return ()
        warning = (
            f"min_num is {request.min_num}, of batch_id {submission.key.batch_id!r} are left {left} tasks to collect:"
            f" {left} are waited for"
        )
        logger.warning(warning)
        return (warning,)

    async def _wait(self, request: CollectRequest, submission: SubmissionRecord) -> _Ending:
        """Returns when the call is to be answered."""
        began_at = self._clock.monotonic()
        timeout_at = began_at + request.timeout_seconds
        spare_seconds = request.wait_after_min_seconds
        if spare_seconds is None:
            spare_seconds = self._wait_after_min_seconds
        enough_at: float | None = None
        with self._news(submission.submission_id) as news:
            while True:
                news.clear()
                have, to_come = len(submission.kept.collectable), submission.kept.open_tasks
                if not to_come or self._known(request, submission) is not None:
                    return _Ending("")
                if request.max_num is not None and have >= request.max_num:
                    return _Ending(f"max_num ({request.max_num}) tasks were done")
                now = self._clock.monotonic()
                has_enough = request.min_num is not None and have >= min(request.min_num, have + to_come)
                if has_enough and enough_at is None:
                    enough_at = now
                spare_until = math.inf if enough_at is None else enough_at + spare_seconds
                if now >= spare_until:
                    return _Ending(f"enough tasks were done, and wait_after_min_seconds ({spare_seconds:g}) passed")
                if now >= timeout_at:
                    return _Ending(f"timeout_seconds ({request.timeout_seconds:g}) passed", is_timeout=True)
                await self._until(min(spare_until, timeout_at), news)

    async def _until(self, when: float, news: asyncio.Event) -> None:
        timer = None if math.isinf(when) else self._clock.call_at(when, news.set)
        try:
            await news.wait()
        finally:
            if timer is not None:
                timer.cancel()

    @contextmanager
    def _news(self, submission_id: str) -> Iterator[asyncio.Event]:
        """Set whenever the submission's tasks or results become more or fewer."""
        news = asyncio.Event()
        listeners = self._recorder.listeners
        listeners.setdefault(submission_id, []).append(news.set)
        try:
            yield news
        finally:
            listeners[submission_id].remove(news.set)
            if not listeners[submission_id]:
                del listeners[submission_id]

    def _part(self, request: CollectRequest, submission: SubmissionRecord, ending: _Ending) -> _Leftover:
        """With what is not finished."""
        tasks = tuple([task for task in submission.open_tasks.values() if task.staged is not None])
        leftover = _Leftover(submission, tasks, request.clear_unfinished and bool(tasks), ending)
        if leftover.is_stop:
            self._leftovers[request.namespace, request.request_id] = leftover
            if len(self._leftovers) > _KEPT_PARTINGS:
                del self._leftovers[next(iter(self._leftovers))]
        return leftover

    async def _stopped(self, request: CollectRequest, leftover: _Leftover) -> list[TaskRecord]:
        """Stops what is to be stopped; the tasks that leave no result."""
        submission = leftover.submission
        if leftover.is_stop:
            await self._stop_and_wait(
                submission,
                tuple([task.task_id for task in leftover.tasks]),
                leftover.ending.reason,
                keeps_results=request.include_partial,
                restarts_runners=leftover.ending.is_timeout,
            )
        # What has left a result meanwhile may have been taken by another call.
        return [task for task in leftover.tasks if task.task_id in submission.open_tasks or not leaves_result(task)]

    def _hand_out(
        self, request: CollectRequest, submission: SubmissionRecord, reply: CollectReply
    ) -> CollectedSet | None:
        command = CollectResults(
            submission.submission_id,
            request.request_id,
            request.max_num,
            reply.unfinished,
            reply.warnings,
            self._clock.unix_time(),
            reply.is_timed_out,
        )
        self._recorder.record(command, request.namespace)
        return self._ledger.results.collected(request.namespace, request.request_id)


class _Ending(msgspec.Struct, frozen=True):
    """Why a wait was over. reason: empty when nothing was left to wait for."""

    reason: str
    is_timeout: bool = False


class _Leftover(msgspec.Struct, frozen=True):
    """The tasks that a call does not wait for any longer, and why. is_stop: whether they are stopped."""

    submission: SubmissionRecord
    tasks: tuple[TaskRecord, ...]
    is_stop: bool
    ending: _Ending


def _check_same(request: CollectRequest, submission: SubmissionRecord | None, owner: SubmissionRecord) -> None:
    """Whether a request means the submission that its id collected before.

    A drained batch_id may have been used again before a call was repeated: it means the one that it had meant.
    """
    is_same = request.batch_id == owner.key.batch_id if request.batch_id is not None else owner is submission
    if not is_same:
        raise AlreadyExistsError(
            f"request_id {request.request_id!r} collected another submission: send a fresh request_id"
        )


def _without_payloads(results: Sequence[TaskResult]) -> Generator[None, None, tuple[TaskResult, ...]]:
    bare: list[TaskResult] = []
    for begin in range(0, len(results), _STEP):
        some = results[begin : begin + _STEP]
        bare += [msgspec.structs.replace(result, samples=(), payloads=()) for result in some]
        yield
    return tuple(bare)


def _letting_go(results: list[TaskResult]) -> Generator[None, None, None]:
    """Nothing else has them any more, and to free 100 000 results takes long."""
    while results:
        del results[-_STEP:]
        yield


def _unfinished(task: TaskRecord, *, is_stopped: bool) -> UnfinishedTask:
    total = task.task.config.repeat_times
    return UnfinishedTask(
        task_id=task.task_id,
        client_key=task.task.client_key,
        succeeded_samples=task.succeeded_samples,
        planned_samples=total,
        is_stopped=is_stopped,
        reason=why_incomplete(task.succeeded_samples, total, task.reason or _where_it_stands(task)),
    )


def _where_it_stands(task: TaskRecord) -> str:
    if task.awaits_group_score:
        return "Its samples are being scored together."
    running = sum([subtask.state is AttemptState.RUNNING for subtask in task.subtasks])
    return f"{running} of {task.open_subtasks} unfinished sub-tasks are running."
