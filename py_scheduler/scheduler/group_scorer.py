"""Brings the samples of a whole task to the handler that scores them together, between the last sample and TaskDone.

Invariants
  1. A task that awaits its group's score has exactly one GroupScore here, waiting or under way.
  2. The first word on a group counts, be it the handler's, its timeout's or a stop's: the ledger drops the others.
  3. No placement token is held. Workers are this module's own, as many as samples may run at once: a handler that
     ignores its stop is given up like any other, and is listed until it comes back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from py_scheduler.execution.outcomes import describe
from py_scheduler.execution.play import absorb_cancellation
from py_scheduler.execution.runner import INLINE, RunnerHandle, Runners
from py_scheduler.execution.workers import WorkerPool
from py_scheduler.scheduler.deadlines import Deadlines
from py_scheduler.scheduler.ledger.commands import ScoreGroup

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.results import Reward
    from py_scheduler.execution.workers import Worker
    from py_scheduler.scheduler.ledger.records import TaskRecord
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.settings import EngineSettings

logger = logging.getLogger(__name__)


class GroupScore:
    """One group on its way. Work for a worker.

    worker: who is at it; None while it waits for one. is_stopped: its result is no longer wanted.
    """

    __slots__ = ("_scorer", "is_over", "is_stopped", "is_stranded", "record", "spec", "worker")

    def __init__(self, scorer: GroupScorer, record: TaskRecord, spec: EvaluatorSpec) -> None:
        self._scorer = scorer
        self.record = record
        self.spec = spec
        self.worker: Worker | None = None
        self.is_stopped = False
        self.is_stranded = False
        self.is_over = False

    async def drain(self, _token: PlacementToken | None, worker: Worker) -> None:
        if self.is_over:
            return
        self.worker = worker
        handle = await self._take_handle(worker)
        if handle is None:
            self._scorer.end(self, (), "stopped while it waited for a runner")
            return
        # Not before: that a runner was waited for is no fault of the handler's.
        self._scorer.begin(self)
        samples = sorted(self.record.group_samples or (), key=lambda sample: sample.sample_no)
        try:
            rewards, error = await handle.play_group(worker, self.record.task_id, self.record.task, samples, self.spec)
        finally:
            handle.leave()
        self._scorer.end(self, rewards, error)

    async def _take_handle(self, worker: Worker) -> RunnerHandle | None:
        """None when it was stopped meanwhile: the stop is meant for the group, not for its worker."""
        runners = self._scorer.runners.get(self.spec.evaluator_id, INLINE)
        try:
            return runners.standing_handle or await runners.take_handle(None)
        except asyncio.CancelledError:
            if worker.is_closing or not self.is_stopped:
                raise
            await absorb_cancellation(worker)
            return None


class GroupScorer:
    """All groups that await their score. `on_stopped` is told whenever one is over or given up."""

    def __init__(
        self,
        recorder: Recorder,
        clock: Clock,
        settings: EngineSettings,
        runners: Mapping[str, Runners],
        on_stopped: Callable[[], None],
    ) -> None:
        self.runners = runners
        self._recorder = recorder
        self._clock = clock
        self._stop_grace_seconds = settings.stop_grace_seconds
        self._on_stopped = on_stopped
        self._scores: dict[str, GroupScore] = {}
        self._deadlines: Deadlines[GroupScore] = Deadlines(clock, self._on_deadline)
        self._workers = WorkerPool(settings.max_running_samples, self._on_crash)

    def score(self, record: TaskRecord, spec: EvaluatorSpec) -> None:
        """Takes up a task whose samples are all there."""
        score = self._scores[record.task_id] = GroupScore(self, record, spec)
        if spec.handler.scores_groups:
            self._workers.submit(score, None)
        else:
            # Accepted by a server whose handler scored groups; the one that was started since does not.
            logger.warning("task %s: its handler scores groups no more, its samples keep their own", record.task_id)
            self.end(score, (), "")

    def stop(self, task_id: str) -> None:
        """The ledger has ended the task: its score is no longer wanted."""
        score = self._scores.get(task_id)
        if score is None:
            return
        if score.worker is None:
            self._is_over(score)
        else:
            self._cancel(score, score.worker)

    def open_groups(self) -> list[GroupScore]:
        """Those that wait, are under way, or are stopped and not seen to stop."""
        return list(self._scores.values())

    async def close(self) -> int:
        """Ends the workers; how many did not end within the grace."""
        self._deadlines.clear()
        return await self._workers.close(self._stop_grace_seconds)

    # What scores say

    def begin(self, score: GroupScore) -> None:
        timeout_seconds = score.spec.eval_timeout_seconds
        if timeout_seconds is not None:
            self._deadlines.add(self._clock.monotonic() + timeout_seconds, score)

    def end(self, score: GroupScore, rewards: tuple[Reward, ...], error: str) -> None:
        self._is_over(score)
        if not score.is_stopped:
            self._record(score, rewards, error)

    def _record(self, score: GroupScore, rewards: tuple[Reward, ...], error: str) -> None:
        task_id, threshold = score.record.task_id, score.spec.solve_threshold
        command = ScoreGroup(task_id, rewards, error, threshold, self._clock.unix_time())
        self._recorder.record(command, score.record.submission.key.namespace)

    def _is_over(self, score: GroupScore) -> None:
        score.is_over = True
        self._scores.pop(score.record.task_id, None)
        self._on_stopped()

    def _cancel(self, score: GroupScore, worker: Worker) -> None:
        if not score.is_stopped:
            score.is_stopped = True
            self._deadlines.add(self._clock.monotonic() + self._stop_grace_seconds, score)
            worker.task.cancel()

    def _on_deadline(self, score: GroupScore, _when: float) -> None:
        worker = score.worker
        assert worker is not None, "only what began has a deadline"
        if not score.is_stopped:
            reason = f"eval_timeout_seconds ({score.spec.eval_timeout_seconds:g}) passed in eval_group"
            self._record(score, (), reason)
            self._cancel(score, worker)
        elif worker.kill is not None:
            kill, worker.kill = worker.kill, None
            kill()
            self._deadlines.add(self._clock.monotonic() + self._stop_grace_seconds, score)
        elif not score.is_stranded:
            score.is_stranded = True
            self._workers.abandon(worker)
            self._on_stopped()

    def _on_crash(self, worker: Worker, error: BaseException) -> None:
        for score in self.open_groups():
            if score.worker is worker:
                self.end(score, (), f"eval_group: its worker crashed: {describe(error)}")
