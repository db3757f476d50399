"""Every call that changes something, sent again in every phase: at the same time, while its work runs, after it."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

import pytest

from py_scheduler.client import PlacementClient, SchedulerClient
from py_scheduler.domain.requests import Delivery
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import AlreadyExistsError
from tests.contract.conftest import whole_server
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

CONFIG = """
[server]
listen = "127.0.0.1:0"
[cluster.layout]
n1 = { gpus = [0, 1, 2, 3], cpu = 64, memory_gb = 64 }
[[evaluator]]
evaluator_id = "quick"
handler = "tests.support.agents.app_handlers:Echo"
resource = { gpu = 1, concurrency = 8 }
run_resource = { gpu = 0.25 }
[[evaluator]]
evaluator_id = "endless"
handler = "tests.support.agents.app_handlers:Echo"
handler_args = { seconds = 3600 }
resource = { gpu = 1, concurrency = 8 }
run_resource = { gpu = 0.25 }
"""


@pytest.fixture
async def address() -> AsyncIterator[str]:
    async with whole_server(CONFIG) as bound:
        yield bound


def tasks(task_type: str, count: int = 4) -> list[Task]:
    return [Task(config=TaskConfig(task_type=task_type), prompt=str(number)) for number in range(count)]


@pytest.mark.parametrize("task_type", ["quick", "endless"])
async def test_a_submit_is_the_same_before_while_and_after_its_tasks_run(
    client: SchedulerClient, task_type: str
) -> None:
    """`endless` waits and runs, `quick` is done in between."""
    async with asyncio.timeout(30):
        replies = await asyncio.gather(*[client.submit(tasks(task_type), 7, request_id="r") for _ in range(5)])
        if task_type == "quick":
            done = 0
            async for frame in client.watch(submission_id=replies[0].submission_id, cursor=replies[0].cursor):
                done += sum(type(record.event).__name__ == "TaskDone" for record in frame.records)
                if done == 4:
                    break
        replies.append(await client.submit(tasks(task_type), 7, request_id="r"))
        assert all(reply == replies[0] for reply in replies)
        view = await client.get_submission(7)
        assert view.open_tasks + view.succeeded_tasks == 4
        with pytest.raises(AlreadyExistsError):
            await client.submit(tasks(task_type, 3), 7, request_id="r")


async def test_an_abort_stops_once_and_says_so_again(client: SchedulerClient) -> None:
    async with asyncio.timeout(30):
        submission = await client.submit(tasks("endless"), 7)
        submission_id = submission.submission_id
        replies = await asyncio.gather(*[client.abort(submission_id=submission_id) for _ in range(3)])
        replies.append(await client.abort(submission_id=submission_id))
        assert sum(reply.aborted_tasks for reply in replies) == 4
        assert not any(reply.still_stopping for reply in replies)
        assert (await client.get_submission(7)).aborted_tasks == 4


async def are_collectable(client: SchedulerClient, batch_id: int, count: int) -> bool:
    """What is collected is not watched here."""
    return (await client.get_submission(batch_id)).collectable_tasks == count


async def test_an_abort_and_a_discard_repeated_late_leave_alone_what_came_since(client: SchedulerClient) -> None:
    """As a client's own retry does, whose first try was carried out but not answered."""
    async with asyncio.timeout(30):
        await client.submit(tasks("endless"), 7)
        first = await client.abort(7, request_id="abort")
        await client.submit(tasks("endless", 3), 7)
        assert await client.abort(7, request_id="abort") == first
        assert (await client.get_submission(7)).open_tasks == 3
        with pytest.raises(AlreadyExistsError, match="'abort'"):
            await client.abort(8, request_id="abort")
        await client.submit(tasks("endless"), 10, delivery=Delivery.COLLECT)
        await client.discard(10, request_id="nothing yet")
        await client.submit(tasks("quick", 1), 10, delivery=Delivery.COLLECT)
        await eventually(partial(are_collectable, client, 10, 1), pause_seconds=0.01)
        await client.discard(10, request_id="nothing yet")
        assert (await client.get_submission(10)).collectable_tasks == 1
        for count in (1, 2):
            await client.submit(tasks("quick", count), 9, delivery=Delivery.COLLECT)
            await eventually(partial(are_collectable, client, 9, count), pause_seconds=0.01)
            await client.discard(9, request_id="discard")
        assert (await client.get_submission(9)).collectable_tasks == 2


async def test_a_lease_is_acquired_renewed_and_released_once(address: str) -> None:
    gpu = Resource(gpu=1)
    async with PlacementClient(address) as client, asyncio.timeout(30):
        held = [await client.acquire(gpu, 4, request_id="r") for _ in range(3)]
        assert {lease.lease_id for lease in held} == {held[0].lease_id}
        lease = held[0]
        for _ in range(3):
            assert await client.renew(lease) > 0
        freed = [await client.release(lease, request_id="free") for _ in range(3)]
        assert [reply.released_tokens for reply in freed] == [4, 4, 4]
        assert (await client.acquire(gpu, 4, request_id="next")).lease_id != lease.lease_id
