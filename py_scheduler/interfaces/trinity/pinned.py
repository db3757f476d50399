"""One sub-task on one runner: what `RunnerWrapper.run_with_retry` does, by the engine that does everything else."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from py_scheduler.domain.collecting import CollectRequest
from py_scheduler.domain.limits import MAX_COLLECT_SECONDS
from py_scheduler.domain.requests import AbortRequest, SubmissionSelector
from py_scheduler.domain.task import RetryPolicy, SubmissionKey, TaskConfig
from py_scheduler.domain.values.metrics import TASK_SECONDS
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.interfaces.trinity.engine import PINNED, TrinityEngine, fresh_id, pinned_to

if TYPE_CHECKING:
    from py_scheduler.domain.collecting import TaskResult
    from py_scheduler.domain.requests import SubmitRequest
    from py_scheduler.interfaces.trinity.mirrors import TaskWrapper
    from py_scheduler.interfaces.trinity.protocols import RunStatus
    from py_scheduler.interfaces.trinity.runners.pooled import PooledRunner


async def run_once(
    local: TrinityEngine,
    runner: PooledRunner,
    task: TaskWrapper,
    repeat_times: int,
    run_id_base: int,
    timeout: float,
    collect_partial_runs: bool,
) -> tuple[RunStatus, bytes, float]:
    """On a runner of this engine. The seconds are those of the whole call, the wait for the runner included."""
    if not local.engine.is_running:
        raise FailedPreconditionError("the scheduler of this runner is not running: start() it first")
    config = TaskConfig(
        task_type=pinned_to(runner.runner_id),
        repeat_times=repeat_times,
        is_eval=True,  # It is no part of a training step, whatever the task is for.
        max_samples_per_subtask=None,
        keeps_partial=collect_partial_runs,
        attempt_timeout_seconds=timeout,
        retry=RetryPolicy(max_retries=runner.config.explorer.max_retry_times),
    )
    began_at = time.monotonic()
    key = SubmissionKey(f"{task.batch_id}/{fresh_id()}", PINNED)
    result = await _result_of(local, local.request(key, [(task, config)], run_id_base))
    seconds = time.monotonic() - began_at
    metrics = [dict(sample.metrics) for sample in result.samples if sample.is_scored]
    status = runner.status_class(
        result.succeeded_samples, result.planned_samples, [*metrics, {TASK_SECONDS: seconds}], result.message or None
    )
    return status, b"".join(result.payloads), seconds


async def run_alone(
    runner: PooledRunner,
    task: TaskWrapper,
    repeat_times: int,
    run_id_base: int,
    timeout: float,
    collect_partial_runs: bool,
) -> tuple[RunStatus, bytes, float]:
    """`run_once` for a prepared runner that belongs to no scheduler."""
    local = TrinityEngine(runner.config, [runner.runner_id])
    await local.open()
    try:
        local.runners.join(runner)
        return await run_once(local, runner, task, repeat_times, run_id_base, timeout, collect_partial_runs)
    finally:
        await local.runners.release(runner)
        await local.close()


async def _result_of(local: TrinityEngine, request: SubmitRequest) -> TaskResult:
    """Of the request's one task, which is stopped when its caller gives it up."""
    (task,) = request.tasks
    try:
        submission_id = local.engine.accept(request).submission_id
        try:
            reply = await local.collect(
                CollectRequest(
                    request_id=fresh_id(),
                    submission_id=submission_id,
                    namespace=PINNED,
                    timeout_seconds=MAX_COLLECT_SECONDS,
                )
            )
        except asyncio.CancelledError:
            selector = SubmissionSelector(submission_id=submission_id, namespace=PINNED)
            local.engine.results.forget(selector)  # It may be done by now, and nobody else knows of it.
            await local.engine.abort(AbortRequest(selector=selector, reason="given up by its caller"))
            raise
    finally:
        del local.wrappers[task.client_key]
    (result,) = reply.results
    return result
