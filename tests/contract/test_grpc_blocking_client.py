"""The blocking client: the same methods, from a plain thread."""

from __future__ import annotations

import asyncio
import inspect
from typing import TYPE_CHECKING

import pytest

from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import FailedPreconditionError, NotFoundError
from tests.contract.conftest import serve
from tests.support.servers.fake_engine import FakeEngine

if TYPE_CHECKING:
    from tests.contract.conftest import Served

TASKS = [Task(config=TaskConfig(task_type="agent")) for _ in range(1_200)]


def test_it_has_every_public_method_of_the_asyncio_client() -> None:
    lifecycle = {"open", "close", "connect"}
    for name, method in inspect.getmembers(SchedulerClient, inspect.isfunction):
        if not name.startswith("_") and name not in lifecycle:
            twin = inspect.signature(getattr(BlockingSchedulerClient, name))
            assert list(twin.parameters) == list(inspect.signature(method).parameters), name


async def test_calls_streams_and_errors() -> None:
    served = await serve(FakeEngine(finish_at_once=True))

    def trainer() -> list[str]:
        with BlockingSchedulerClient(served.address) as client:
            assert client.server_info().version == "1.2.3"
            done = [event.task_id for event in client.rollout(TASKS, batch_id=7) if isinstance(event, TaskDone)]
            again = client.submit(TASKS[:1], 8, request_id="r")
            frame = next(iter(client.watch(submission_id=again.submission_id, cursor=again.cursor)))
            assert frame.records
            assert client.abort(8).aborted_tasks == 0
            with pytest.raises(NotFoundError):
                client.get_submission(9)
            return done

    done = await asyncio.to_thread(trainer)
    assert sorted(done) == sorted(f"s-7-{number}" for number in range(1_200))
    await served.server.stop()
    assert served.engine.open_watches == 0


async def test_a_stream_left_early_is_closed(served: Served) -> None:
    def trainer() -> None:
        with BlockingSchedulerClient(served.address) as client:
            for _frame in client.watch():
                break

    await asyncio.to_thread(trainer)
    await served.engine.until(lambda: not served.engine.open_watches)
    assert served.engine.open_watches == 0


def test_it_says_so_when_it_is_not_open() -> None:
    with pytest.raises(FailedPreconditionError, match="not open"):
        BlockingSchedulerClient().server_info()
