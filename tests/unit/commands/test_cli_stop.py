"""The end of a server that the command line started: signals, graces, and handlers that will not end."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import FailedPreconditionError, ServerError
from tests.support.servers.command import EVALUATOR, SERVER, echo
from tests.support.waiting import eventually


async def test_sigterm_lets_running_samples_finish_and_streams_end_with_a_cursor(started: Any, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    command = started(EVALUATOR.replace("Echo", "Gated") + f'handler_args = {{ gate = "{gate}" }}\n' + SERVER)
    address = await asyncio.to_thread(command.address)
    async with SchedulerClient.connect(address, reconnect_seconds=0.0) as client:
        submission = await client.submit(echo(12), 7)
        frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
        running = 0
        while running < 12:  # what has not begun by the signal is aborted
            running += sum(type(record.event).__name__ == "AttemptStarted" for record in (await anext(frames)).records)
        command.process.send_signal(signal.SIGTERM)
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            while (await health.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
            health.cancel()
        with pytest.raises(FailedPreconditionError, match="shutting down"):
            await client.submit(echo(1), 8)
        # The samples hold the server up, however long all of this took.
        gate.touch()
        done = []
        cursor = b""
        with pytest.raises(ServerError) as caught:  # noqa: PT012 - it ends by raising
            async for frame in frames:
                done += [record.event for record in frame.records if isinstance(record.event, TaskDone)]
                cursor = frame.cursor
    assert caught.value.code == "UNAVAILABLE"
    assert cursor
    assert [event.state for event in done] == ["succeeded"] * 12
    code, stderr = await asyncio.to_thread(command.end)
    assert (code, "Traceback" in stderr) == (0, False)


@pytest.mark.parametrize(
    ("handler", "grace", "code", "within"),
    [("Deaf", 4.5, 0, 9.0), ("Blocking", 0.2, 1, 15.0), ("Unreachable", 0.2, 1, 15.0)],
)
@pytest.mark.slow
async def test_a_handler_that_will_not_end_does_not_keep_the_process(
    started: Any, tmp_path: Path, handler: str, grace: float, code: int, within: float
) -> None:
    """What blocks the loop needs the watchdog; what only ignores its stop gets one grace, and an orderly end."""
    settings = f"drain_seconds = 0.5\n[scheduler]\nstop_grace_seconds = {grace}\n"
    command = started(EVALUATOR.replace("Echo", handler) + SERVER + settings)
    address = await asyncio.to_thread(command.address)
    async with SchedulerClient.connect(address, reconnect_seconds=0.0) as client:
        begun = tmp_path / "begun"
        submitting = asyncio.create_task(
            client.submit([Task(config=TaskConfig(task_type="echo"), prompt=str(begun))], 7)
        )
        if handler != "Deaf":
            # No event can come from a server whose loop stands still.
            await eventually(begun.exists, pause_seconds=0.01)
            # It may stand still before the submit is answered: the handler begins while the journal is written.
            submitting.cancel()
        else:
            submission = await submitting
            frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
            async for frame in frames:
                if any(type(record.event).__name__ == "AttemptStarted" for record in frame.records):
                    break
            await frames.aclose()
    begin = time.monotonic()
    command.process.send_signal(signal.SIGTERM)
    ended_with, stderr = await asyncio.to_thread(command.end)
    assert ended_with == code, stderr
    assert time.monotonic() - begin < within


def test_a_second_signal_ends_at_once(started: Any) -> None:
    command = started(EVALUATOR.replace("Echo", "Deaf") + SERVER)
    address = command.address()
    with BlockingSchedulerClient(address, reconnect_seconds=0.0) as client:
        submission = client.submit(echo(1), 7)
        for frame in client.watch(submission_id=submission.submission_id, cursor=submission.cursor):
            if any(type(record.event).__name__ == "AttemptStarted" for record in frame.records):
                break
    command.process.send_signal(signal.SIGINT)
    assert command.process.stderr is not None
    while "stopping" not in (line := command.process.stderr.readline()):
        assert line, "the server ended before it said that it stops"
    command.process.send_signal(signal.SIGINT)
    assert command.end()[0] == 130
