"""What a served process keeps for watchers while others work: the caps by bytes and age, and who is behind them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING

import pytest

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import CursorExpiredError
from tests.faults.served import CLOCK_VARIABLE
from tests.support.servers.served_process import served_process

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from py_scheduler.domain.requests import WatchedFrame

pytestmark = [pytest.mark.slow]

CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "state"
checkpoint_bytes = 65536
ballast_bytes = 65536
{journal}
[scheduler]
{scheduler}
[[evaluator]]
evaluator_id = "large"
handler = "tests.support.agents.app_handlers:Large"
resource = {{ concurrency = 4 }}
"""
CAPS = {
    "bytes": ("", "retained_bytes = 2_000_000"),
    "events": ("", "retained_events = 200"),
    "age": ("retained_seconds = 1.0", ""),
}
HOUR = 3_600.0
UNREAD = 400
"""Events: more than what gRPC has taken for a stream that is not read."""


def config_of(folder: Path, journal: str = "", scheduler: str = "") -> Path:
    config = folder / "scheduler.toml"
    config.write_text(CONFIG.format(folder=folder, journal=journal, scheduler=scheduler))
    return config


async def roll_out(client: SchedulerClient, batch_id: int, count: int = 5, tokens: int = 20_000) -> None:
    """Each event of a sample is of 9 bytes a token: a batch fits under any cap, so it drops nothing of its own."""
    task = Task(config=TaskConfig(task_type="large"), prompt=str(tokens))
    submission = await client.submit([task] * count, batch_id)
    frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
    async with aclosing(frames):
        async for frame in frames:
            count -= sum(isinstance(record.event, TaskDone) for record in frame.records)
            if count <= 0:
                return


async def oldest_of(client: SchedulerClient, cursor: bytes, submission_id: str = "") -> int | None:
    """The oldest sequence, if it is younger than what comes after a cursor."""
    try:
        async with aclosing(client.watch(submission_id=submission_id, cursor=cursor)) as frames:
            await anext(frames)
    except CursorExpiredError as error:
        return error.oldest_sequence
    return None


@pytest.mark.parametrize("cap", CAPS)
async def test_who_reads_slower_than_the_caps_drop_is_told_of_the_gap_and_reads_no_other(
    tmp_path: Path, cap: str
) -> None:
    """Case 30 of the faults: of a stream that was open under load all the while. What is dropped for its age may stand
    in memory for as long as there is room, so there the server is killed, and the stream resumes at the next one.
    """
    path, config = f"unix:{tmp_path}/s.sock", config_of(tmp_path, *CAPS[cap])
    async with (
        SchedulerClient(path, reconnect_seconds=60.0) as working,
        SchedulerClient(path, reconnect_seconds=60.0) as slow,
        asyncio.timeout(100),
        AsyncExitStack() as stack,
    ):
        served = await stack.enter_async_context(served_process(config))
        await roll_out(working, 0)
        frames = slow.watch()
        first = await anext(frames)
        batch_id = 0
        while (await oldest_of(working, first.cursor) or 0) < first.through_sequence + UNREAD:
            batch_id += 1
            await roll_out(working, batch_id)
        if cap == "age":
            served.process.kill()
            await served.process.wait()
            await stack.enter_async_context(served_process(config))
        position, told = await follow(frames, first.through_sequence)
        assert told is not None, "what it had not read is gone"
        assert told > position + 1, "not one event is told of as lost that it had read"
        async with aclosing(slow.watch()) as again:
            frame = await anext(again)
            assert frame.records[0].sequence >= told, "and from there on all is there"
            sequences = [record.sequence for record in frame.records]
            assert sequences == list(range(sequences[0], frame.through_sequence + 1))


async def follow(frames: AsyncIterator[WatchedFrame], position: int) -> tuple[int, int | None]:
    """Reads to the end of a stream, which has no hole: up to where, and the oldest sequence if it ended by a gap."""
    try:
        async for frame in frames:
            assert frame.after_sequence == position
            assert [record.sequence for record in frame.records] == list(
                range(position + 1, frame.through_sequence + 1)
            )
            position = frame.through_sequence
    except CursorExpiredError as error:
        return position, error.oldest_sequence
    return position, None


@pytest.mark.parametrize("jump", [HOUR, -HOUR])
async def test_a_jump_of_the_wall_clock_drops_nothing_that_is_not_old(tmp_path: Path, jump: float) -> None:
    """Although checkpoints cover it; and what is old by the cap of bytes goes as ever."""
    clock = tmp_path / "clock"
    clock.write_text("0")
    config = config_of(tmp_path, "retained_seconds = 600.0", "retained_bytes = 20_000_000")
    async with (
        served_process(config, "tests.faults.served", {CLOCK_VARIABLE: str(clock)}),
        SchedulerClient(f"unix:{tmp_path}/s.sock") as client,
        asyncio.timeout(100),
    ):
        unread = await client.submit([Task(config=TaskConfig(task_type="large"), prompt="1")], "unread")
        for batch_id in range(60):  # One by one, so that they are many commits: few are not worth a discard.
            await roll_out(client, batch_id, count=1, tokens=1_000)
        (tmp_path / "jumped").write_text(str(jump))
        (tmp_path / "jumped").replace(clock)
        for batch_id in range(60, 100):
            await roll_out(client, batch_id, count=40, tokens=200)
        assert await oldest_of(client, unread.cursor, unread.submission_id) is None
        batch_id = 100
        while await oldest_of(client, unread.cursor, unread.submission_id) is None:
            batch_id += 1
            await roll_out(client, batch_id)
