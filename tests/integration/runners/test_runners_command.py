"""`py-scheduler runners` and `abort` of a server with process runners: who is at what, and what is left."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import AttemptStarted
from py_scheduler.domain.task import Task, TaskConfig
from tests.support.runners.children import Pipe
from tests.support.servers.served_process import ROOT, served_process

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[server]
listen = "127.0.0.1:0"
[[evaluator]]
evaluator_id = "workflow"
handler = "tests.support.agents.collected_handlers:Prompted"
resource = { concurrency = 1 }
runner = "process"
runner_settings = { min_runners = 2, max_runners = 2 }
"""


async def command(*arguments: str) -> str:
    """What `py-scheduler` prints."""
    program = [sys.executable, "-m", "py_scheduler.cli", *arguments]
    process = await asyncio.create_subprocess_exec(*program, stdout=asyncio.subprocess.PIPE, cwd=ROOT)
    out, _ = await process.communicate()
    assert process.returncode == 0
    return out.decode()


async def runners_of(address: str) -> list[dict[str, str]]:
    """The rows of the table, by the names of its columns."""
    header, _, *rows = (await command("runners", "--target", address)).splitlines()
    columns = [cell.strip() for cell in header.split(" | ")]
    return [dict(zip(columns, (cell.strip() for cell in row.split(" | ")), strict=False)) for row in rows]


async def test_each_runner_and_what_it_is_at(tmp_path: Path) -> None:
    config = tmp_path / "scheduler.toml"
    config.write_text(CONFIG)
    async with served_process(config) as served, SchedulerClient(served.address) as client:
        idle = await runners_of(served.address)
        assert [(row["kind"], row["state"]) for row in idle] == [("process", "idle")] * 2
        task = Task(config=TaskConfig(task_type="workflow", repeat_times=1), prompt="hang")
        submission = await client.schedule([task], "7/math")
        assert submission is not None
        async for frame in client.watch(submission_id=submission.submission_id, cursor=submission.cursor):
            if any(isinstance(record.event, AttemptStarted) for record in frame.records):
                break
        (row,) = [row for row in await runners_of(served.address) if row["state"] == "busy"]
        assert (row["workflow_id"], row["task_id"]) == ("7/math/0/0", submission.task_ids[0])
        state = await client.get_key_state("workflow_id")
        assert list(state.values()) == ["7/math/0/0"]
        await client.abort_batch("7/math")
        assert {row["state"] for row in await runners_of(served.address)} <= {"idle", "starting"}


async def test_what_a_handler_shows_and_an_abort_that_keeps_and_restarts(tmp_path: Path) -> None:
    config, pipe = tmp_path / "scheduler.toml", Pipe(tmp_path / "pipe")
    config.write_text(CONFIG.replace("collected_handlers:Prompted", "child_handlers:OddAgent"))
    async with served_process(config) as served, SchedulerClient(served.address) as client:
        parts = TaskConfig(task_type="workflow", repeat_times=2, max_samples_per_subtask=1)
        await client.schedule([Task(config=parts, prompt=f"show_second {pipe}")], 1)
        pid = await pipe.told()
        (row,) = [row for row in await runners_of(served.address) if row["pid"] == str(pid)]
        assert (row["workflow_id"], row["turn"], row["mood"]) == ("1/0/1", "3", "? odd")
        said = await command("abort", "1", "--keep-partial", "--restart-runners", "--target", served.address)
        assert said == "1 tasks aborted\n"
        (result,) = (await client.drain(1)).results
        assert (result.succeeded_samples, result.planned_samples) == (1, 2)
        assert pid not in {view.pid for view in await client.list_runners()}
        assert await client.get_key_state("turn") == {}
