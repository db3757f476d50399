"""Faults of a served process that leave it, or the next one, a store or a clock that is not as it should be."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time
from contextlib import aclosing, closing
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sqlite_journal.store import connect
from py_scheduler.client import PlacementClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.leases import LeaseState
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import TaskState
from py_scheduler.domain.task import Task, TaskConfig
from tests.faults.failpoints import VARIABLE
from tests.faults.served import CLOCK_VARIABLE
from tests.support.servers.served_process import ROOT, served_process

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from py_scheduler.client import Submission
    from tests.support.servers.served_process import ServedProcess

pytestmark = [pytest.mark.slow]

CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "state"
[cluster.layout]
"10.0.0.1" = {{ gpus = [0, 1], cpu = 16, memory_gb = 16 }}
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Recording"
handler_args = {{ seconds = 0.005 }}
resource = {{ gpu = 1.0, concurrency = 4 }}
run_resource = {{ gpu = 0.25 }}
[[evaluator]]
evaluator_id = "gated"
handler = "tests.support.agents.app_handlers:Gated"
handler_args = {{ gate = "{folder}/gate" }}
resource = {{ gpu = 1.0, concurrency = 4 }}
run_resource = {{ gpu = 0.25 }}
run_timeout_seconds = 600
"""
HOUR = 3_600.0


def serving(folder: Path, failpoints: str = "", **variables: str) -> AbstractAsyncContextManager[ServedProcess]:
    config = folder / "scheduler.toml"
    config.write_text(CONFIG.format(folder=folder))
    return served_process(config, "tests.faults.served", {VARIABLE: failpoints, **variables})


def client_of(folder: Path) -> SchedulerClient:
    return SchedulerClient(f"unix:{folder}/s.sock")


def tasks(count: int, kind: str = "echo", deadline_seconds: float | None = None) -> list[Task]:
    config = TaskConfig(task_type=kind, task_deadline_seconds=deadline_seconds)
    return [Task(config=config, prompt=str(n)) for n in range(count)]


async def ends(client: SchedulerClient, submission: Submission) -> tuple[list[int], dict[str, TaskState]]:
    """The sequences of a submission's events, read to its end, and how its tasks ended."""
    sequences, states = [], dict[str, TaskState]()
    frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
    async with aclosing(frames):
        async for frame in frames:
            sequences += [record.sequence for record in frame.records]
            for event in (record.event for record in frame.records if isinstance(record.event, TaskDone)):
                assert event.task_id not in states, "a second terminal event"
                states[event.task_id] = event.state
            if len(states) == len(submission.task_ids):
                return sequences, states
    raise AssertionError("the stream ended")


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "py_scheduler.cli", *arguments, "--config", str(folder / "scheduler.toml")],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=60,
        check=False,
    )


# SIGSTOP


async def test_a_server_that_stood_still_goes_on_without_a_gap_and_without_timing_anything_out(tmp_path: Path) -> None:
    async with serving(tmp_path) as served, client_of(tmp_path) as client, asyncio.timeout(60):
        submission = await client.submit(tasks(200, deadline_seconds=30.0), 1)
        reading = asyncio.create_task(ends(client, submission))
        served.process.send_signal(signal.SIGSTOP)
        held_up = asyncio.create_task(client.submit(tasks(3), 2))
        done, _ = await asyncio.wait([held_up, reading], timeout=2.0)
        assert not done, "nobody is told that it failed"
        served.process.send_signal(signal.SIGCONT)
        await held_up
        sequences, states = await reading
        assert sequences == sorted(set(sequences))
        assert set(states.values()) == {TaskState.SUCCEEDED}


# Journals that a dead process left


async def killed_with_history(folder: Path) -> Submission:
    """A store that a server left when it was killed, with one submission that was acknowledged and done."""
    async with serving(folder) as served, client_of(folder) as client, asyncio.timeout(60):
        submission = await client.submit(tasks(100), 1)
        await ends(client, submission)
        served.process.kill()
        await served.process.wait()
    return submission


async def test_a_torn_end_that_nobody_was_told_of_is_dropped_and_the_server_starts(tmp_path: Path) -> None:
    """Killed between a commit and its acknowledgement, and of that commit half of the last page got to the disk."""
    submission = await killed_with_history(tmp_path)
    log = tmp_path / "state/journal.db-wal"
    async with asyncio.timeout(60):
        async with serving(tmp_path, "before_mark:kill") as served, client_of(tmp_path) as client:
            losing = asyncio.create_task(client.submit(tasks(20), 2, request_id="second"))
            assert await served.process.wait() == -signal.SIGKILL
            assert not losing.done()
            losing.cancel()
        with log.open("r+b") as file:
            file.truncate(log.stat().st_size - 2_000)
        async with serving(tmp_path), client_of(tmp_path) as client:
            sequences, states = await ends(client, submission)
            assert sequences == sorted(set(sequences))
            assert len(states) == 100
            again = await client.submit(tasks(20), 2, request_id="second")
            assert again.task_ids[0] in (await ends(client, again))[1]
    said = (tmp_path / "scheduler.log").read_text()
    assert "was torn and never acknowledged" in said


async def test_a_block_of_zeros_in_the_middle_refuses_to_start_and_recover_names_the_range(tmp_path: Path) -> None:
    await killed_with_history(tmp_path)
    async with serving(tmp_path) as served:
        # An orderly end brings everything from the log into the database.
        served.process.terminate()
        assert await served.process.wait() == 0
    database = tmp_path / "state/journal.db"
    content = bytearray(database.read_bytes())
    # Wherever it stands: pages that SQLite has split keep copies, and zeros in those hurt nobody.
    beginning = _beginning_of_the_largest_frame(database)
    while (found := content.find(beginning)) >= 0:
        at = found // 4_096 * 4_096
        content[at : at + 4_096] = bytes(4_096)
    database.write_bytes(content)
    refused = await asyncio.to_thread(command, tmp_path, "serve")
    assert refused.returncode == 1
    assert "damaged" in refused.stderr
    assert "journal recover" in refused.stderr
    recovered = await asyncio.to_thread(command, tmp_path, "journal", "recover")
    assert recovered.returncode == 0
    assert "LOST: events" in recovered.stdout
    async with serving(tmp_path), client_of(tmp_path) as client, asyncio.timeout(60):
        assert len((await ends(client, await client.submit(tasks(3), 3)))[1]) == 3


def _beginning_of_the_largest_frame(database: Path) -> bytes:
    with closing(connect(database, may_write=False)) as store:
        events = store.execute("SELECT events FROM frame ORDER BY length(events) DESC LIMIT 1").get
    assert isinstance(events, bytes)
    return events[:32]


# The wall clock


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_of_the_wall_clock_ends_nothing_early_and_nothing_late(tmp_path: Path, jump: float) -> None:
    """Deadlines, a run's timeout and a lease's ttl are all shorter than the jump; and afterwards they still work."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    async with (
        serving(tmp_path, **{CLOCK_VARIABLE: str(clock)}),
        client_of(tmp_path) as client,
        PlacementClient(f"unix:{tmp_path}/s.sock") as placement,
        asyncio.timeout(40),
    ):
        lease = await placement.acquire(Resource(gpu=0.25), ttl_seconds=300.0)
        running = await client.submit(tasks(2, "gated", deadline_seconds=300.0), 1)
        waiting = await client.submit(tasks(20, "gated", deadline_seconds=300.0), 2)
        (tmp_path / "jumped").write_text(str(jump))
        (tmp_path / "jumped").replace(clock)  # At once: the server reads it whenever it asks for the time.
        begun = time.monotonic()
        short = await client.submit(tasks(1, "gated", deadline_seconds=1.0), 3)
        _, states = await ends(client, short)
        assert set(states.values()) == {TaskState.FAILED}, "its own deadline, in its own time"
        assert 0.9 < time.monotonic() - begun < 20.0
        assert await placement.renew(lease) == pytest.approx(300.0)
        assert (await client.get_submission(1)).open_tasks == 2
        assert (await client.get_submission(2)).open_tasks == 20
        (tmp_path / "gate").touch()
        first, second = await ends(client, running), await ends(client, waiting)
        assert {*first[1].values(), *second[1].values()} == {TaskState.SUCCEEDED}
        assert (await placement.release(lease)).held_tokens == 0
        assert lease.state is LeaseState.GRANTED
        everything = client.watch()
        records = (await anext(everything)).records
        await everything.aclose()
        assert [record.sequence for record in records] == list(range(1, len(records) + 1)), "order is by sequence"


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_of_the_wall_clock_before_a_restart_ends_nothing_early(tmp_path: Path, jump: float) -> None:
    """Nor late: one task's deadline passes while no server is there."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    async with client_of(tmp_path) as client, asyncio.timeout(40):
        async with serving(tmp_path, **{CLOCK_VARIABLE: str(clock)}) as served:
            submission = await client.submit(tasks(1, "gated", deadline_seconds=300.0), 1)
            short = await client.submit(tasks(1, "gated", deadline_seconds=1.0), 2)
            served.process.kill()
            await served.process.wait()
        clock.write_text(str(jump))
        async with serving(tmp_path, **{CLOCK_VARIABLE: str(clock)}):
            assert set((await ends(client, short))[1].values()) == {TaskState.FAILED}
            (tmp_path / "gate").touch()
            _, states = await ends(client, submission)
            assert set(states.values()) == {TaskState.SUCCEEDED}
