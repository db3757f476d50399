"""Runners in processes that die, exit, block and cannot be started, as a trainer sees it that pulls its results:
in-process, and from a server in another process over gRPC. Capacity comes back, and no task is lost.

`tests/ray/test_ray_faults.py` plays the same on a Ray cluster.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING

import pytest

from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from tests.support.runners.runner_faults import EXITED_HARD, KILLED, Run, configuration, task
from tests.support.trainers.pulling import WAYS, pulling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path


@pytest.fixture(params=WAYS)
async def run(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Run]:
    async with pulling(request.param, configuration(tmp_path, "process")) as trainer:
        yield Run(trainer, tmp_path, "process")


async def test_a_runner_killed_in_mid_task_costs_a_try_and_the_batch_ends_on_time(run: Run) -> None:
    ids = await run.trainer.schedule([task(f"wait_once {run.pipe} {run.mark}"), *[task("fine") for _ in range(4)]], 1)
    os.kill(await run.pipe.told(), signal.SIGKILL)
    reply = await run.trainer.collect(1, timeout_seconds=30)
    assert not reply.is_timed_out
    assert {result.task_id: result.ok for result in reply.results} == dict.fromkeys(ids, True)
    (retried,) = [result for result in reply.results if result.task_id == ids[0]]
    assert [(sample.attempt_no, sample.termination_reason) for sample in retried.samples] == [(2, "attempt 2")]
    await run.all_runners_work()


@pytest.mark.parametrize("prompt", ["exit 1", "exit_hard 1"])
async def test_exit_in_a_workflow_fails_its_task_alone(run: Run, prompt: str) -> None:
    ids = await run.trainer.schedule([task(prompt), *[task("fine") for _ in range(4)]], 1)
    reply = await run.trainer.collect(1, timeout_seconds=30)
    assert {result.task_id: result.ok for result in reply.results} == {id_: id_ != ids[0] for id_ in ids}
    (failed,) = [result for result in reply.results if not result.ok]
    assert failed.message.startswith("0/1 runs completed successfully.")
    assert (EXITED_HARD[run.kind] if prompt == "exit_hard 1" else "exit status 1") in failed.message
    await run.all_runners_work()


async def test_a_blocking_sleep_that_ignores_its_stop_times_out_and_its_runner_is_replaced(run: Run) -> None:
    before = {view.pid for view in await run.trainer.runners()}
    await run.trainer.schedule([task(f"block {run.unheard}", attempt_timeout_seconds=0.3), task("fine")], 1)
    reply = await run.trainer.collect(1, timeout_seconds=30)
    assert not before <= {view.pid for view in await run.trainer.runners()}
    assert sorted(result.ok for result in reply.results) == [False, True]
    assert any("the attempt took over 0.3 s" in result.message for result in reply.results)
    await run.all_runners_work()


async def test_a_blocking_sleep_is_ended_by_the_timeout_of_a_collect(run: Run) -> None:
    await run.trainer.schedule([task(f"block {run.pipe}"), task("fine")], 1)
    pid = await run.pipe.told()
    enough = {"min_num": 1, "wait_after_min_seconds": 0.0, "clear_unfinished": False}
    first = await run.trainer.collect(1, timeout_seconds=30, **enough)
    assert [result.ok for result in first.results] == [True]
    reply = await run.trainer.collect(1, timeout_seconds=0.1)
    assert (reply.is_timed_out, reply.results) == (True, ())
    assert [unfinished.is_stopped for unfinished in reply.unfinished] == [True]
    await run.all_runners_work()
    assert pid not in {view.pid for view in await run.trainer.runners()}


async def test_a_restart_that_fails_twice_is_tried_again_until_the_runner_is_there(run: Run) -> None:
    run.there.unlink()
    ids = await run.trainer.schedule([task("die"), task("die")], 1)
    await run.trainer.schedule([task("fine") for _ in range(4)], 2)
    await run.until_one_has_failed()
    assert "not yet" in " ".join([view.message for view in await run.trainer.runners()])
    run.there.touch()
    reply = await run.trainer.collect(1, timeout_seconds=60)
    assert {result.task_id for result in reply.results} == set(ids)
    told = (KILLED[run.kind], "no runner could be started: ")
    assert all(any(words in result.message for words in told) for result in reply.results)
    assert [result.ok for result in (await run.trainer.collect(2, timeout_seconds=60)).results] == [True] * 4
    await run.all_runners_work()


async def test_what_a_timed_out_attempt_reports_late_changes_nothing(run: Run) -> None:
    # On a busy machine others than the first may time out too, before they have done anything.
    tries = RetryPolicy(max_retries=100)
    config = TaskConfig(task_type="workflow", retry=tries, attempt_timeout_seconds=0.3)
    await run.trainer.schedule([Task(config=config, prompt="return_late")], 1)
    (result,) = (await run.trainer.collect(1, timeout_seconds=60)).results
    assert result.ok
    (sample,) = result.samples
    assert sample.attempt_no > 1
    assert sample.termination_reason == f"attempt {sample.attempt_no}"
    assert result.metrics["attempt"] == sample.attempt_no
    assert result.payloads == (sample.termination_reason.encode(),)


async def test_a_drained_id_is_used_again_at_once_while_runners_die(run: Run) -> None:
    for _ in range(3):
        ids = await run.trainer.schedule([task("exit_hard 1"), task("fine"), task("fine")], 7)
        reply = await run.trainer.collect(7, timeout_seconds=30)
        assert {result.task_id for result in reply.results} == set(ids)
        assert not await run.trainer.has_step(7)
    await run.all_runners_work()


async def test_who_waits_hears_that_all_runners_died_and_that_none_can_be_started(run: Run) -> None:
    """Case 3 of the faults. Nothing here ends by a timeout: two tries of each task are all that it takes."""
    tasks = [task(f"wait {run.pipe}"), task(f"wait {run.pipe}"), task("fine"), task("fine")]
    ids = await run.trainer.schedule(tasks, 1)
    pids = {await run.pipe.told() for _ in range(2)}
    collecting = asyncio.create_task(run.trainer.collect(1))
    run.kills.touch()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(60):
        reply = await collecting
    assert not reply.is_timed_out
    assert {result.task_id: result.ok for result in reply.results} == dict.fromkeys(ids, False)
    for result in reply.results:
        assert "no runner could be started: the runner ended before it was ready" in result.message
        assert KILLED[run.kind] in result.message
    started = [(event.task_id, event.attempt_no) for event in await run.trainer.starts(8)]
    assert sorted(started) == sorted((task_id, attempt_no) for task_id in ids for attempt_no in (1, 2))
    run.kills.unlink()
    await run.all_runners_work()
