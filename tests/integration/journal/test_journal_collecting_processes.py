"""Servers that are killed with results that somebody has not confirmed, and with training that ran ahead."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from py_scheduler.app.journal import examine
from py_scheduler.cli import main
from py_scheduler.client import GenerationClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.task import Task, TaskConfig
from tests.support.models.controlled_sglang import ControlledSglang
from tests.support.servers.served_process import ServedProcess, served_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from py_scheduler.client import Submission

CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "state"
checkpoint_bytes = 65536
[generation.student]
kind = "sglang"
base_url = "{base_url}"
[scheduler.staleness.default]
max_staleness = 0
step_size = 2
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.agents.app_handlers:Delivering"
handler_args = {{ gate = "{folder}/gate" }}
resource = {{ concurrency = 16 }}
"""


def task(prompt: str, repeat_times: int = 2, *, is_eval: bool = False, text: str = "") -> Task:
    config = TaskConfig(task_type="agent", repeat_times=repeat_times, max_samples_per_subtask=1, is_eval=is_eval)
    return Task(config=config, prompt=prompt, data=text.encode())


@asynccontextmanager
async def served(config: Path, target: str) -> AsyncIterator[tuple[ServedProcess, SchedulerClient]]:
    async with served_process(config) as process, SchedulerClient(target, reconnect_seconds=20) as client:
        yield process, client


async def until_running(model: ControlledSglang, count: int) -> None:
    await model.until(lambda: len(model.running) == count)


@pytest.mark.parametrize("between", ["nothing", "checkpoint", "compact"])
async def test_what_was_not_confirmed_comes_again_and_training_runs_ahead_no_further(
    tmp_path: Path, between: str
) -> None:
    config, target = tmp_path / "scheduler.toml", f"unix:{tmp_path}/s.sock"
    async with ControlledSglang() as model, GenerationClient(target, reconnect_seconds=20) as generation:
        config.write_text(CONFIG.format(folder=tmp_path, base_url=model.base_url))
        async with served(config, target) as (process, client):
            assert (await generation.update_weights("/weights/1", "v1")).weight_epoch == 1
            # Evals, which the limit does not concern: some to be collected twice, some later, one that is half done.
            names = [f"eval {number}" for number in range(5)]
            evals = await client.schedule(
                [*(task(name, is_eval=True) for name in names), task("slow", is_eval=True)], 1
            )
            assert evals is not None
            await done(client, evals, 5)
            told = await client.collect(
                1, request_id="told", min_num=3, max_num=3, clear_unfinished=False, acknowledge=False
            )
            assert len(told.results) == 3
            # A step of training, of which the tokens were accepted; the next one has to wait.
            step = await client.schedule([task("generate")], 2)
            assert step is not None
            await until_running(model, 2)
            await model.step(10_000)
            assert [result.ok for result in (await client.collect(2)).results] == [True]
            await client.schedule([task("generate")], 3)
            assert (await client.get_submission(1)).collectable_tasks == 2
            (reason,) = {batch.reason for batch in (await client.get_submission(3)).waiting}
            assert "2 samples are accepted or running at weight_epoch 1" in reason
            if between == "checkpoint":
                await replayed_bytes(client)
            process.process.kill()
            await process.process.wait()
        if between == "compact":
            assert await asyncio.to_thread(main, ["journal", "compact", "--config", str(config)]) == 0
        checkpoint = examine(tmp_path / "state").checkpoint
        assert checkpoint is not None
        assert (checkpoint.through_sequence > 0) == (between != "nothing")
        async with served(config, target) as (process, client):
            (again,) = {batch.reason for batch in (await client.get_submission(3)).waiting}
            assert again == reason
            assert (await generation.states())["student"].weight_epoch == 1
            assert not model.running
            assert await client.collect(1, request_id="told", acknowledge=False) == told
            await client.ack_results("told")
            assert (await client.get_submission(1)).unacknowledged_tasks == 0
            (tmp_path / "gate").touch()
            rest = await client.collect(1)
            results = (*told.results, *rest.results)
            assert sorted(b"".join(result.payloads) for result in results) == sorted(
                f"{name} 0;{name} 1;".encode() for name in (*names, "slow")
            )
            for result in results:
                assert [sample.trajectory.token_ids.tolist() for sample in result.samples] == [[1, 2, 3], [1, 2, 4]]
            assert (await client.get_submission(submission_id=step.submission_id)).unacknowledged_tasks == 0
            assert (await generation.update_weights("/weights/2", "v2")).weight_epoch == 2
            await until_running(model, 2)
            await model.step(10_000)
            assert [result.ok for result in (await client.collect(3)).results] == [True]
            process.process.terminate()
            assert await process.process.wait() == 0


async def done(client: SchedulerClient, submission: Submission, count: int) -> None:
    """Until so many of its tasks are."""
    frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
    async with aclosing(frames):
        async for frame in frames:
            count -= sum(isinstance(record.event, TaskDone) for record in frame.records)
            if count <= 0:
                return


async def replayed_bytes(client: SchedulerClient) -> None:
    """So much happens that the journal is due for a checkpoint, and something more after it."""
    for number in range(4):
        tasks = [task("eval", is_eval=True, text="x" * 30_000) for _ in range(10)]
        async for _ in client.rollout(tasks, batch_id=f"filling {number}"):
            pass
