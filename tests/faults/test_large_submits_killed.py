"""A server is killed in the middle of a large submit: all of its tasks are there afterwards, or none is."""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING

import grpc
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.errors import NotFoundError
from py_scheduler.wire.tasks import encode_submission_chunks
from tests.faults.failpoints import VARIABLE
from tests.support.servers.grpc_calls import submit_raw
from tests.support.servers.served_process import served_process

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

    from tests.support.servers.served_process import ServedProcess

pytestmark = [pytest.mark.slow]

TASKS = 100_000
CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "state"
[cluster.layout]
"10.0.0.1" = {{ gpus = [], cpu = 16, memory_gb = 16 }}
[[evaluator]]
evaluator_id = "gated"
handler = "tests.support.agents.app_handlers:Gated"
handler_args = {{ gate = "{folder}/gate" }}
resource = {{ cpu = 1.0, concurrency = 1 }}
run_resource = {{ cpu = 1.0 }}
"""


def serving(folder: Path, failpoints: str = "") -> AbstractAsyncContextManager[ServedProcess]:
    config = folder / "scheduler.toml"
    config.write_text(CONFIG.format(folder=folder))
    return served_process(config, "tests.faults.served", {VARIABLE: failpoints})


@pytest.fixture(scope="module")
def message() -> bytes:
    """All of them in one call."""
    tasks = [Task(config=TaskConfig(task_type="gated"), client_key=str(number)) for number in range(TASKS)]
    (chunk,) = encode_submission_chunks(tasks, SubmissionKey(1), "r", TASKS, 1 << 30)
    raw: bytes = chunk.request.SerializeToString()
    return raw


async def submitted(address: str, message: bytes) -> tuple[str, ...]:
    raw = await asyncio.to_thread(submit_raw, address, message)
    return tuple(service.SubmitTasksResponse.FromString(raw).task_ids)


async def open_tasks(address: str) -> int:
    async with SchedulerClient(address) as client:
        try:
            return (await client.get_submission(1)).open_tasks
        except NotFoundError:
            return 0


@pytest.mark.parametrize(
    ("moment", "kept"),
    [
        (0.2, {0, TASKS}),
        (0.5, {0, TASKS}),
        ("in_commit:kill", {0}),
        ("before_mark:kill@3", {TASKS}),  # A store that is new is marked twice before.
    ],
)
async def test_all_of_its_tasks_are_there_once_or_none(
    tmp_path: Path, message: bytes, moment: float | str, kept: set[int]
) -> None:
    """moment: a failpoint, or so many seconds after the call began. kept: how many a restart may find."""
    address = f"unix:{tmp_path}/s.sock"
    async with asyncio.timeout(60):
        async with serving(tmp_path, moment if isinstance(moment, str) else "") as served:
            call = asyncio.create_task(submitted(address, message))
            if isinstance(moment, float):
                await asyncio.wait([call], timeout=moment)
                served.process.kill()
            assert await served.process.wait() == -signal.SIGKILL
            try:
                answered = await call
            except grpc.RpcError:
                answered = ()
        async with serving(tmp_path):
            assert (found := await open_tasks(address)) in kept
            assert found == TASKS or not answered, "what was acknowledged is there"
            task_ids = await submitted(address, message)
            assert answered in {(), task_ids}
            assert len(set(task_ids)) == TASKS
            assert await open_tasks(address) == TASKS
            assert await submitted(address, message) == task_ids
