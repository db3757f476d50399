"""What a client tells its user beside results: warnings of the server, and that nobody answers."""

from __future__ import annotations

import logging
import traceback
from typing import TYPE_CHECKING

import msgspec
import pytest

from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import InvalidArgumentError, ServerError
from tests.contract.conftest import serve
from tests.support.servers.fake_engine import FakeEngine

if TYPE_CHECKING:
    from py_scheduler.domain.requests import SubmitReply, SubmitRequest

WARNING = "no evaluator is called 'matth': its tasks run on 'math'"
TASKS = [Task(config=TaskConfig(task_type="matth"))] * 1_001
LOGGER = "py_scheduler.client"


class WarningEngine(FakeEngine):
    async def submit(self, request: SubmitRequest) -> SubmitReply:
        return msgspec.structs.replace(await super().submit(request), warnings=(WARNING,))


def said(caplog: pytest.LogCaptureFixture) -> list[tuple[str, int, str]]:
    return [record for record in caplog.record_tuples if record[0] == LOGGER]


async def test_a_rollout_and_a_submit_log_each_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    served = await serve(WarningEngine(finish_at_once=True))
    async with SchedulerClient(served.address) as client:
        assert [event async for event in client.rollout(TASKS, batch_id=1)]
        assert said(caplog) == [(LOGGER, logging.WARNING, WARNING)]
    caplog.clear()
    async with SchedulerClient(served.address) as client:
        submission = await client.submit(TASKS, 2)
    assert submission.warnings == (WARNING,)
    assert said(caplog) == [(LOGGER, logging.WARNING, WARNING)]
    await served.server.stop()


@pytest.mark.parametrize("of_a_stream", [False, True])
async def test_nobody_answers(of_a_stream: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with SchedulerClient("127.0.0.1:1", reconnect_seconds=0.2) as client:
        with pytest.raises(ServerError) as caught:
            await (anext(client.watch()) if of_a_stream else client.server_info())
    assert str(caught.value) == "no py-scheduler answers at 127.0.0.1:1: start it with `py-scheduler serve`"
    assert "AioRpcError" not in "".join(traceback.format_exception(caught.value))
    assert said(caplog) == [(LOGGER, logging.WARNING, "waiting for 127.0.0.1:1, giving up after 0.2 s")]


@pytest.mark.parametrize("target", ["127.0.0.1", "localhost:", "", "host:http"])
def test_a_target_without_a_port(target: str) -> None:
    for client in (SchedulerClient, BlockingSchedulerClient):
        with pytest.raises(InvalidArgumentError, match=r"target: is .*host:port"):
            client(target)


@pytest.mark.parametrize("target", ["unix:/tmp/s.sock", "[::1]:5", "dns:///host:50051"])
def test_targets(target: str) -> None:
    assert SchedulerClient(target)._connection.target == target
