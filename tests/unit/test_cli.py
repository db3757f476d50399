"""The command: a whole server in a process of its own, its start, its faults and its stop."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from py_scheduler.app import build, make_handler
from py_scheduler.cli import main
from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.config import parse_config
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.results import SampleDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import ConfigError, FailedPreconditionError, ServerError
from tests.support.app_handlers import Echo

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
EVALUATOR = """
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.app_handlers:Echo"
resource = { concurrency = 8 }
"""
SERVER = '[server]\nlisten = "127.0.0.1:0"\n'


def config_file(folder: Path, text: str) -> Path:
    path = folder / "scheduler.toml"
    path.write_text(text)
    return path


class Command:
    """`py-scheduler` in a process of its own."""

    def __init__(self, *arguments: str, **environment: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "py_scheduler.cli", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        )

    def address(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        match = re.fullmatch(r"listening on (\S+)\n", line)
        if match is None:
            pytest.fail(f"{line!r} {self.end()}")
        return match[1]

    def end(self) -> tuple[int, str]:
        _, stderr = self.process.communicate(timeout=40)
        return self.process.returncode, stderr


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Any]:
    running: list[Command] = []

    def start(text: str, *flags: str, **environment: str) -> Command:
        command = Command("serve", "--config", str(config_file(tmp_path, text)), *flags, **environment)
        running.append(command)
        return command

    yield start
    for command in running:
        if command.process.poll() is None:
            command.process.kill()
        command.process.communicate()


def echo(count: int, **config: Any) -> list[Task]:
    return [Task(config=TaskConfig(task_type="echo", **config), prompt=str(number)) for number in range(count)]


# Serving


def test_a_rollout_through_a_served_process(started: Any) -> None:
    command = started(EVALUATOR + SERVER)
    with BlockingSchedulerClient(command.address()) as client:
        events = list(client.rollout(echo(20, repeat_times=2), batch_id=7))
        samples = [event for event in events if isinstance(event, SampleDone)]
        assert len(samples) == 40
        assert {sample.reward.details["answer"] for sample in samples} == {str(number) for number in range(20)}
        assert sum(isinstance(event, TaskDone) for event in events) == 20
        (evaluator,) = client.server_info().evaluators
        assert evaluator.handler == "tests.support.app_handlers:Echo"
    command.process.send_signal(signal.SIGTERM)
    assert command.end()[0] == 0


def test_flags_beat_variables_which_beat_the_file(started: Any) -> None:
    command = started(
        EVALUATOR + '[server]\nlisten = "127.0.0.1:1"',
        "--listen=127.0.0.1:0",
        "--evaluator-batch-size=3",
        '--env-cluster-layout={"10.0.0.1": [0, 1]}',
        PY_SCHEDULER_LISTEN="127.0.0.1:2",
        PY_SCHEDULER_EVALUATOR_CONCURRENCY="5",
        PY_SCHEDULER_ENV_NUM_CPUS="16",
        PY_SCHEDULER_ENV_MEMORY_GB="64",
    )
    with BlockingSchedulerClient(command.address()) as client:
        info = client.server_info()
    assert (info.evaluators[0].batch_size, info.evaluators[0].resource.concurrency) == (3, 5)
    assert [(node.node_ip, node.gpu_ids, node.cpu, node.memory_gb) for node in info.nodes] == [
        ("10.0.0.1", (0, 1), 16.0, 64.0)
    ]


def test_status_shows_the_server_and_a_submission(started: Any, capsys: pytest.CaptureFixture[str]) -> None:
    address = started(
        EVALUATOR + SERVER, '--env-cluster-layout={"n1": {"gpus": [0], "cpu": 4, "memory_gb": 8}}'
    ).address()
    with BlockingSchedulerClient(address) as client:
        list(client.rollout(echo(3), batch_id="7/gsm8k"))
    assert main(["status", "--target", address]) == 0
    shown = capsys.readouterr().out
    assert "evaluator  echo" in shown
    assert "node       n1" in shown
    assert main(["status", "7/gsm8k", "--target", address]) == 0
    assert "succeeded 3" in capsys.readouterr().out
    assert main(["status", "8", "--target", address]) == 1
    assert "8" in capsys.readouterr().err


# Faults at the start


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SERVER + "[[evaluator]]\nhandler = 'a:B'\nlisten = 1", r"evaluator\[0\]"),
        (
            EVALUATOR + "[generation.student]\nkind = 'oracle'",
            'generation.student.kind: .*must be "embedded" or "sglang"',
        ),
        (EVALUATOR + "[generation.student]\nkind = 'sglang'", "generation.student.base_url: is missing"),
        (
            EVALUATOR + "[generation.student]\nkind = 'sglang'\nbase_url = 'http://127.0.0.1:1'\nslots = 3",
            "generation.student.slots: unknown key",
        ),
        (
            EVALUATOR + "[generation.student]\nkind = 'embedded'\ngguf_path = 'nothing.gguf'",
            "generation.student.gguf_path: there is no file .*nothing.gguf",
        ),
        (EVALUATOR + "[cluster]\nlayout = 'nothing.json'", r"cluster\.layout"),
        (EVALUATOR + "[cluster.layout]\nn1 = [0, 0]\nn2 = [-1]", r"(?s)cluster\.layout\.n1: .*cluster\.layout\.n2: "),
        (EVALUATOR.replace("Echo", "Missing"), r"evaluator\[0\]\.handler: cannot import .*AttributeError"),
        (EVALUATOR.replace("tests.support", "nowhere"), r"evaluator\[0\]\.handler: .*PYTHONPATH"),
        (EVALUATOR.replace("Echo", "NoAgent"), r"evaluator\[0\]\.handler: .*BaseAgent"),
        (EVALUATOR.replace("Echo", "NOT_A_CLASS"), r"evaluator\[0\]\.handler: .*BaseAgent"),
        (EVALUATOR.replace("Echo", "Broken"), r"evaluator\[0\]\.handler_args: .*no licence"),
        (EVALUATOR + "handler_args = { minutes = 1 }", r"evaluator\[0\]\.handler_args: .*minutes"),
    ],
)
def test_a_fault_of_the_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, message: str
) -> None:
    assert main(["serve", "--config", str(config_file(tmp_path, text))]) == 2
    assert re.search(message, capsys.readouterr().err)


async def test_faults_of_all_parts_are_told_at_once() -> None:
    text = (
        EVALUATOR.replace("Echo", "Missing")
        + EVALUATOR.replace("Echo", "NoAgent").replace('"echo"', '"b"')
        + "[cluster.layout]\nn1 = [0, 0]\n[generation.student]\nkind = 'x'\n[generation.teacher]\nkind = 'y'"
    )
    with pytest.raises(ConfigError) as caught:
        build(parse_config(text), Path())
    assert {violation.field for violation in caught.value.violations} == {
        "evaluator[0].handler",
        "evaluator[1].handler",
        "generation.student.kind",
        "generation.teacher.kind",
        "cluster.layout.n1",
    }


def test_a_start_up_error_ends_the_process_with_a_clear_message(started: Any) -> None:
    first = started(EVALUATOR + SERVER)
    address = first.address()
    begin = time.monotonic()
    second = started(EVALUATOR, f"--listen={address}")
    code, stderr = second.end()
    assert code == 2
    assert stderr.startswith(f"py-scheduler: server.listen: cannot listen on {address}: the port is taken")
    assert "Traceback" not in stderr
    # Two seconds are the promise; a busy machine needs longer to start Python and import grpc alone.
    assert time.monotonic() - begin < 10


def test_make_handler_takes_nested_classes_and_arguments() -> None:
    handler = make_handler("tests.support.app_handlers:Echo", {"seconds": 1.5}, "evaluator[0]")
    assert isinstance(handler, Echo)


# The stop


async def test_sigterm_lets_running_samples_finish_and_streams_end_with_a_cursor(started: Any) -> None:
    command = started(EVALUATOR + "handler_args = { seconds = 1.0 }\n" + SERVER)
    address = await asyncio.to_thread(command.address)
    async with SchedulerClient.connect(address, reconnect_seconds=0.0) as client:
        submission = await client.submit(echo(12), 7)
        frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
        running = 0
        while running < 8:
            running += sum(type(record.event).__name__ == "AttemptStarted" for record in (await anext(frames)).records)
        command.process.send_signal(signal.SIGTERM)
        async with grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            while (await health.read()).status != health_pb2.HealthCheckResponse.NOT_SERVING:
                pass
            health.cancel()
        with pytest.raises(FailedPreconditionError, match="shutting down"):
            await client.submit(echo(1), 8)
        done = []
        cursor = b""
        with pytest.raises(ServerError) as caught:  # noqa: PT012 - it ends by raising
            async for frame in frames:
                done += [record.event for record in frame.records if isinstance(record.event, TaskDone)]
                cursor = frame.cursor
    assert caught.value.code == "UNAVAILABLE"
    assert cursor
    assert len(done) >= 8
    assert all(event.state == "succeeded" for event in done)
    code, stderr = await asyncio.to_thread(command.end)
    assert (code, "Traceback" in stderr) == (0, False)


@pytest.mark.parametrize("handler", ["Deaf", "Blocking"])
@pytest.mark.slow
async def test_a_handler_that_will_not_end_does_not_keep_the_process(started: Any, handler: str) -> None:
    settings = "drain_seconds = 0.2\n[scheduler]\nstop_grace_seconds = 0.2\n"
    command = started(EVALUATOR.replace("Echo", handler) + SERVER + settings)
    address = await asyncio.to_thread(command.address)
    async with SchedulerClient.connect(address, reconnect_seconds=0.0) as client:
        submission = await client.submit(echo(1), 7)
        if handler == "Deaf":
            frames = client.watch(submission_id=submission.submission_id, cursor=submission.cursor)
            async for frame in frames:
                if any(type(record.event).__name__ == "AttemptStarted" for record in frame.records):
                    break
            await frames.aclose()
    begin = time.monotonic()
    command.process.send_signal(signal.SIGTERM)
    await asyncio.to_thread(command.end)
    assert time.monotonic() - begin < 15


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
    assert "stopping" in command.process.stderr.readline()
    command.process.send_signal(signal.SIGINT)
    assert command.end()[0] == 130


# The rest


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert re.match(r"\d", capsys.readouterr().out)


def test_no_command_and_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert main(["status", "--target", "127.0.0.1:1"]) == 1
    assert "py-scheduler: " in capsys.readouterr().err
