"""The Scheduler of seed 2: batches of tasks on runners, and their results pulled batch by batch.

    scheduler = Scheduler(config)
    await scheduler.start()
    scheduler.schedule(tasks, batch_id=7)
    statuses, payloads = await scheduler.get_payload_results(7)
    await scheduler.stop()

Invariants
  1. What is queued, running or finished, only the engine's ledger says; everything here is read from there. Before the
     first `start()` there is no running engine, and `_held` has what is to be handed to it.
  2. Task ids are unique among everything of a batch that was not drained yet.
  3. Between `stop()` and `start()` there is no runner, and the ledger stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.collecting import CollectReply, CollectRequest
from py_scheduler.domain.limits import MAX_COLLECT_SECONDS
from py_scheduler.domain.requests import AbortRequest, SubmissionSelector
from py_scheduler.errors import FailedPreconditionError, FieldViolation, InvalidArgumentError, RunnerStartError
from py_scheduler.interfaces.trinity.local_engine import LocalEngine, default_timeout
from py_scheduler.interfaces.trinity.mirrors import TaskWrapper
from py_scheduler.interfaces.trinity.runner_wrapper import RunnerWrapper
from py_scheduler.interfaces.trinity.views import SchedulerViews
from py_scheduler.interfaces.trinity.workflow_runner import Status
from py_scheduler.scheduler.kept_results import why_incomplete

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from py_scheduler.domain.collecting import TaskResult
    from py_scheduler.domain.task import BatchId
    from py_scheduler.interfaces.trinity.protocols import Config, Task

logger = logging.getLogger(__name__)

_FIRST_PAUSE_SECONDS = 0.1
_KEPT_STOPS = 1_000


class Scheduler(SchedulerViews):
    """Schedules tasks on runners, retries what fails, and hands results out by batch.

    stop_deadline_seconds: how long `stop` waits for running sub-tasks. stop_grace_seconds: how long a sub-task that was
    told to stop may take before its runner is killed. runner_class, status_class: for those who bring their own.
    """

    stop_deadline_seconds = 60.0
    stop_grace_seconds = 5.0
    runner_class: type[RunnerWrapper] = RunnerWrapper
    status_class: type[Any] = Status

    def __init__(self, config: Config) -> None:
        explorer = config.explorer
        self.config = config
        self.default_timeout = default_timeout(config)
        self.max_retry_times = explorer.max_retry_times
        self.max_repeat_times = explorer.max_repeat_times_per_runner
        self.runner_num = explorer.rollout_model.engine_num * explorer.runner_per_model
        self.running = False
        self._local = LocalEngine(config, range(self.runner_num), self.stop_grace_seconds)
        self._held: dict[BatchId, list[TaskWrapper]] = {}
        self._task_nos: dict[BatchId, int] = {}
        self._without_result: dict[BatchId, list[Any]] = {}
        self._changing = asyncio.Lock()
        self._opened = asyncio.Event()
        self._thread_id: int | None = None
        """Of the loop, once there is one."""
        self._reporting: asyncio.Task[None] | None = None

    # Start and stop

    async def start(self) -> None:
        """Prepares the runners and lets them work; does nothing when it is running.

        At most `runner_prepare_concurrency` are prepared at once, each with `runner_prepare_max_retries` further tries.
        Raises RunnerStartError when one cannot be; then no runner is left, and what was scheduled waits on.
        """
        async with self._changing:
            if self.running:
                return
            runners = await self._prepared_runners()
            try:
                await self._hand_in()
            except BaseException:
                for runner in runners:
                    runner.kill()
                raise
            self.running = True
            for runner in runners:
                self._local.runners.join(runner)
            interval = self.config.explorer.runner_state_report_interval
            if interval > 0:
                self._reporting = asyncio.create_task(self.report_states(interval), name="runner states")

    async def _hand_in(self) -> None:
        """What was scheduled before the engine ran. Raises ResourceExhaustedError; what is not in yet is still held."""
        if not self._opened.is_set():
            await self._local.open()
            self._opened.set()
            self._thread_id = threading.get_ident()
        for batch_id in list(self._held):
            self._local.submit(self._held[batch_id], batch_id)
            del self._held[batch_id]

    async def stop(self) -> None:
        """Ends all runners, those at work when they are done or after `stop_deadline_seconds`.

        What waits and what was not collected stays; `start` goes on with it. A sub-task that was cut off is tried again
        then, if it has a retry left.
        """
        async with self._changing:
            if not self.running:
                return
            self.running = False
            reporting, self._reporting = self._reporting, None
            if reporting is not None:
                reporting.cancel()
                await asyncio.wait([reporting])
            await self._local.runners.dismiss(self.stop_deadline_seconds)

    async def close(self) -> None:
        """Beyond the seed: `stop`, and forget everything. The scheduler cannot be used again."""
        await self.stop()
        if self._opened.is_set():
            await self._local.close()

    async def _prepared_runners(self) -> list[RunnerWrapper]:
        limit = asyncio.Semaphore(max(1, self.config.explorer.runner_prepare_concurrency))
        made: list[RunnerWrapper] = []

        async def prepare(runner_id: int) -> None:
            async with limit:
                await self._prepare(runner_id, made)

        try:
            async with asyncio.TaskGroup() as group:
                for runner_id in range(self.runner_num):
                    group.create_task(prepare(runner_id))
        except BaseException as error:
            for runner in made:
                runner.kill()
            if isinstance(error, ExceptionGroup):
                first = error.exceptions[0]
                raise RunnerStartError(f"the runners could not be started: {first}") from first
            raise
        return sorted(made, key=lambda runner: runner.runner_id)

    async def _prepare(self, runner_id: int, made: list[RunnerWrapper]) -> None:
        explorer = self.config.explorer
        pause = _FIRST_PAUSE_SECONDS
        runner: RunnerWrapper | None = None
        for retries_left in range(max(0, explorer.runner_prepare_max_retries), -1, -1):
            try:
                if runner is None:
                    runner = self._new_runner(runner_id)
                    made.append(runner)
                    await runner.prepare()
                else:
                    await runner.restart_runner()
                return
            except Exception as error:
                if not retries_left:
                    raise RunnerStartError(f"runner {runner_id} could not be prepared: {error}") from error
                logger.warning("runner %d could not be prepared, again in %g s: %s", runner_id, pause, error)
            await asyncio.sleep(pause)
            pause *= 2

    def _new_runner(self, runner_id: int) -> RunnerWrapper:
        explorer = self.config.explorer
        runner = self.runner_class(
            runner_id,
            runner_id % explorer.rollout_model.engine_num,
            [runner_id % model.engine_num for model in explorer.auxiliary_models],
            self.config,
        )
        runner.run_once = self._local.run_once
        return runner

    # Tasks in

    def schedule(self, tasks: Sequence[Task], batch_id: BatchId) -> None:
        """Adds tasks to a batch; they wait for `start` if need be. All are taken or, with an error, none.

        Their ids count on from those that the batch has. (The original counts each call's tasks from 0 and loses
        results.) Raises InvalidArgumentError (a task without repeats, a batch id that is none), ResourceExhaustedError,
        FailedPreconditionError (called from another thread than the loop's).
        """
        if self._thread_id not in (None, threading.get_ident()):
            raise FailedPreconditionError(
                "this is not the thread of the scheduler's loop: use loop.call_soon_threadsafe(scheduler.schedule, ...)"
            )
        if not tasks:
            return
        _check_repeats(tasks)
        first = self._task_nos.get(batch_id, 0)
        wrappers = [
            TaskWrapper(
                task=replace(task, batch_id=batch_id, task_id=number),  # type: ignore[type-var]
                batch_id=batch_id,
                sub_task_num=-(-repeats // (self.max_repeat_times or repeats)),
                total_runs=repeats,
            )
            for number, task in enumerate(tasks, first)
            for repeats in [task.repeat_times or 0]
        ]
        if self._opened.is_set():
            self._local.submit(wrappers, batch_id)
        else:
            self._local.check(wrappers, batch_id)
            self._held.setdefault(batch_id, []).extend(wrappers)
        self._task_nos[batch_id] = first + len(tasks)

    def task_done_callback(self, async_task: asyncio.Task[Any]) -> None:
        """For `Task.add_done_callback` of a `run_with_retry`: says in the log that it failed.

        In the original everything depends on it being called; here the ledger has noted it all before.
        """
        if not async_task.cancelled() and (error := async_task.exception()) is not None:
            logger.error("%s failed", async_task.get_name(), exc_info=error)

    def dynamic_timeout(self, timeout: float | None = None) -> float:
        """Seconds that a try may take: `timeout` (None: `default_timeout`), or less by what training sub-tasks took.

        Less once `dynamic_timeout.warmup_min_steps` steps are complete: `ratio` times the mean of what they took.
        """
        cap = self.default_timeout if timeout is None else timeout
        seconds = self._local.engine.dynamic_timeout(cap)
        return cap if seconds is None else seconds

    # Results out

    async def get_payload_results(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: bool = False,
    ) -> tuple[list[Any], list[bytes]]:
        """Waits for a batch, and drains it: statuses in the order of completion, and a bytes chunk of each sub-task
        that made experiences.

        Returns when all its tasks are done; when `min_num` are and `over_rollout.wait_after_min` seconds have passed;
        or after `timeout` seconds (None: `default_timeout`). An unknown batch: nothing, at once. clear_timeout_tasks:
        stop what is not done, and after the timeout restart its runners; otherwise it goes on, and a later call gets
        it. return_partial_tasks: of tasks that are stopped so, those with completed runs give a status and their
        chunks. Tasks that leave no status are told by `stopped_without_result`.
        """
        reply = await self._collect(
            batch_id, min_num, timeout, clear=clear_timeout_tasks, partial=return_partial_tasks, payloads=True
        )
        return self._statuses(reply.results), reply.payloads

    async def get_statuses(
        self,
        batch_id: BatchId,
        min_num: int | None = None,
        timeout: float | None = None,
        clear_timeout_tasks: bool = True,
        return_partial_tasks: bool = False,
    ) -> list[Any]:
        """`get_payload_results` without the payloads, which are dropped unseen."""
        reply = await self._collect(
            batch_id, min_num, timeout, clear=clear_timeout_tasks, partial=return_partial_tasks, payloads=False
        )
        return self._statuses(reply.results)

    async def drain_batch_payload_results(self, batch_id: BatchId) -> tuple[list[Any], list[bytes]]:
        """What is done of a batch now, handed out; the rest goes on."""
        if self._local.record_of(batch_id) is None:
            return [], []
        reply = await self._local.collect(
            CollectRequest(request_id=_fresh_id(), batch_id=batch_id, timeout_seconds=0.0, clear_unfinished=False)
        )
        self._note(batch_id, reply)
        return self._statuses(reply.results), reply.payloads

    def discard_completed_results(self, batch_id: BatchId) -> None:
        """Forgets what is done of a batch, and how many tasks it had."""
        self._without_result.pop(batch_id, None)
        if self._local.record_of(batch_id) is not None:
            self._local.engine.forget_results(SubmissionSelector(batch_id=batch_id))
            self._forget_drained(batch_id)

    async def abort_batch(
        self, batch_id: BatchId, return_partial_tasks: bool = False, restart_runners: bool = True
    ) -> None:
        """Stops what is not done of a batch; returns when it has stopped. What is done can still be drained.

        Does nothing for a batch that is unknown.
        """
        self._let_go(batch_id, "aborted before the start")
        record = self._local.record_of(batch_id)
        if record is None:
            return
        wrappers = self._local.shown(record)
        reason = f"batch {batch_id} was aborted"
        await self._local.engine.abort(
            AbortRequest(
                selector=SubmissionSelector(submission_id=record.submission_id),
                reason=reason,
                wait=True,
                keep_partial=return_partial_tasks,
                restart_runners=restart_runners,
            )
        )
        kept = {result.client_key for result in record.kept.collectable.values()}
        left = [wrapper for wrapper in wrappers if wrapper.client_key not in kept]
        self._stopped(batch_id, [self._nothing(wrapper, reason) for wrapper in left])
        self._forget_drained(batch_id)

    def stopped_without_result(self, batch_id: BatchId) -> list[Any]:
        """Beyond the seed: of the last stop in a batch, a status of each task that left no result, with the reason.

        In the original they vanish. Known of the thousand batches that were stopped last.
        """
        return list(self._without_result.get(batch_id, ()))

    def has_step(self, batch_id: BatchId) -> bool:
        """Whether anything of the batch waits, runs or is to be collected."""
        if batch_id in self._held:
            return True
        record = self._local.record_of(batch_id)
        return record is not None and not record.is_over

    async def _collect(
        self,
        batch_id: BatchId,
        min_num: int | None,
        timeout: float | None,
        *,
        clear: bool,
        partial: bool,
        payloads: bool,
    ) -> CollectReply:
        seconds = self.default_timeout if timeout is None else min(max(timeout, 0.0), MAX_COLLECT_SECONDS)
        if batch_id in self._held:
            began_at = time.monotonic()
            try:
                async with asyncio.timeout(seconds):
                    await self._opened.wait()
            except TimeoutError:
                if clear:
                    self._let_go(batch_id, f"timeout ({seconds:g} s) passed before the scheduler was started")
                return CollectReply()
            seconds = max(0.0, seconds - (time.monotonic() - began_at))
        record = self._local.record_of(batch_id)
        if record is None or record.is_over:
            return CollectReply()
        if min_num is not None and min_num > record.kept.scheduled_tasks:
            logger.warning("min_num is %d, batch %s has %d tasks", min_num, batch_id, record.kept.scheduled_tasks)
            min_num = None
        reply = await self._local.collect(
            CollectRequest(
                request_id=_fresh_id(),
                batch_id=batch_id,
                min_num=min_num,
                timeout_seconds=seconds,
                clear_unfinished=clear,
                include_partial=partial,
                with_payloads=payloads,
            )
        )
        if reply.is_timed_out:
            logger.warning("batch %s: %d tasks were not done after %g s", batch_id, len(reply.unfinished), seconds)
        self._note(batch_id, reply)
        return reply

    def _note(self, batch_id: BatchId, reply: CollectReply) -> None:
        """Takes over into the mirrors what was handed out and what was stopped."""
        wrappers = self._local.wrappers
        for result in reply.results:
            # Unless somebody has discarded the batch since.
            if (wrapper := wrappers.get(result.client_key)) is not None:
                wrapper.show_result(result)
        stopped = [task for task in reply.unfinished if task.is_stopped]
        if stopped:
            statuses = [self.status_class(task.completed_runs, task.total_runs, [], task.reason) for task in stopped]
            self._stopped(batch_id, statuses)
        self._forget_drained(batch_id)

    def _let_go(self, batch_id: BatchId, reason: str) -> None:
        """Of what the engine does not have yet."""
        if batch_id in self._held:
            self._stopped(batch_id, [self._nothing(held, reason) for held in self._held.pop(batch_id)])
            self._forget_drained(batch_id)

    def _stopped(self, batch_id: BatchId, statuses: list[Any]) -> None:
        """Keeps them for `stopped_without_result`."""
        self._without_result.pop(batch_id, None)
        self._without_result[batch_id] = statuses
        if len(self._without_result) > _KEPT_STOPS:
            del self._without_result[next(iter(self._without_result))]

    def _forget_drained(self, batch_id: BatchId) -> None:
        self._local.forget_drained(batch_id)
        if not self.has_step(batch_id):
            self._task_nos.pop(batch_id, None)

    def _statuses(self, results: Iterable[TaskResult]) -> list[Any]:
        return [self._status(result) for result in results]

    def _nothing(self, wrapper: TaskWrapper, reason: str) -> Any:
        message = why_incomplete(wrapper.completed_runs, wrapper.total_runs, reason)
        return self.status_class(wrapper.completed_runs, wrapper.total_runs, [], message)


def _check_repeats(tasks: Sequence[Task]) -> None:
    violations = [
        FieldViolation(f"tasks[{number}].repeat_times", f"is {task.repeat_times}, must be 1 or more")
        for number, task in enumerate(tasks)
        if task.repeat_times is None or task.repeat_times < 1
    ]
    if violations:
        raise InvalidArgumentError(violations)


def _fresh_id() -> str:
    return os.urandom(8).hex()
