"""The results of batches on their way out: waited for, handed out, forgotten; and what became of tasks without one."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.collecting import CollectReply, CollectRequest
from py_scheduler.domain.requests import AbortRequest, SubmissionSelector
from py_scheduler.interfaces.trinity.engine import fresh_id
from py_scheduler.scheduler.ledger.kept_results import leaves_result, why_incomplete

if TYPE_CHECKING:
    from py_scheduler.domain.task import BatchId
    from py_scheduler.interfaces.trinity.engine import TrinityEngine
    from py_scheduler.interfaces.trinity.mirrors import TaskWrapper

logger = logging.getLogger(__name__)

_KEPT_STOPS = 1_000


class TrinityResults:
    """Of one engine. status_class: of what is told of tasks that left no result."""

    def __init__(self, local: TrinityEngine, status_class: type[Any]) -> None:
        self._local = local
        self._status_class = status_class
        self._without_result: dict[BatchId, list[Any]] = {}

    def without_result(self, batch_id: BatchId) -> list[Any]:
        """A status of each task that the last stop in the batch left without a result."""
        return list(self._without_result.get(batch_id, ()))

    async def collect(
        self, batch_id: BatchId, min_num: int | None, seconds: float, *, clear: bool, partial: bool, payloads: bool
    ) -> CollectReply:
        """See `Scheduler.get_payload_results`. Arguments are within their limits."""
        left = seconds
        if batch_id in self._local.held:
            began_at = time.monotonic()
            if not await self._opened_within(seconds):
                if clear:
                    self.let_go(batch_id, f"timeout ({seconds:g} s) passed before the scheduler was started")
                return CollectReply()
            left = max(0.0, seconds - (time.monotonic() - began_at))
        record = self._local.record_of(batch_id)
        if record is None or record.is_over:
            return CollectReply()
        if min_num is not None and min_num > record.kept.scheduled_tasks:
            logger.warning("min_num is %d, batch %s has %d tasks", min_num, batch_id, record.kept.scheduled_tasks)
            min_num = None
        reply = await self._local.collect(
            CollectRequest(
                request_id=fresh_id(),
                batch_id=batch_id,
                min_num=min_num,
                timeout_seconds=left,
                clear_unfinished=clear,
                include_partial=partial,
                with_payloads=payloads,
            )
        )
        if reply.is_timed_out:
            logger.warning("batch %s: %d tasks were not done after %g s", batch_id, len(reply.unfinished), seconds)
        self._note(batch_id, reply)
        return reply

    async def _opened_within(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self._local.opened.wait()
        except TimeoutError:
            return False
        return True

    async def drain(self, batch_id: BatchId) -> CollectReply:
        """What is done of a batch now."""
        if self._local.record_of(batch_id) is None:
            return CollectReply()
        reply = await self._local.collect(
            CollectRequest(request_id=fresh_id(), batch_id=batch_id, timeout_seconds=0.0, clear_unfinished=False)
        )
        self._note(batch_id, reply)
        return reply

    def discard(self, batch_id: BatchId) -> None:
        """Forgets what is done of a batch."""
        self._without_result.pop(batch_id, None)
        if self._local.record_of(batch_id) is not None:
            self._local.engine.results.forget(SubmissionSelector(batch_id=batch_id))
            self._local.forget_drained(batch_id)

    async def abort(self, batch_id: BatchId, *, partial: bool, restart_runners: bool) -> None:
        """Stops what is not done of a batch; returns when it has stopped."""
        self.let_go(batch_id, "aborted before the start")
        record = self._local.record_of(batch_id)
        if record is None:
            return
        open_tasks = self._local.open_tasks(record)
        reason = f"batch {batch_id} was aborted"
        await self._local.engine.abort(
            AbortRequest(
                selector=SubmissionSelector(submission_id=record.submission_id),
                reason=reason,
                wait=True,
                keep_partial=partial,
                restart_runners=restart_runners,
            )
        )
        # What has left a result meanwhile may have been drained by now.
        left = [self._nothing(wrapper, reason) for task, wrapper in open_tasks if not leaves_result(task)]
        self._stopped(batch_id, left)
        self._local.forget_drained(batch_id)

    def let_go(self, batch_id: BatchId, reason: str) -> None:
        """Of what the engine does not have yet."""
        if batch_id in self._local.held:
            self._stopped(batch_id, [self._nothing(held, reason) for held in self._local.held.pop(batch_id)])
            self._local.forget_drained(batch_id)

    def _note(self, batch_id: BatchId, reply: CollectReply) -> None:
        """Takes over into the mirrors what was handed out and what was stopped."""
        wrappers = self._local.wrappers
        for result in reply.results:
            # Unless somebody has discarded the batch since.
            if (wrapper := wrappers.get(result.client_key)) is not None:
                wrapper.show_result(result)
        stopped = [task for task in reply.unfinished if task.is_stopped]
        if stopped:
            statuses = [
                self._status_class(task.succeeded_samples, task.planned_samples, [], task.reason) for task in stopped
            ]
            self._stopped(batch_id, statuses)
        self._local.forget_drained(batch_id)

    def _stopped(self, batch_id: BatchId, statuses: list[Any]) -> None:
        self._without_result.pop(batch_id, None)
        self._without_result[batch_id] = statuses
        if len(self._without_result) > _KEPT_STOPS:
            del self._without_result[next(iter(self._without_result))]

    def _nothing(self, wrapper: TaskWrapper, reason: str) -> Any:
        message = why_incomplete(wrapper.completed_runs, wrapper.total_runs, reason)
        return self._status_class(wrapper.completed_runs, wrapper.total_runs, [], message)
