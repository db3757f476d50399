"""The command: servers in processes of their own, and what the other commands do with them."""

from __future__ import annotations

import asyncio
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from py_scheduler.api.security.bearer_tokens import BearerTokens
from py_scheduler.cli import main, parsers
from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.commands.status import _server_lines
from py_scheduler.commands.token import new_token
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.requests import GenerationBackendView, ServerInfo
from py_scheduler.domain.results import Outcome, SampleDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import UnauthenticatedError
from tests.support.servers.command import EVALUATOR, ROOT, SERVER, config_file, echo

# With a server


def test_a_rollout_through_a_served_process(started: Any) -> None:
    command = started(EVALUATOR + SERVER)
    with BlockingSchedulerClient(command.address()) as client:
        events = list(client.rollout(echo(20, repeat_times=2), batch_id=7))
        samples = [event for event in events if isinstance(event, SampleDone)]
        assert len(samples) == 40
        assert {sample.reward.details["answer"] for sample in samples} == {str(number) for number in range(20)}
        assert sum(isinstance(event, TaskDone) for event in events) == 20
        (evaluator,) = client.server_info().evaluators
        assert evaluator.handler == "tests.support.agents.app_handlers:Echo"
    command.process.send_signal(signal.SIGTERM)
    code, stderr = command.end()
    assert code == 0
    for line in (
        r"configuration \S+scheduler.toml",
        "cluster: no layout",
        "evaluator echo: importing tests.support.agents.app_handlers:Echo",
        r"batch_id 7 \(s[0-9a-f]+\): 20 tasks accepted",
        r"batch_id 7 \(s[0-9a-f]+\): every task is done: 20 succeeded",
    ):
        assert len(re.findall(f"INFO py_scheduler.*{line}", stderr)) == 1, line


def test_a_handler_cannot_end_the_service_from_a_task_of_its_own(started: Any) -> None:
    command = started(EVALUATOR.replace("app_handlers:Echo", "app_handlers:Exiting") + SERVER)
    prompts = ["exit", "fine", "exit", "fine"]
    tasks = [Task(config=TaskConfig(task_type="echo"), prompt=prompt) for prompt in prompts]
    with BlockingSchedulerClient(command.address()) as client:
        events = list(client.rollout(tasks, batch_id=7))
        outcomes = [event.outcome for event in events if isinstance(event, SampleDone)]
        assert sorted(outcomes) == [Outcome.INFRA_OTHER] * 2 + [Outcome.SOLVED] * 2
        assert client.server_info().version
    command.process.send_signal(signal.SIGTERM)
    code, stderr = command.end()
    assert code == 0
    assert "tried to end the service: SystemExit" in stderr


def test_a_handler_beside_its_configuration_and_a_quiet_log(started: Any, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("from tests.support.agents.app_handlers import Echo\nclass Mine(Echo): pass\n")
    command = started(
        EVALUATOR.replace("tests.support.agents.app_handlers:Echo", "beside:Mine") + SERVER, "--log-level=error"
    )
    command.address()
    command.process.send_signal(signal.SIGTERM)
    assert command.end() == (0, "")


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
        client.schedule(echo(2), 9)
        client.collect(9, acknowledge=False)
    assert main(["status", "9", "--target", address]) == 0
    assert "to collect 0  not acknowledged 2" in capsys.readouterr().out
    assert main(["runners", "--target", address]) == 0
    assert capsys.readouterr().out == "no runners: handlers run in the server's own loop\n"
    assert main(["status", "--target", address]) == 0
    shown = capsys.readouterr().out
    assert "evaluator  echo" in shown
    assert "node       n1" in shown
    assert main(["status", "7/gsm8k", "--target", address]) == 0
    assert "succeeded 3" in capsys.readouterr().out
    assert main(["status", "8", "--target", address]) == 1
    assert "8" in capsys.readouterr().err


def test_status_says_how_tokens_come_where_there_is_more_than_one_way() -> None:
    engines = [
        GenerationBackendView(
            role=role, model_name="m", weight_version="7", vocab_size=9, context_length=9, streaming=streaming
        )
        for role, streaming in (("student", "increments"), ("teacher", ""))
    ]
    lines = _server_lines(ServerInfo(version="1", evaluators=(), engines=tuple(engines), nodes=()), {})
    assert lines[1:] == ["engine     student  m  weights 7  streams increments", "engine     teacher  m  weights 7"]


def test_abort_stops_a_submission_or_some_of_its_tasks(started: Any, capsys: pytest.CaptureFixture[str]) -> None:
    address = started(EVALUATOR + "handler_args = { seconds = 600.0 }\n" + SERVER).address()

    def abort(*arguments: str) -> tuple[int, str]:
        code = main(["abort", *arguments, "--target", address])
        return code, capsys.readouterr().out

    with BlockingSchedulerClient(address) as client:
        submission = client.submit(echo(4), "7/gsm8k")
        first, second, *_ = submission.task_ids
        assert abort("7/gsm8k", "--task", first, "--task", second, "--reason", "enough") == (0, "2 tasks aborted\n")
        assert client.get_submission("7/gsm8k").aborted_tasks == 2
        code, said = abort(submission.submission_id, "--no-wait")
        assert (code, said.partition("\n")[0]) == (0, "2 tasks aborted")
        assert abort(submission.submission_id) == (0, "nothing was open\n")
        done: list[TaskDone] = []
        for frame in client.watch(submission_id=submission.submission_id, cursor=submission.cursor):
            done += [record.event for record in frame.records if isinstance(record.event, TaskDone)]
            if len(done) == 4:
                break
        assert {event.task_id for event in done if event.reason == "enough"} == {first, second}
    assert main(["abort", "8", "--target", address]) == 1
    assert main(["status", submission.submission_id, "--target", address]) == 0
    assert "aborted 4" in capsys.readouterr().out


# Without one


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert re.match(r"\d", version := capsys.readouterr().out)
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, version)


def test_every_option_of_every_command_is_explained() -> None:
    _, commands = parsers()
    assert set(commands) == {
        "serve",
        "status",
        "abort",
        "plan",
        "simulate",
        "runners",
        "endpoints",
        "why",
        "try-handler",
        "report",
        "token",
        "journal",
        "knobs",
        "fetch-model",
        "version",
    }
    for name, command in commands.items():
        command.load()
        assert command.description
        assert command.epilog
        assert f"py-scheduler {name}" in command.epilog
        for action in command._actions:
            assert action.help, (name, action.dest)
            assert action.metavar or action.nargs == 0, (name, action.dest)


def test_a_command_loads_nothing_that_only_another_one_needs() -> None:
    code = "import sys; from py_scheduler.cli import main; main(['version']); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    commands = {name for name in loaded.split() if name.startswith("py_scheduler.commands.")}
    assert commands == {"py_scheduler.commands.common", "py_scheduler.commands.version"}
    assert not {"grpc", "py_scheduler.app", "py_scheduler.client"} & set(loaded.split())


def test_the_model_that_is_ready(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(bytes(2_600_000))
    monkeypatch.setattr("py_scheduler.commands.fetch_model.fetch_smollm2", lambda _folder: model)
    assert main(["fetch-model"]) == 0
    assert capsys.readouterr().out == f"model ready: {model} (3 MB)\n"


def test_the_configuration_file_may_come_from_a_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, "[server\n")
    monkeypatch.setenv("PY_SCHEDULER_CONFIG", str(file))
    assert main(["serve"]) == 2
    assert f"py-scheduler: {file} is not TOML: " in capsys.readouterr().err


def test_no_command_and_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([])
    assert caught.value.code == 2
    assert main(["status", "--target", "127.0.0.1:1"]) == 1
    assert "no py-scheduler answers at 127.0.0.1:1: start it with" in capsys.readouterr().err


def test_a_tokens_file_is_left_alone_when_what_came_of_it_could_not_be_served(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "tokens.toml"
    arguments = ["token", "new", "alice", "--namespace", "a", "--to", str(file)]
    assert main(arguments) == 0
    assert file.stat().st_mode & 0o077 == 0
    held = file.read_text()
    assert main(arguments) != 0, "two of one name"
    assert main(["token", "new", "bob", "--namespace", "a\nb", "--to", str(file)]) != 0
    assert file.read_text() == held
    file.write_text("alice = {")
    assert main(["token", "new", "bob", "--namespace", "a", "--to", str(file)]) != 0
    assert file.read_text() == "alice = {"
    assert capsys.readouterr().out.count("shown this once") == 1, "none is shown that is good for nothing"


def test_a_new_token_is_shown_once_and_its_line_lets_it_in(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "tokens.toml"
    file.write_text("# nobody yet")
    for name, more in (("alice", []), ("root", ["--engines"])):
        arguments = ["token", "new", name, "--namespace", "a", "--namespace", 'b"', "--to", str(file), *more]
        assert main(arguments) == 0
    shown = re.findall(r"token, shown this once: (\S+)", capsys.readouterr().out)
    assert not any(secret in file.read_text() for secret in shown)
    tokens = BearerTokens(file)
    alice, root = (tokens.caller_of(secret) for secret in shown)
    assert alice is not None
    assert root is not None
    assert (alice.name, alice.namespaces, alice.controls_engines) == ("alice", frozenset({"a", 'b"'}), False)
    assert (root.name, root.controls_engines) == ("root", True)
    assert main(["token", "new", "no name", "--namespace", "a"]) == 2
    assert "letters, digits" in capsys.readouterr().err


def test_a_command_gets_in_with_a_token_from_a_file(
    started: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["token", "new", "alice", "--namespace", "default", "--to", str(tmp_path / "tokens.toml")]) == 0
    secret = re.findall(r"once: (\S+)", capsys.readouterr().out)[0]
    (tmp_path / "secret").write_text(f"{secret}\n")
    address = started(EVALUATOR + SERVER + f'tokens_file = "{tmp_path / "tokens.toml"}"\n').address()
    assert main(["status", "--target", address]) == 1
    assert "this server wants a bearer token" in capsys.readouterr().err
    for command in ("status", "runners"):
        assert main([command, "--target", address, "--token-file", str(tmp_path / "secret")]) == 0, command
    shown = capsys.readouterr().out
    assert "evaluator" in shown
    assert "no runners" in shown


async def test_sighup_has_the_tokens_read_again(started: Any, tmp_path: Path) -> None:
    secret, line = new_token("alice", ["default"])
    file = tmp_path / "tokens.toml"
    file.write_text(f"{line}\n")
    command = started(EVALUATOR + SERVER + f'tokens_file = "{file}"\n')
    address = await asyncio.to_thread(command.address)
    file.write_text("# taken back\n")
    command.process.send_signal(signal.SIGHUP)
    assert command.process.stderr is not None
    while "0 tokens are in force" not in (told := await asyncio.to_thread(command.process.stderr.readline)):
        assert told, "the server ended"
    async with SchedulerClient(address, token=secret, reconnect_seconds=0.0) as client:
        with pytest.raises(UnauthenticatedError):
            await client.server_info()


def test_what_is_said_of_servers_is_checked_before_any_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["student", "http://a:1", "--none"], ["student", "--control-url", "http://a:1", "--configured"]):
        assert main(["endpoints", *words]) == 2
        assert "leave one of the two out" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["endpoints", "student", "--none", "--configured"])
    assert main(["endpoints", "--none", "--target", "127.0.0.1:1"]) == 2
    assert "name the role" in capsys.readouterr().err
