"""The whole service, from a client to the real engine and back, in one process."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.app import build, running
from py_scheduler.client import SchedulerClient
from py_scheduler.config import parse_config
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import SampleDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import AlreadyExistsError, CursorExpiredError, UnplaceableError
from tests.contract.conftest import whole_server

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONFIG = """
[server]
listen = "127.0.0.1:0"
[cluster.layout]
n1 = { gpus = [0, 1], cpu = 64, memory_gb = 64 }
[[evaluator]]
evaluator_id = "quick"
handler = "tests.support.agents.app_handlers:Echo"
resource = { gpu = 1, concurrency = 8 }
run_resource = { gpu = 0.25 }
[[evaluator]]
evaluator_id = "endless"
handler = "tests.support.agents.app_handlers:Echo"
handler_args = { seconds = 3600 }
resource = { gpu = 2, concurrency = 2 }
run_resource = { gpu = 1 }
batch_size = 2
[[evaluator]]
evaluator_id = "huge"
handler = "tests.support.agents.app_handlers:Echo"
resource = { gpu = 8, concurrency = 8 }
run_resource = { gpu = 1 }
batch_size = 8
"""


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with whole_server(CONFIG) as bound:
        yield bound


@pytest.fixture
async def client(address: str) -> AsyncIterator[SchedulerClient]:
    async with SchedulerClient.connect(address) as opened:
        yield opened


def tasks(count: int, task_type: str = "quick", repeat_times: int = 1) -> list[Task]:
    config = TaskConfig(task_type=task_type, repeat_times=repeat_times)
    return [Task(config=config, prompt=str(number)) for number in range(count)]


async def test_every_sample_and_every_task_arrives_once(client: SchedulerClient) -> None:
    events = [event async for event in client.rollout(tasks(300, repeat_times=4), batch_id=7)]
    samples = Counter((event.task_id, event.sample_no) for event in events if isinstance(event, SampleDone))
    done = Counter(event.task_id for event in events if isinstance(event, TaskDone))
    assert (len(samples), len(done)) == (1_200, 300)
    assert set(samples.values()) == set(done.values()) == {1}


async def test_500_submits_under_one_request_id_run_once(client: SchedulerClient) -> None:
    replies = await asyncio.gather(*(client.submit(tasks(2), 7, request_id="r") for _ in range(500)))
    assert len(set(replies)) == 1
    frames = client.watch(submission_id=replies[0].submission_id, cursor=replies[0].cursor)
    done = 0
    while done < 2:
        done += sum(isinstance(record.event, TaskDone) for record in (await anext(frames)).records)
    await frames.aclose()
    assert (await client.get_submission(7)).succeeded_tasks == 2
    with pytest.raises(AlreadyExistsError):
        await client.submit(tasks(3), 7, request_id="r")


async def test_what_waits_says_why_and_an_abort_waits_for_the_stop(client: SchedulerClient) -> None:
    submission = await client.submit(tasks(4, "endless"), 7)
    frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
    started = 0
    while started < 2:
        started += sum(type(record.event).__name__ == "AttemptStarted" for record in (await anext(frames)).records)
    view = await client.get_submission(7)
    assert view.running_attempts == 2
    assert [sorted(batch.task_ids) for batch in view.waiting] == [sorted(submission.task_ids[2:])]
    assert "gpu" in view.waiting[0].reason.lower()
    reply = await client.abort(7, reason="enough")
    assert (reply.aborted_tasks, reply.still_stopping) == (4, ())
    done: list[TaskDone] = []
    while len(done) < 4:
        done += [record.event for record in (await anext(frames)).records if isinstance(record.event, TaskDone)]
    assert {(event.state, event.reason) for event in done} == {("aborted", "enough")}
    await frames.aclose()


async def test_an_abort_right_after_a_submit(client: SchedulerClient) -> None:
    submission = await client.submit(tasks(4, "endless"), 7)
    reply = await client.abort(submission_id=submission.submission_id)
    assert reply.still_stopping == ()
    assert (await client.get_submission(7)).aborted_tasks == 4


async def test_what_can_never_fit_is_refused_with_the_way_out(client: SchedulerClient) -> None:
    with pytest.raises(UnplaceableError, match="huge"):
        await client.submit(tasks(8, "huge"), 7)


async def test_a_cursor_of_a_server_before_is_refused(client: SchedulerClient) -> None:
    submission = await client.submit(tasks(1), 7)
    parts = build(parse_config(CONFIG), Path())
    bound = parts.api.bind()
    async with running(parts):
        await parts.api.start()
        async with SchedulerClient.connect(bound) as later:
            await later.submit(tasks(1), 8)
            with pytest.raises(CursorExpiredError) as caught:
                await anext(later.watch(submission_id=submission.submission_id, cursor=submission.cursor))
            assert caught.value.oldest_sequence == parts.scheduler.oldest_sequence
        await parts.api.stop()


async def test_an_own_filter_resumes_where_it_was(client: SchedulerClient) -> None:
    submission = await client.submit(tasks(50), 7)
    whole: list[int] = []
    async for frame in client.watch(submission_id=submission.submission_id, cursor=submission.cursor):
        whole += [record.sequence for record in frame.records]
        if sum(isinstance(record.event, TaskDone) for record in frame.records) and len(whole) == 151:
            break
    pieces: list[int] = []
    cursor = submission.cursor
    while len(pieces) < 151:
        frames = client.watch(submission_id=submission.submission_id, cursor=cursor)
        frame = await anext(frames)
        await frames.aclose()
        pieces += [record.sequence for record in frame.records]
        cursor = frame.cursor
    assert pieces == whole
