"""Supervises the attempts that run: their limits, their stops, the workers that are lost. Implements
`execution.evaluator.AttemptBoard`.

Invariants
  1. `_running` holds exactly the attempts that the ledger calls RUNNING.
  2. Every stop goes down the ladder of `execution/stopping.py`. An attempt that the ladder strands ends in the ledger
     without its worker, and its room stays taken until its handler comes back.
  3. An evaluator without permits has no pending attempts: those that are left when its last permit goes wait for room
     again.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING, assert_never, cast

import msgspec

from py_scheduler.domain.events import AttemptEnded, AttemptRef, StopCause
from py_scheduler.domain.results import AttemptState, Outcome
from py_scheduler.execution.attempt import AttemptReport, PlannedAttempt, RunningAttempt, unfinished_sample
from py_scheduler.execution.evaluator import Evaluator
from py_scheduler.execution.outcomes import describe
from py_scheduler.execution.run_sample import INLINE
from py_scheduler.execution.stopping import RUNNING, StopLadder, StopState
from py_scheduler.execution.workers import WorkerPool
from py_scheduler.scheduler.group_scorer import GroupScorer
from py_scheduler.scheduler.ledger.commands import EndAttempt, LeaseAttempts, StartAttempt
from py_scheduler.scheduler.ledger.dynamic_timeout import dynamic_timeout
from py_scheduler.scheduler.ledger.endings import needs_backoff
from py_scheduler.scheduler.ledger.records import submission_and_number
from py_scheduler.scheduler.notifier import Notifier
from py_scheduler.scheduler.retry_backoff import RetryBackoffs

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.execution.episode import EpisodeServices
    from py_scheduler.execution.runner import Runners
    from py_scheduler.execution.workers import Worker
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.settings import EngineSettings

    Requeue = Callable[[EvaluatorSpec, list[PlannedAttempt]], None]


class TaskScope(msgspec.Struct, frozen=True):
    """The tasks that a question is about: all of a submission (empty: of all submissions), or some of its tasks.

    before_task_no: only tasks with a lower number, so that a wait for all tasks leaves out those that come later.
    """

    submission_id: str = ""
    task_ids: frozenset[str] = frozenset()
    before_task_no: int | None = None

    def includes(self, task_id: str, submission_id: str) -> bool:
        if self.task_ids:
            return task_id in self.task_ids
        if not self.submission_id:
            return True
        if submission_id != self.submission_id:
            return False
        return self.before_task_no is None or submission_and_number(task_id)[1] < self.before_task_no


EVERYTHING = TaskScope()


class SupervisedAttempt(RunningAttempt):
    """A running attempt, with the worker that runs it and the evaluator that this worker drains."""

    __slots__ = ("evaluator", "worker")
    evaluator: Evaluator
    worker: Worker


class Supervisor:
    """All attempts that run.

    `requeue` takes attempts that wait again. `permit_returned` is told of each permit that is free, `room_is_stranded`
    of all attempts whose handlers ignore their stop, each with its evaluator, whenever there is one more or less.
    """

    def __init__(
        self,
        recorder: Recorder,
        services: EpisodeServices,
        settings: EngineSettings,
        runners: Mapping[str, Runners],
        requeue: Requeue,
        permit_returned: Callable[[EvaluatorSpec, str, float], None],
        room_is_stranded: Callable[[Iterable[tuple[EvaluatorSpec, RunningAttempt]]], None],
    ) -> None:
        self._recorder = recorder
        self._services = services
        self._clock = services.clock
        self._stop_grace_seconds = settings.stop_grace_seconds
        self._runners = runners
        self._requeue = requeue
        self._dynamic_timeout = settings.dynamic_timeout
        self.backoffs = RetryBackoffs(recorder.ledger, services.clock, settings, requeue)
        self._permit_returned = permit_returned
        self._room_is_stranded = room_is_stranded
        self._running: dict[AttemptRef, SupervisedAttempt] = {}
        self._stranded: dict[AttemptRef, SupervisedAttempt] = {}
        self._telling: asyncio.Handle | None = None
        self._gone_nodes: frozenset[str] = frozenset()
        self._ladder: StopLadder[SupervisedAttempt] = StopLadder(
            services.clock, settings.stop_grace_seconds, self._on_limit, self._give_up
        )
        # An attempt arms limits of nothing but itself, and all attempts here are supervised ones.
        self._arm = cast("Callable[[float, RunningAttempt], None]", self._ladder.limit)
        self._workers = WorkerPool(settings.max_running_samples, self._on_crash, services.clock)
        self._stopped = Notifier()
        self.groups = GroupScorer(recorder, services.clock, settings, runners, self._stopped.ring)
        self.is_draining = False
        """No attempt begins any more; those that run may finish."""
        self.is_paused = False
        """No attempt begins for now; what was let in and has not begun waits for room again."""

    def launch(
        self,
        spec: EvaluatorSpec,
        attempts: list[PlannedAttempt],
        tokens: Sequence[PlacementToken | None],
        admitted_at: float,
    ) -> None:
        """Starts an evaluator on an admitted batch, one worker to a token."""
        runners = self._runners.get(spec.evaluator_id, INLINE)
        evaluator = Evaluator(spec, attempts, self._services, self, admitted_at, runners)
        evaluator.active_permits = len(tokens)
        for token in tokens:
            self._workers.submit(evaluator, token)

    def nodes_have_changed(self, pool: PlacementPool) -> None:
        """Nodes of the pool came or went. What runs on one that went may finish; its token is used no further."""
        self._gone_nodes = frozenset(node.node_ip for node in pool.nodes() if node.phase == "leaving")

    # For evaluators

    def begin(
        self, planned: PlannedAttempt, evaluator: Evaluator, token: PlacementToken | None, worker: Worker
    ) -> SupervisedAttempt | None:
        if self.is_draining:
            return None
        running = SupervisedAttempt(planned, token, worker.task, self._clock, self._arm)
        running.evaluator, running.worker = evaluator, worker
        start = StartAttempt(planned.ref, running.node_ip, running.gpu_ids, running.began_unix_seconds)
        if not self._recorder.record(start, planned.namespace):
            return None
        worker.running = self._running[planned.ref] = running
        config = planned.task.config
        if config.attempt_timeout_seconds is not None or config.has_dynamic_timeout:
            self._limit(running)
        return running

    def _limit(self, running: SupervisedAttempt) -> None:
        config = running.planned.task.config
        seconds = config.attempt_timeout_seconds
        if config.has_dynamic_timeout:
            seconds = dynamic_timeout(self._dynamic_timeout, self._recorder.ledger.history, seconds)
        if seconds is not None:
            running.limit(seconds)

    def end(self, running: SupervisedAttempt, report: AttemptReport) -> None:
        running.is_over = True
        running.worker.running = None
        self._running.pop(running.ref, None)
        if running.state is not RUNNING:
            self._comes_back(running)
        self._report(running, report)
        if running.stop_cause is not None or self.is_draining:
            self._stopped.ring()

    def node_is_gone(self, token: PlacementToken | None) -> bool:
        return bool(self._gone_nodes) and token is not None and token.node_ip in self._gone_nodes

    def permit_is_free(self, evaluator: Evaluator, token: PlacementToken | None, worker: Worker) -> None:
        if token is not None:
            token.release()
        if not worker.is_abandoned:
            self._permit_is_gone(evaluator)
        self._permit_returned(evaluator.spec, evaluator.namespace, evaluator.admitted_at)

    # Stops

    def stop(self, task_id: str, cause: StopCause, reason: str, *, restarts_runners: bool = False) -> Iterator[None]:
        """Stops the attempts of a task that run, or the score of its group; yields after each that it told."""
        for ref in self._recorder.ledger.running_attempts(task_id):
            running = self._running.get(ref)
            if running is not None:
                self._ladder.stop(running, cause, reason, restarts_runner=restarts_runners)
                yield
        if self.groups.stop(task_id, cause, reason):
            yield

    def unconfirmed(self, scope: TaskScope) -> tuple[str, ...]:
        """Tasks whose work has not been seen to stop: still running, or stranded."""
        return tuple(dict.fromkeys(task_id for task_id, _ in self._at_work(scope)))

    async def wait_stopped(self, scope: TaskScope) -> None:
        """Returns when none of these tasks runs any more. It does not wait for stranded work."""
        while any(state.is_awaited for _, state in self._at_work(scope)):
            await self._stopped.next_ring().wait()

    def _at_work(self, scope: TaskScope) -> Iterator[tuple[str, StopState]]:
        """The tasks of attempts and group scores that run, each with how far the stop of that work has come."""
        for running in itertools.chain(self._running.values(), self._stranded.values()):
            if scope.includes(running.ref.task_id, running.planned.submission_id):
                yield running.ref.task_id, running.state
        for group in self.groups.open_groups():
            if scope.includes(group.task_id, group.record.submission.submission_id):
                yield group.task_id, group.state

    async def close(self) -> int:
        """Ends the workers; how many did not end within the grace."""
        self._ladder.clear()
        self.backoffs.clear()
        if self._telling is not None:
            self._telling.cancel()
        return sum(await asyncio.gather(self._workers.close(self._stop_grace_seconds), self.groups.close()))

    def _on_limit(self, running: SupervisedAttempt, when: float) -> None:
        if running.clock_stands_still:
            return  # The limit is armed again when the clock goes on.
        if when == running.attempt_deadline:
            reason = f"the attempt took over {when - running.began_at:g} s"
            self._ladder.stop(running, StopCause.ATTEMPT_TIMEOUT, reason)
        elif when == running.phase_deadline:
            spec, phase = running.evaluator.spec, running.phase
            seconds = spec.run_timeout_seconds if phase == "run" else spec.eval_timeout_seconds
            self._ladder.stop(running, StopCause.PHASE_TIMEOUT, f"{phase}_timeout_seconds ({seconds:g}) passed")

    def _stranded_room_changed(self) -> None:
        """Told of once in a turn of the loop: ten thousand handlers may ignore their stop at the same moment."""
        if self._telling is None:
            self._telling = asyncio.get_running_loop().call_soon(self._tell_of_stranded_room)

    def _tell_of_stranded_room(self) -> None:
        self._telling = None
        self._room_is_stranded([(running.evaluator.spec, running) for running in self._stranded.values()])

    def _give_up(self, running: SupervisedAttempt) -> None:
        match running.state:
            case StopState.STRANDED:
                self._strand(running)
            case StopState.RUNNING | StopState.STOPPING | StopState.KILLED:
                raise AssertionError("its handler is waited for")
            case unknown:
                assert_never(unknown)

    def _comes_back(self, running: SupervisedAttempt) -> None:
        """What was told to stop has ended."""
        match running.state:
            case StopState.STRANDED:
                self._stranded.pop(running.ref, None)
                self._stranded_room_changed()
            case StopState.RUNNING | StopState.STOPPING | StopState.KILLED:
                pass  # Its room is given back with its permit.
            case unknown:
                assert_never(unknown)

    def _strand(self, running: SupervisedAttempt) -> None:
        """Ends an attempt without its handler, which ignores its stop, and lets another worker take the place of its
        own.
        """
        cause = running.stop_cause
        assert cause is not None, "only a stop strands an attempt"
        del self._running[running.ref]
        self._stranded[running.ref] = running
        self._stranded_room_changed()
        message = f"{running.stop_reason}; the handler did not stop within {self._stop_grace_seconds:g} s"
        sample = unfinished_sample(running, cause.outcome, message)
        self._report(running, AttemptReport(cause.attempt_state, (sample,), message))
        self._workers.abandon(running.worker)
        self._permit_is_gone(running.evaluator)
        self._stopped.ring()

    def _on_crash(self, worker: Worker, error: BaseException) -> None:
        """A fault of this program ended a worker: its attempt is LOST. Its permit came back on the way out."""
        running = worker.running
        if isinstance(running, SupervisedAttempt):
            message = f"its worker crashed: {describe(error)}"
            sample = unfinished_sample(running, Outcome.INFRA_OTHER, message)
            self.end(running, AttemptReport(AttemptState.LOST, (sample,), message))

    def _permit_is_gone(self, evaluator: Evaluator) -> None:
        evaluator.active_permits -= 1
        if evaluator.active_permits == 0 and evaluator.pending:
            ledger = self._recorder.ledger
            attempts = [attempt for attempt in reversed(evaluator.pending) if ledger.is_waiting(attempt.ref)]
            evaluator.pending.clear()
            if attempts:
                refs = tuple([attempt.ref for attempt in attempts])
                self._recorder.record(LeaseAttempts(refs, is_given_back=True), "")
                self._requeue(evaluator.spec, attempts)

    def _report(self, running: SupervisedAttempt, report: AttemptReport) -> None:
        planned = running.planned
        unix_seconds = self._clock.unix_time()
        running_seconds = self._clock.monotonic() - running.began_at
        end = EndAttempt(
            planned.ref,
            report.state,
            report.samples,
            report.message,
            unix_seconds,
            running.state is RUNNING or running.state.ends_confirmed,
            report.payload,
            running_seconds,
        )
        events = self._recorder.record(end, planned.namespace)
        if not events or type(last := events[-1]) is not AttemptEnded:
            return
        record = self._recorder.ledger.task(last.task_id)
        if last.next_attempt_no:
            assert record is not None
            subtask, spec = record.subtasks[last.subtask_no], running.evaluator.spec
            attempt = planned.next_attempt(self._clock.monotonic())
            if needs_backoff(report.state, report.samples):
                self.backoffs.add(spec, attempt, subtask.losses + subtask.refills + subtask.failures)
            else:
                self._requeue(spec, [attempt])
            return
        if record is not None and record.awaits_group_score:
            self.groups.score(record, running.evaluator.spec)
