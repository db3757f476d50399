"""Brings the samples of a whole task to the handler that scores them together, between the last sample and TaskDone.

Invariants
  1. A task that awaits its group's score has exactly one GroupScore here, waiting or under way.
  2. The first word on a group counts, whether it is the handler's, its timeout's or a stop's: the ledger drops the
     others.
  3. A group score holds no placement token. Its workers are this module's own, as many as samples may run at once. A
     stop goes down the same ladder as an attempt's (`execution/stopping.py`); a group score that the ladder strands is
     listed until its handler comes back.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, assert_never

from py_scheduler.domain.events import StopCause
from py_scheduler.execution.attempt import RunningGroup
from py_scheduler.execution.outcomes import describe
from py_scheduler.execution.run_sample import INLINE
from py_scheduler.execution.runner import RunnerHandle, Runners
from py_scheduler.execution.stopping import StopLadder, StopState
from py_scheduler.execution.workers import WorkerPool
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


class GroupScore(RunningGroup):
    """One group on its way. Work for a worker. worker: the one that is at it; None while it waits."""

    __slots__ = ("_scorer", "record", "spec", "worker")

    def __init__(self, scorer: GroupScorer, record: TaskRecord, spec: EvaluatorSpec) -> None:
        samples = sorted(record.group_samples or (), key=lambda sample: sample.sample_no)
        super().__init__(record.task_id, record.task, samples)
        self._scorer = scorer
        self.record = record
        self.spec = spec
        self.worker: Worker | None = None

    async def drain(self, _token: PlacementToken | None, worker: Worker) -> None:
        if self.is_over:
            return
        self.worker, self.worker_task, worker.running = worker, worker.task, self
        handle = await self._take_handle(worker)
        if handle is None:
            self._scorer.end(self, (), "stopped while it waited for a runner")
            return
        # Not before: the wait for a runner is no fault of the handler's.
        self._scorer.begin(self)
        try:
            rewards, error = await handle.score_group(self, worker, self.spec)
        finally:
            handle.leave()
        self._scorer.end(self, rewards, error)

    async def _take_handle(self, worker: Worker) -> RunnerHandle | None:
        """None when a stop came meanwhile: it ends the group's score, not the worker."""
        runners = self._scorer.runners.get(self.spec.evaluator_id, INLINE)
        try:
            return runners.standing_handle or await runners.take_handle(None)
        except asyncio.CancelledError:
            if worker.is_closing or self.stop_cause is None:
                raise
            await worker.absorb_cancellation()
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
        self._ladder: StopLadder[GroupScore] = StopLadder(
            clock, settings.stop_grace_seconds, self._on_limit, self._give_up
        )
        self._workers = WorkerPool(settings.max_running_samples, self._on_crash, clock)

    def score(self, record: TaskRecord, spec: EvaluatorSpec) -> None:
        """Takes up a task whose samples are all there."""
        score = self._scores[record.task_id] = GroupScore(self, record, spec)
        if spec.handler.scores_groups:
            self._workers.submit(score, None)
        else:
            # The server that accepted it had a handler that scored groups; this server's handler does not.
            logger.warning("task %s: its handler scores groups no more, its samples keep their own", record.task_id)
            self.end(score, (), "")

    def stop(self, task_id: str, cause: StopCause, reason: str) -> bool:
        """The ledger has ended the task: nobody wants its score any more. Whether there was one to come."""
        score = self._scores.get(task_id)
        if score is None:
            return False
        if score.worker is None:
            self._is_over(score)
        else:
            self._ladder.stop(score, cause, reason)
        return True

    def open_groups(self) -> list[GroupScore]:
        """Those that wait, are under way, or are stopped and have not come back."""
        return list(self._scores.values())

    async def close(self) -> int:
        """Ends the workers; how many did not end within the grace."""
        self._ladder.clear()
        return await self._workers.close(self._stop_grace_seconds)

    # For scores

    def begin(self, score: GroupScore) -> None:
        timeout_seconds = score.spec.eval_timeout_seconds
        if timeout_seconds is not None:
            self._ladder.limit(self._clock.monotonic() + timeout_seconds, score)

    def end(self, score: GroupScore, rewards: tuple[Reward, ...], error: str) -> None:
        self._is_over(score)
        if score.stop_cause is None:
            self._record(score, rewards, error)

    def _record(self, score: GroupScore, rewards: tuple[Reward, ...], error: str) -> None:
        command = ScoreGroup(score.task_id, rewards, error, score.spec.solve_threshold, self._clock.unix_time())
        self._recorder.record(command, score.record.submission.key.namespace)

    def _is_over(self, score: GroupScore) -> None:
        score.is_over = True
        if score.worker is not None:
            score.worker.running = None
        self._scores.pop(score.task_id, None)
        self._on_stopped()

    def _on_limit(self, score: GroupScore, _when: float) -> None:
        reason = f"eval_timeout_seconds ({score.spec.eval_timeout_seconds:g}) passed in eval_group"
        self._record(score, (), reason)
        self._ladder.stop(score, StopCause.PHASE_TIMEOUT, reason)

    def _give_up(self, score: GroupScore) -> None:
        assert score.worker is not None, "only a score that a worker is at is told to stop"
        match score.state:
            case StopState.STRANDED:
                self._workers.abandon(score.worker)
            case StopState.RUNNING | StopState.STOPPING | StopState.KILLED:
                raise AssertionError("its handler is waited for")
            case unknown:
                assert_never(unknown)
        self._on_stopped()

    def _on_crash(self, worker: Worker, error: BaseException) -> None:
        score = worker.running
        if isinstance(score, GroupScore):
            self.end(score, (), f"eval_group: its worker crashed: {describe(error)}")
