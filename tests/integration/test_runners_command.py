"""`py-scheduler runners` of a server with process runners: who is at what."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import AttemptStarted
from py_scheduler.domain.task import Task, TaskConfig
from tests.support.served_process import ROOT, served_process

if TYPE_CHECKING:
    from pathlib import Path

CONFIG = """
[server]
listen = "127.0.0.1:0"
[[evaluator]]
evaluator_id = "workflow"
handler = "tests.support.collected_handlers:Prompted"
resource = { concurrency = 1 }
runner = "process"
runner_settings = { min_runners = 2, max_runners = 2 }
"""


async def runners_of(address: str) -> list[dict[str, str]]:
    """The rows of the table, by the names of its columns."""
    command = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "py_scheduler.cli",
        "runners",
        "--target",
        address,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
    )
    out, _ = await command.communicate()
    assert command.returncode == 0
    header, _, *rows = out.decode().splitlines()
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
