"""The runners as the engine sees them: nodes with one slot each, and the handles at them.

Invariants
  1. A runner's node takes tokens only while the runner is known to be prepared and alive, and was not told to leave.
  2. A runner has one replacement under way at most. It is no capacity until that is prepared; until then it is tried
     again and again, at growing intervals.
  3. An attempt is on one runner, and a runner at one attempt.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import traceback
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, Timings
from py_scheduler.domain.runners.runner import RunnerState, RunnerView
from py_scheduler.domain.values.metrics import plain_metrics, task_metrics
from py_scheduler.domain.values.plain import safe_text, words_of
from py_scheduler.errors import RunnerLostError
from py_scheduler.execution.attempt import AttemptReport, lost_report, stopped_report
from py_scheduler.execution.runner import RunnerGoneError
from py_scheduler.interfaces.trinity.mirrors import RunningTaskState
from py_scheduler.interfaces.trinity.runners.preparing import wait_seconds
from py_scheduler.placement import PlacementPool

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.results import Reward
    from py_scheduler.domain.task import Task
    from py_scheduler.execution.attempt import PlannedAttempt, RunningAttempt, RunningGroup
    from py_scheduler.execution.episode import EpisodeServices
    from py_scheduler.execution.workers import Worker
    from py_scheduler.interfaces.trinity.mirrors import TaskWrapper
    from py_scheduler.interfaces.trinity.protocols import RunStatus
    from py_scheduler.interfaces.trinity.runners.pooled import PooledRunner

logger = logging.getLogger(__name__)

RUN_ID_BASE = "run_id_base"
"""In a task's metadata: the run id of its first sample, where that is not 0."""
_SLOT = "runner"


def slot_on(runner_id: int | None) -> Resource:
    """What a sub-task holds: the one slot of a runner, any one (None) or that one."""
    labels = {} if runner_id is None else {_SLOT: str(runner_id)}
    return Resource(named={_SLOT: 1}, required_labels=labels)


def _node_of(runner_id: int) -> NodeResource:
    return NodeResource(
        node_ip=f"runner-{runner_id}", gpus=[], cpu=0, memory_gb=0, named={_SLOT: 1}, labels={_SLOT: str(runner_id)}
    )


class TrinityRunnerPool:
    """Implements `execution.runner.Runners` over RunnerWrappers. `task_of` finds what an attempt is to run.

    on_room: to be told when a runner can take work again.
    """

    kind = "workflow"
    standing_handle = None

    def __init__(self, task_of: Callable[[Task], TaskWrapper], on_room: Callable[[], None]) -> None:
        self.placement = PlacementPool([])
        self.runners: dict[int, PooledRunner] = {}
        self.busy: dict[int, RunningTaskState] = {}
        self._playing: dict[int, TrinityRunnerHandle] = {}
        self._task_of = task_of
        self._on_room = on_room
        self._alive: set[int] = set()
        self._handles: dict[str, int] = {}
        self._restarts: dict[int, int] = {}
        self._failures: dict[int, str] = {}
        self._replacing: dict[int, asyncio.Task[None]] = {}
        self._quiet = asyncio.Event()
        self._quiet.set()

    # Runners come and go

    def join(self, runner: PooledRunner) -> None:
        """Lets a prepared runner take work."""
        node = _node_of(runner.runner_id)
        self.runners[runner.runner_id] = runner
        self._handles[node.node_ip] = runner.runner_id
        self._alive.add(runner.runner_id)
        self._failures.pop(runner.runner_id, None)
        if any(usage.node_ip == node.node_ip for usage in self.placement.nodes()):
            self.placement.resume_node(node.node_ip)
        else:
            self.placement.add_node(node)
        self._on_room()

    def leave(self, runner: PooledRunner) -> None:
        """Gives the runner no more work; what it is at goes on."""
        if runner.runner_id in self._alive:
            self._alive.discard(runner.runner_id)
            self.placement.remove_node(_node_of(runner.runner_id).node_ip)

    def replace(self, runner: PooledRunner, why: str) -> None:
        """Ends the runner; another one takes its place once it is prepared, however often that has to be tried."""
        self.leave(runner)
        if runner.runner_id not in self.runners or runner.runner_id in self._replacing:
            return
        logger.warning("runner %d is replaced: %s", runner.runner_id, why)
        self._failures[runner.runner_id] = why
        runner.kill()
        task = asyncio.get_running_loop().create_task(self._replace(runner), name=f"replace runner {runner.runner_id}")
        self._replacing[runner.runner_id] = task

    async def _replace(self, runner: PooledRunner) -> None:
        for failures in itertools.count(1):
            try:
                await runner.restart_runner()
                break
            except Exception as error:  # noqa: BLE001 -- whatever it was, the runner is no capacity and is tried again
                self._failures[runner.runner_id] = str(error)
                wait = wait_seconds(failures)
                logger.warning("runner %d could not be restarted, again in %.2g s: %s", runner.runner_id, wait, error)
            await asyncio.sleep(wait)
        if self.runners.get(runner.runner_id) is not runner:
            runner.kill()  # It was dismissed, and its preparation did not heed that.
            return
        self._restarts[runner.runner_id] = self._restarts.get(runner.runner_id, 0) + 1
        # From here on it can be replaced again, should it die at once.
        self._replacing.pop(runner.runner_id, None)
        self.join(runner)

    async def release(self, runner: PooledRunner) -> None:
        """Lets a runner go as it is, alive; one that is being replaced, when that is done."""
        if (replacing := self._replacing.get(runner.runner_id)) is not None:
            await asyncio.wait([replacing])
        self.leave(runner)
        self.runners.pop(runner.runner_id, None)

    async def dismiss(self, grace_seconds: float) -> None:
        """Ends all runners: those at work once they are done, or after the grace. Their attempts are LOST then."""
        # Claimed before anything is waited for: whatever dies meanwhile is nobody's to be replaced.
        leaving, self.runners = self.runners, {}
        replacing, self._replacing = list(self._replacing.values()), {}
        for runner in leaving.values():
            self.leave(runner)
        for task in replacing:
            task.cancel()
        try:
            await asyncio.gather(*replacing, return_exceptions=True)
            async with asyncio.timeout(grace_seconds):
                await self._quiet.wait()
        except TimeoutError:
            logger.warning("runners %s were still at work after %g s", sorted(self.busy), grace_seconds)
        finally:  # Also when this is given up: nobody else knows them any more.
            for handle in list(self._playing.values()):
                handle.kill("the scheduler was stopped")
            for runner in leaving.values():
                runner.kill()
        await asyncio.gather(self._quiet.wait(), *[runner.ended() for runner in leaving.values()])
        self._failures.clear()

    # execution.runner.Runners

    async def start(self) -> None:
        """Runners come and go by `join` and `dismiss`."""

    async def close(self) -> None:
        await self.dismiss(0.0)

    async def take_handle(self, token: PlacementToken | None) -> TrinityRunnerHandle:
        """At the runner that the token names, which has just said that it is alive."""
        assert token is not None, "runners are nodes of a pool"
        runner_id = self._handles[token.node_ip]
        runner = self.runners.get(runner_id)
        if runner is None or runner_id not in self._alive:
            raise RunnerGoneError
        try:
            await runner.confirm_alive()
        except Exception as error:
            # Whatever kept it from saying that it is alive: it is not known to be.
            self.replace(runner, str(error) or repr(error))
            raise RunnerGoneError from error
        if runner_id not in self._alive:
            raise RunnerGoneError
        return TrinityRunnerHandle(self, runner)

    def views(self) -> list[RunnerView]:
        return [self._view(runner) for _, runner in sorted(self.runners.items())]

    def _view(self, runner: PooledRunner) -> RunnerView:
        runner_id = runner.runner_id
        state = RunnerState.IDLE if runner_id in self._alive else RunnerState.STARTING
        if runner_id in self.busy:
            state = RunnerState.BUSY
        return RunnerView(
            runner_id=str(runner_id),
            kind=self.kind,
            state=state,
            node_ip=_node_of(runner_id).node_ip,
            restarts=self._restarts.get(runner_id, 0),
            message=self._failures.get(runner_id, ""),
            keys={key: str(value) for key, value in runner.state.items()},
        )

    def is_alive(self, runner_id: int) -> bool:
        """Whether it takes work."""
        return runner_id in self._alive

    def task_of(self, planned: PlannedAttempt) -> TaskWrapper:
        """What the attempt is to run."""
        return self._task_of(planned.task)

    def begins(self, handle: TrinityRunnerHandle, state: RunningTaskState) -> None:
        """Told by a handle."""
        self.busy[state.runner_id] = state
        self._playing[state.runner_id] = handle
        self._quiet.clear()

    def ends(self, runner_id: int) -> None:
        """Told by a handle."""
        del self.busy[runner_id], self._playing[runner_id]
        if not self.busy:
            self._quiet.set()


class TrinityRunnerHandle:
    """Implements `execution.runner.RunnerHandle`: one runner, held by one slot."""

    __slots__ = ("_killed", "_pool", "_runner")

    def __init__(self, pool: TrinityRunnerPool, runner: PooledRunner) -> None:
        self._pool = pool
        self._runner = runner
        self._killed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Why the runner was killed under its work; what that comes to is waited for no longer."""

    @property
    def is_usable(self) -> bool:
        return self._pool.is_alive(self._runner.runner_id)

    def leave(self) -> None:
        """The runner is free as soon as its token is."""

    async def run(
        self,
        running: RunningAttempt,
        worker: Worker,
        spec: EvaluatorSpec,  # noqa: ARG002 -- as of every handle
        services: EpisodeServices,  # noqa: ARG002
    ) -> AttemptReport:
        """One try at a sub-task. What a workflow does is a status; a runner that dies is replaced."""
        runner, planned = self._runner, running.planned
        state = RunningTaskState(self._pool.task_of(planned), runner.runner_id)
        self._pool.begins(self, state)
        running.kill = lambda: self.kill("its task ignored a stop")
        partial = planned.task.config.keeps_partial
        run_id_base = planned.first_sample_no + planned.task.metadata.get(RUN_ID_BASE, 0)
        work = asyncio.ensure_future(runner.run_task(state.task, planned.sample_count, run_id_base, partial))
        try:
            await self._end_of(work, running, worker)
        finally:
            self._pool.ends(runner.runner_id)
        if runner.unfit_because:
            self._pool.replace(runner, runner.unfit_because)
        await worker.absorb_cancellation()
        if running.stop_cause is not None:
            state.restart_runner_on_cancel = running.restarts_runner
            if running.restarts_runner:
                self._pool.replace(runner, running.stop_reason)
            return stopped_report(running)
        return self._report(work, running)

    async def score_group(
        self, group: RunningGroup, worker: Worker, spec: EvaluatorSpec
    ) -> tuple[tuple[Reward, ...], str]:
        raise NotImplementedError("workflows score their runs themselves")

    def kill(self, why: str) -> None:
        """Ends the runner with what it is at, or at least listens to that no longer."""
        if not self._killed.done():
            self._killed.set_result(why)
            self._pool.replace(self._runner, why)

    async def _end_of(
        self, work: asyncio.Future[tuple[RunStatus, bytes]], running: RunningAttempt, worker: Worker
    ) -> None:
        """Passes a stop on to the work, and returns when that has ended or its runner was killed."""
        while not (work.done() or self._killed.done()):
            try:
                either: list[asyncio.Future[Any]] = [work, self._killed]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                if worker.is_closing:
                    self._runner.kill()
                    work.cancel()
                    work.add_done_callback(_ignored)
                    raise
                if running.restarts_runner:
                    self.kill(running.stop_reason)
                work.cancel()
        if not work.done():
            work.cancel()
            work.add_done_callback(_ignored)

    def _report(self, work: asyncio.Future[tuple[RunStatus, bytes]], running: RunningAttempt) -> AttemptReport:
        if self._killed.done():
            return lost_report(running, self._killed.result())
        if work.cancelled():
            return _failed(running, "the workflow cancelled its own runner")
        error = work.exception()
        if isinstance(error, RunnerLostError):
            self._pool.replace(self._runner, str(error))
            return lost_report(running, str(error))
        if error is not None:
            return _failed(running, "".join(traceback.format_exception(error)).rstrip())
        try:
            status, payload = work.result()
            return _ended(running, status, bytes(payload))
        except Exception as odd:  # noqa: BLE001 -- a runner may be anybody's
            return _failed(running, f"the runner returned no status and payload: {words_of(odd)}")


def _ignored(work: asyncio.Future[tuple[RunStatus, bytes]]) -> None:
    """Of a runner that was killed: whatever it says now, it says too late."""
    if not work.cancelled():
        work.exception()


def _ended(running: RunningAttempt, status: RunStatus, payload: bytes) -> AttemptReport:
    """A status as the ledger wants it: a sample to each run.

    Which of several runs failed, a Status does not say: the first `completed_runs` stand for those that did not.
    """
    state = AttemptState.SUCCEEDED if status.ok else AttemptState.FAILED
    message = safe_text(status.message or ("" if status.ok else "the workflow did not say why"))
    completed = int(status.completed_runs)
    metrics = _metrics_of_runs([plain_metrics(measured) for measured in status.metrics], completed)
    samples = [
        _sample(running, number, metrics[number] if number < completed else None, message)
        for number in range(running.planned.sample_count)
    ]
    return AttemptReport(state, tuple(samples), "" if status.ok else message, payload)


def _failed(running: RunningAttempt, message: str) -> AttemptReport:
    message = safe_text(message)
    samples = [_sample(running, number, None, message) for number in range(running.planned.sample_count)]
    return AttemptReport(AttemptState.FAILED, tuple(samples), message)


def _metrics_of_runs(metrics: Sequence[Mapping[str, float]], runs: int) -> list[dict[str, float]]:
    """One dict to a run. Where experiences were measured instead, each run gets its equal share of them, in order."""
    if len(metrics) == runs:
        return [dict(measured) for measured in metrics]
    bounds = [number * len(metrics) // runs for number in range(runs + 1)] if runs else []
    return [task_metrics(metrics[first:end], is_eval=False) for first, end in itertools.pairwise(bounds)]


def _sample(running: RunningAttempt, number: int, metrics: dict[str, float] | None, error: str) -> SampleDone:
    """metrics None: of a run that failed. A run that was completed is a result, whatever its reward."""
    return SampleDone(
        task_id=running.ref.task_id,
        sample_no=running.planned.first_sample_no + number,
        attempt_no=running.ref.attempt_no,
        outcome=Outcome.INFRA_OTHER if metrics is None else Outcome.SOLVED,
        error=error if metrics is None else "",
        phase="run" if metrics is None else "",
        node_ip=running.node_ip,
        timings=Timings(wait_seconds=running.began_at - running.planned.queued_at),
        started_unix_seconds=running.began_unix_seconds,
        metrics=metrics or {},
    )
