"""Runners in processes that die, exit, block and cannot be started, as a trainer sees it that pulls its results:
in-process, and from a server in another process over gRPC. Capacity comes back, and no task is lost.
"""

from __future__ import annotations

import asyncio
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from tests.support.children import Pipe
from tests.support.pulling import WAYS, Pulling, pulling

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

# Two runners: two nodes of one slot each. Two failures of any kind use up a task.
CONFIG = """
[server]
listen = "127.0.0.1:0"
[cluster.layout]
"10.0.0.1" = {{ gpus = [], cpu = 1, memory_gb = 1 }}
"10.0.0.2" = {{ gpus = [], cpu = 1, memory_gb = 1 }}
[scheduler]
retry_backoff_seconds = 0.0
stop_grace_seconds = 0.3
[[evaluator]]
evaluator_id = "workflow"
handler = "tests.support.child_handlers:OddAgent"
handler_args = {{ fault = "until:{there}" }}
resource = {{ cpu = 1, concurrency = 1 }}
run_resource = {{ cpu = 1 }}
eval_resource = {{ cpu = 1 }}
runner = "process"
runner_settings = {{ min_runners = 2, max_runners = 2, prepare_max_retries = 1 }}
"""


class Run:
    """A trainer at work, the pipe by which handlers tell, one at which nobody listens, and the file without which no
    runner starts.
    """

    def __init__(self, trainer: Pulling, tmp_path: Path) -> None:
        self.trainer = trainer
        self.pipe = Pipe(tmp_path / "pipe")
        self.unheard = Pipe(tmp_path / "unheard")
        self.mark = tmp_path / "mark"
        self.there = tmp_path / "there"

    async def all_runners_work(self, batch_id: str = "capacity") -> None:
        """Both of them, at once; and then a batch ends as if nothing had been."""
        trainer = self.trainer
        await trainer.schedule([task(f"wait {self.pipe}") for _ in range(2)], batch_id)
        pids = {await self.pipe.told() for _ in range(2)}
        assert len(pids) == 2
        assert sorted(view.pid for view in await trainer.runners()) == sorted(pids)
        await trainer.abort_batch(batch_id, return_partial_tasks=False)
        await trainer.schedule([task("fine") for _ in range(6)], batch_id)
        results = (await trainer.collect(batch_id, timeout_seconds=30)).results
        assert [result.ok for result in results] == [True] * 6


@pytest.fixture(params=WAYS)
async def run(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Run]:
    (tmp_path / "there").touch()
    config = tmp_path / "scheduler.toml"
    config.write_text(CONFIG.format(there=tmp_path / "there"))
    async with pulling(request.param, config) as trainer:
        yield Run(trainer, tmp_path)


def task(prompt: str, **config: Any) -> Task:
    return Task(config=TaskConfig(task_type="workflow", retry=RetryPolicy(max_retries=1), **config), prompt=prompt)


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
    assert "exit status 1" in failed.message
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
    async with asyncio.timeout(30):
        while "not yet" not in " ".join([view.message for view in await run.trainer.runners()]):  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    run.there.touch()
    reply = await run.trainer.collect(1, timeout_seconds=60)
    assert {result.task_id for result in reply.results} == set(ids)
    assert all("signal SIGKILL" in result.message for result in reply.results)
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
