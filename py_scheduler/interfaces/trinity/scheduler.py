"""The Scheduler of seed 2: batches of tasks on runners, and their results pulled batch by batch.

    scheduler = Scheduler(config)
    await scheduler.start()
    scheduler.schedule(tasks, batch_id=7)
    statuses, payloads = await scheduler.get_payload_results(7)
    await scheduler.stop()

Invariants
  1. What is queued, running or finished, only the engine's ledger says; everything here is read from there.
  2. Between `stop()` and `start()` there is no runner, and the ledger stays as it is.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.limits import MAX_COLLECT_SECONDS
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.interfaces.trinity.checks import check_config, check_tasks, check_wait
from py_scheduler.interfaces.trinity.engine import TrinityEngine, default_timeout
from py_scheduler.interfaces.trinity.mirrors import TaskWrapper
from py_scheduler.interfaces.trinity.pinned import run_once
from py_scheduler.interfaces.trinity.results import TrinityResults
from py_scheduler.interfaces.trinity.runners.preparing import end_all, prepared_runners
from py_scheduler.interfaces.trinity.runners.process import is_of_processes
from py_scheduler.interfaces.trinity.runners.workflow_runner import Status
from py_scheduler.interfaces.trinity.views import TrinityViews
from py_scheduler.interfaces.trinity.wrapper import RunnerWrapper

if TYPE_CHECKING:
    from collections.abc import Iterable

    from py_scheduler.domain.collecting import CollectReply
    from py_scheduler.domain.task import BatchId
    from py_scheduler.interfaces.trinity.protocols import TrinityConfig, TrinityTask

logger = logging.getLogger(__name__)


class Scheduler(TrinityViews):
    """Schedules tasks on runners, retries what fails, and hands results out by batch.

    stop_deadline_seconds: how long `stop` waits for running sub-tasks. stop_grace_seconds: how long a sub-task that was
    told to stop may take before its runner is killed. runner_class, status_class: for those who bring their own.
    """

    stop_deadline_seconds = 60.0
    stop_grace_seconds = 5.0
    runner_class: type[RunnerWrapper] = RunnerWrapper
    status_class: type[Any] = Status

    def __init__(self, config: TrinityConfig) -> None:
        """Raises InvalidArgumentError with every faulty field of the configuration."""
        check_config(config)
        explorer = config.explorer
        self.config = config
        self.default_timeout = default_timeout(config)
        self.max_retry_times = explorer.max_retry_times
        self.max_repeat_times = explorer.max_repeat_times_per_runner
        self.runner_num = explorer.rollout_model.engine_num * explorer.runner_per_model
        self.running = False
        self._local = TrinityEngine(config, range(self.runner_num), self.stop_grace_seconds)
        self._results = TrinityResults(self._local, self.status_class)
        self._changing = asyncio.Lock()
        self._is_closed = False
        self._thread_id: int | None = None
        """Of the loop, once there is one."""
        self._reporting: asyncio.Task[None] | None = None

    # Start and stop

    async def start(self) -> None:
        """Prepares the runners and lets them work; does nothing when it is running.

        At most `runner_prepare_concurrency` are prepared at once, each with `runner_prepare_max_retries` further tries.
        Raises RunnerStartError when one cannot be; then no runner is left, and what was scheduled waits on. Raises
        FailedPreconditionError after `close`.
        """
        async with self._changing:
            self._check_usable()
            if self.running:
                return
            runners = await prepared_runners(self._new_runner, range(self.runner_num), self.config.explorer)
            try:
                await self._local.open()
            except BaseException:
                await end_all(runners)
                raise
            self._thread_id = threading.get_ident()
            self.running = True
            for runner in runners:
                self._local.runners.join(runner)
            interval = self.config.explorer.runner_state_report_interval
            if interval > 0:
                self._reporting = asyncio.create_task(self.report_states(interval), name="runner states")

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
        self._is_closed = True
        await self._local.close()

    def _check_usable(self) -> None:
        if self._is_closed:
            raise FailedPreconditionError("this scheduler was closed: make another one")

    def _new_runner(self, runner_id: int) -> RunnerWrapper:
        explorer = self.config.explorer
        runner = self.runner_class(
            runner_id,
            runner_id % explorer.rollout_model.engine_num,
            [runner_id % model.engine_num for model in explorer.auxiliary_models],
            self.config,
        )
        runner.run_once = partial(run_once, self._local)
        return runner

    # Tasks in

    def schedule(self, tasks: Iterable[TrinityTask], batch_id: BatchId) -> None:
        """Adds tasks to a batch; they wait for `start` if need be. All are taken or, with an error, none.

        Their ids count on from those that the batch has. (The original counts each call's tasks from 0 and loses
        results.) Raises InvalidArgumentError (a task without repeats, a batch id that is none), ResourceExhaustedError,
        FailedPreconditionError (called from another thread than the loop's, or after `close`).
        """
        self._check_usable()
        if self._thread_id not in (None, threading.get_ident()):
            raise FailedPreconditionError(
                "this is not the thread of the scheduler's loop: use loop.call_soon_threadsafe(scheduler.schedule, ...)"
            )
        tasks = list(tasks)
        if not tasks:
            return
        check_tasks(tasks, are_sent=is_of_processes(self.config))
        first = self._local.next_task_no(batch_id)
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
        self._local.submit(wrappers, batch_id)

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
        return [self._status(result) for result in reply.results], reply.payloads

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
        return [self._status(result) for result in reply.results]

    async def drain_batch_payload_results(self, batch_id: BatchId) -> tuple[list[Any], list[bytes]]:
        """What is done of a batch now, handed out; the rest goes on."""
        reply = await self._results.drain(batch_id)
        return [self._status(result) for result in reply.results], reply.payloads

    def discard_completed_results(self, batch_id: BatchId) -> None:
        """Forgets what is done of a batch, and how many tasks it had."""
        self._results.discard(batch_id)

    async def abort_batch(
        self, batch_id: BatchId, return_partial_tasks: bool = False, restart_runners: bool = True
    ) -> None:
        """Stops what is not done of a batch; returns when it has stopped. What is done can still be drained.

        Does nothing for a batch that is unknown.
        """
        await self._results.abort(batch_id, partial=return_partial_tasks, restart_runners=restart_runners)

    def stopped_without_result(self, batch_id: BatchId) -> list[Any]:
        """Beyond the seed: of the last stop in a batch, a status of each task that left no result, with the reason.

        In the original they vanish. Known of the thousand batches that were stopped last.
        """
        return self._results.without_result(batch_id)

    def has_step(self, batch_id: BatchId) -> bool:
        """Whether anything of the batch waits, runs or is to be collected."""
        return self._local.has_step(batch_id)

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
        check_wait(min_num, timeout)
        seconds = self.default_timeout if timeout is None else min(max(timeout, 0.0), MAX_COLLECT_SECONDS)
        return await self._results.collect(batch_id, min_num, seconds, clear=clear, partial=partial, payloads=payloads)
