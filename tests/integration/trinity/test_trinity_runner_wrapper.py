"""`run_with_retry`: one sub-task on one runner, with a scheduler and without."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace
from typing import Any

import pytest

from py_scheduler.errors import FailedPreconditionError
from py_scheduler.interfaces.trinity import (
    RunnerWrapper,
    TaskWrapper,
)
from tests.support.runners.trinity_workflows import Gate, new_config, read, started, told
from tests.support.waiting import eventually


async def test_run_with_retry_plays_on_that_runner_and_no_other() -> None:
    gate, tries = Gate(), []

    async def fail_once(workflow: Any) -> None:
        tries.append(workflow)
        if len(tries) == 1:
            raise ValueError("once")

    async with started(max_retry_times=1) as scheduler:
        scheduler.schedule([told(gate)], 0)
        await gate.arrived.wait()
        (busy,) = scheduler.busy_runners
        other = 1 - busy
        wrapper = TaskWrapper(replace(told(fail_once, 2), batch_id=7, task_id=3), 7, total_runs=2)
        status, payload, runner_id, seconds = await scheduler.runners[other].run_with_retry(wrapper, 2, 4, 30.0, False)
        assert (status.ok, runner_id) == (True, other)
        assert status.metrics[-1] == {"time/task_execution": seconds}
        assert [(made.eid.batch, made.eid.task, made.eid.run) for made in read([payload])] == [(7, 3, 4), (7, 3, 5)]
        waiting = asyncio.ensure_future(scheduler.runners[busy].run_with_retry(wrapper, 1, 0, 30.0, False))
        for _ in range(20):
            await asyncio.sleep(0)
        assert not waiting.done()
        gate.open()
        assert (await waiting)[2] == busy
        assert len(await scheduler.get_statuses(0)) == 1
        assert scheduler.total_completed_steps == 1


async def test_run_with_retry_of_a_runner_without_a_scheduler() -> None:
    config = new_config(max_retry_times=0)
    runner = RunnerWrapper(4, 0, [], config)
    await runner.prepare()
    wrapper = TaskWrapper(replace(told(repeats=2), batch_id="x", task_id=0), "x")
    status, payload, runner_id, _ = await runner.run_with_retry(wrapper, 2, 0, 5.0, False)
    assert (status.ok, runner_id, len(read([payload]))) == (True, 4, 2)


async def test_a_run_with_retry_that_is_given_up_leaves_nothing_behind() -> None:
    """Whichever turn it is in, also when its result is there and was not handed out."""
    async with started() as scheduler:
        ledger = scheduler._local.engine.ledger
        wrapper = TaskWrapper(replace(told(), batch_id=7, task_id=3), 7, total_runs=1)
        for turns in itertools.count():
            call = asyncio.ensure_future(scheduler.runners[0].run_with_retry(wrapper, 1, 0, 30.0, False))
            for _ in range(turns):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait([call])
            await eventually(lambda: ledger.open_tasks == 0)
            assert (ledger.results.kept_bytes, scheduler._local.wrappers) == (0, {})
            if not call.cancelled():
                break
        assert turns > 5


async def test_run_with_retry_needs_a_scheduler_that_runs() -> None:
    async with started() as scheduler:
        runner = scheduler.runners[0]
    with pytest.raises(FailedPreconditionError, match="not running"):
        await runner.run_with_retry(TaskWrapper(told(), 0), 1, 0, 1.0, False)
