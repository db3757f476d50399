"""The points exist, are reached, and do what they are told; and without them nothing of the package is touched."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import py_scheduler
from py_scheduler.client import PlacementClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import ResourceExhaustedError
from tests.faults import failpoints
from tests.faults.failpoints import EXIT_STATUS, POINTS, VARIABLE
from tests.support.servers.served_process import served_process
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from py_scheduler.client import Submission
    from tests.support.servers.served_process import ServedProcess

CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "state"
checkpoint_bytes = 65536
ballast_bytes = 65536
[cluster.layout]
"10.0.0.1" = {{ gpus = [0, 1], cpu = 16, memory_gb = 16 }}
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Recording"
resource = {{ gpu = 1.0, concurrency = 8 }}
run_resource = {{ gpu = 0.125 }}
"""


def serving(folder: Path, failpoints: str = "") -> AbstractAsyncContextManager[ServedProcess]:
    config = folder / "scheduler.toml"
    config.write_text(CONFIG.format(folder=folder))
    return served_process(config, "tests.faults.served", {VARIABLE: failpoints})


def client_of(folder: Path, reconnect_seconds: float = 30.0) -> SchedulerClient:
    return SchedulerClient(f"unix:{folder}/s.sock", reconnect_seconds=reconnect_seconds)


def echo(count: int, prompt: str = "") -> list[Task]:
    return [Task(config=TaskConfig(task_type="echo"), prompt=prompt) for _ in range(count)]


async def roll_out(client: SchedulerClient, count: int, batch_id: int, prompt: str = "") -> bytes:
    """The cursor after the last of so many TaskDone."""
    submission = await client.submit(echo(count, prompt), batch_id)
    done = 0
    async with aclosing(client.watch(submission_id=submission.submission_id, cursor=submission.cursor)) as frames:
        async for frame in frames:
            done += sum(isinstance(record.event, TaskDone) for record in frame.records)
            if done == count:
                await client.ack(frame.cursor, submission_id=submission.submission_id)
                return frame.cursor
    raise AssertionError("the stream ended")


# Nothing without the variable, and nothing in the package


def test_without_orders_every_method_is_the_package_s_own() -> None:
    assert failpoints.install("") == []
    for place, method in failpoints.methods():
        assert not hasattr(method, "__wrapped__"), place
        assert method.__module__ == place.partition(":")[0]


def test_only_the_methods_that_are_ordered_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = failpoints.owner_of(failpoints.METHODS["mark"])
    monkeypatch.setattr(owner, name, owner.__dict__[name])
    assert failpoints.install("before_mark:kill@3") == [failpoints.METHODS["mark"]]
    wrapped = [place for place, method in failpoints.methods() if hasattr(method, "__wrapped__")]
    assert wrapped == [failpoints.METHODS["mark"]]


def test_the_package_has_no_word_of_them() -> None:
    for file in Path(py_scheduler.__file__).parent.rglob("*.py"):
        assert "failpoint" not in file.read_text().lower(), file


async def test_the_command_itself_cannot_be_switched_by_the_variable(tmp_path: Path) -> None:
    config = tmp_path / "scheduler.toml"
    config.write_text(CONFIG.format(folder=tmp_path))
    every_kill = ", ".join(f"{point}:kill" for point in POINTS)
    async with served_process(config, environment={VARIABLE: every_kill}) as served, client_of(tmp_path) as client:
        await roll_out(client, 10, 1)
        assert served.process.returncode is None


@pytest.mark.parametrize("text", ["before_nothing:kill", "before_commit:burn", "before_commit", "before_commit:kill@x"])
def test_an_order_that_would_do_nothing_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not POINT:ACTION"):
        failpoints.parse(text)


# Reached


async def test_a_server_that_works_for_a_while_reaches_every_point(tmp_path: Path) -> None:
    noted = tmp_path / "noted"
    orders = ", ".join(f"{point}:note={noted}" for point in POINTS)
    async with serving(tmp_path, orders), client_of(tmp_path) as client, asyncio.timeout(60):
        async with PlacementClient(f"unix:{tmp_path}/s.sock") as placement:
            await placement.acquire(Resource(gpu=0.125))
        for number in range(100):
            await roll_out(client, 20, number, "x" * 1_000)
            if set(noted.read_text().split()) == set(POINTS):
                break
    assert set(noted.read_text().split()) == set(POINTS)


# Actions


@pytest.mark.parametrize(("action", "status"), [("kill", -signal.SIGKILL), ("exit", EXIT_STATUS)])
async def test_the_process_ends_at_the_point(tmp_path: Path, action: str, status: int) -> None:
    async with serving(tmp_path, f"before_commit:{action}") as served, client_of(tmp_path) as client:
        submitting = asyncio.create_task(client.submit(echo(1), 1, request_id="r"))
        assert await asyncio.wait_for(served.process.wait(), 20) == status
        assert not submitting.done(), "what was not committed is not acknowledged"
        async with serving(tmp_path):
            await submitting


async def test_it_stops_at_the_point_and_goes_on_when_it_is_continued(tmp_path: Path) -> None:
    async with serving(tmp_path, "before_commit:stop") as served, client_of(tmp_path) as client:
        submitting = asyncio.create_task(client.submit(echo(1), 1))
        await until_stopped(served.process.pid)
        assert not submitting.done()
        served.process.send_signal(signal.SIGCONT)
        await asyncio.wait_for(submitting, 20)


async def until_stopped(pid: int) -> None:
    stat = Path(f"/proc/{pid}/stat")
    # Nothing tells of it: neither the process, nor its parent without waiting for the child itself.
    await eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "T", pause_seconds=0.01)


async def test_nothing_is_acknowledged_or_published_while_the_commit_is_held_up(tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    async with serving(tmp_path, f"after_commit:wait={fifo}"), client_of(tmp_path) as client:
        submitting = asyncio.create_task(client.submit(echo(1), 1))
        async with aclosing(client.watch()) as frames:
            assert (await anext(frames)).records == ()
            # Opened once the server waits at the other end, which goes on when this one is closed.
            with await asyncio.to_thread(fifo.open, "wb"):
                assert not submitting.done()
            await asyncio.wait_for(submitting, 20)
            assert (await anext(frames)).records


async def test_a_disk_error_is_told_to_who_submits_and_gets_over_by_itself(tmp_path: Path) -> None:
    async with serving(tmp_path, "before_commit:raise, before_mark:raise@5"), client_of(tmp_path) as client:
        with pytest.raises(ResourceExhaustedError, match="send the same request again"):
            await client.submit(echo(1), 1, request_id="r")
        again = await until_taken(client)
        assert len(again.task_ids) == 1
        view = await client.get_submission(1)
        assert view.open_tasks + view.succeeded_tasks == 1, "taken in once, although it was asked for twice"


async def until_taken(client: SchedulerClient) -> Submission:
    """Sends the same request until the journal can be written again."""
    async with asyncio.timeout(20):
        while True:
            with suppress(ResourceExhaustedError):
                return await client.submit(echo(1), 1, request_id="r")
            await asyncio.sleep(0.1)
