"""Real servers that are killed, and stores that two of them want."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

import pytest

from py_scheduler.cli import main
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import AttemptEnded, AttemptStarted, TaskDone
from py_scheduler.domain.results import AttemptState, TaskState
from py_scheduler.domain.task import Task, TaskConfig
from tests.support.servers.served_process import ROOT, served_process

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.domain.requests import WatchedRecord

CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "state"
checkpoint_bytes = 65536
[scheduler]
max_running_samples = 32
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Recording"
handler_args = {{ seconds = 0.005 }}
resource = {{ concurrency = 8 }}
"""


def config_in(folder: Path) -> Path:
    config = folder / "scheduler.toml"
    config.write_text(CONFIG.format(folder=folder))
    return config


async def test_killed_again_and_again_in_mid_batch_nothing_is_lost_and_nothing_ends_twice(tmp_path: Path) -> None:
    """One client stays through it all: it submits, watches from the start and goes on after each kill."""
    config, chance = config_in(tmp_path), random.Random(7)
    submits, tasks_each, kills = 10, 60, 4
    wanted = submits * tasks_each
    kill_at = sorted(chance.sample(range(20, wanted - 20), kills))
    records: list[WatchedRecord] = []
    async with SchedulerClient(f"unix:{tmp_path}/s.sock", reconnect_seconds=60) as client, AsyncExitStack() as stack:
        served = await stack.enter_async_context(served_process(config))

        async def submit(number: int) -> tuple[str, ...]:
            tasks = [Task(config=TaskConfig(task_type="echo"), prompt=f"{number}/{n}") for n in range(tasks_each)]
            return (await client.submit(tasks, number, request_id=f"request-{number}")).task_ids

        submitting = [asyncio.create_task(submit(number)) for number in range(submits)]
        done = 0
        async with aclosing(client.watch()) as frames:
            async for frame in frames:
                records += frame.records
                done += sum(isinstance(record.event, TaskDone) for record in frame.records)
                if kill_at and done >= kill_at[0]:
                    kill_at.pop(0)
                    served.process.kill()
                    await served.process.wait()
                    served = await stack.enter_async_context(served_process(config))
                if done >= wanted:
                    break
        acknowledged = [task_id for task_ids in await asyncio.gather(*submitting) for task_id in task_ids]
        for number in range(submits):
            assert await submit(number) == await submitting[number], "asked again it is the same answer"
        served.process.terminate()
        assert await served.process.wait() == 0
    assert [record.sequence for record in records] == list(range(1, len(records) + 1))
    ends = [record.event for record in records if isinstance(record.event, TaskDone)]
    assert Counter(event.task_id for event in ends) == Counter(acknowledged)
    assert {event.state for event in ends} == {TaskState.SUCCEEDED}
    lost = [r.event for r in records if isinstance(r.event, AttemptEnded) and r.event.state is AttemptState.LOST]
    assert lost, "something was running at one of the kills"
    assert {event.next_attempt_no > 1 for event in lost} == {True}
    starts = Counter(r.event.task_id for r in records if isinstance(r.event, AttemptStarted))
    assert starts == Counter(acknowledged) + Counter(event.task_id for event in lost)


async def serve_in_vain(*arguments: str) -> str:
    """What a server says that does not come up."""
    serve = ("-m", "py_scheduler.cli", "serve", *arguments)
    process = await asyncio.create_subprocess_exec(
        sys.executable, *serve, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )
    _, said = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 1
    return said.decode()


async def test_a_second_server_on_the_same_store_ends_at_once_and_says_why(tmp_path: Path) -> None:
    config = config_in(tmp_path)
    async with served_process(config) as served:
        said = await serve_in_vain("--config", str(config), "--listen", "127.0.0.1:0")
        assert f"in use by process {served.process.pid}" in said
        assert "--state-dir" in said


async def test_the_command_looks_after_a_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = config_in(tmp_path)
    async with served_process(config) as served, SchedulerClient(f"unix:{tmp_path}/s.sock") as client:
        tasks = [Task(config=TaskConfig(task_type="echo"), prompt=str(n)) for n in range(5)]
        async for _ in client.rollout(tasks, batch_id=1):
            pass
        assert main(["journal", "check", "--config", str(config)]) == 1, "it is in use"
        assert "in use by process" in capsys.readouterr().err
        served.process.kill()
        await served.process.wait()
    assert main(["journal", "check", "--config", str(config)]) == 0
    assert "sequences 1 to 16" in capsys.readouterr().out
    assert main(["journal", "export", "--state-dir", str(tmp_path / "state")]) == 0
    events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert Counter(event["event"] for event in events) == {
        "TasksAccepted": 1,
        "AttemptStarted": 5,
        "AttemptEnded": 5,
        "TaskDone": 5,
    }
    (ended, *_) = [event for event in events if event["event"] == "AttemptEnded"]
    assert ended["samples"][0]["trajectory"]["token_id_bytes"] == "AQAAAAIAAAADAAAA"
    assert main(["journal", "compact", "--config", str(config)]) == 0
    assert "0 tasks are open" in capsys.readouterr().out
    content = bytearray((tmp_path / "state/journal.db").read_bytes())
    content[content.index(b"AttemptStarted") + 3] ^= 1
    (tmp_path / "state/journal.db").write_bytes(content)
    assert main(["journal", "check", "--config", str(config)]) == 1
    assert "LOST: events" in capsys.readouterr().out
    said = await serve_in_vain("--config", str(config))
    assert "is damaged: the events" in said
    assert "journal recover" in said
    assert main(["journal", "recover", "--config", str(config)]) == 0
    assert "LOST: events" in capsys.readouterr().out
    async with served_process(config), SchedulerClient(f"unix:{tmp_path}/s.sock") as client:
        assert (await client.get_submission(1)).succeeded_tasks == 5
