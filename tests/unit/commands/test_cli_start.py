"""A server that the command line starts: what its words and its file come to, and how faults in them are told."""

from __future__ import annotations

import re
import resource
import time
from pathlib import Path
from typing import Any

import pytest

from py_scheduler.app import build
from py_scheduler.cli import main
from py_scheduler.config import parse_config
from py_scheduler.errors import ConfigError
from tests.support.servers.command import EVALUATOR, SERVER, config_file


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (SERVER + "[[evaluator]]\nhandler = 'a:B'\nlisten = 1", r"evaluator\[0\]"),
        (
            EVALUATOR + "[generation.student]\nkind = 'oracle'",
            'generation.student.kind: .*must be "embedded", "sglang", "vllm" or "with_examples"',
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
        (EVALUATOR.replace("Echo", "Missing"), r"evaluator\[0\]\.handler: module tests.* has no class Missing"),
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
    begin, used = time.monotonic(), seconds_of_ended_children()
    second = started(EVALUATOR, f"--listen={address}", "--no-journal")
    code, stderr = second.end()
    assert code == 2
    assert f"\npy-scheduler: server.listen: cannot listen on {address}: the port is taken" in stderr
    assert "Traceback" not in stderr
    # Two seconds are the promise; on a busy machine it waits longer for its turns, and to import grpc alone.
    assert seconds_of_ended_children() - used < 2
    assert time.monotonic() - begin < 10


def seconds_of_ended_children() -> float:
    """Of processor time."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def test_a_host_of_another_machine_is_told_from_a_port_that_is_taken(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = config_file(tmp_path, EVALUATOR + '[server]\nlisten = "203.0.113.7:50051"\ninsecure_remote = true\n')
    assert main(["serve", "--config", str(file)]) == 2
    assert "cannot listen on 203.0.113.7:50051: the host is not one of this machine" in capsys.readouterr().err


def test_an_sglang_that_is_down_names_its_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = "[generation.student]\nkind = 'sglang'\nbase_url = 'http://127.0.0.1:1'\n"
    assert main(["serve", "--config", str(config_file(tmp_path, EVALUATOR + SERVER + engine))]) == 1
    assert "generation.student.base_url: the engine does not start: http://127.0.0.1:1" in capsys.readouterr().err
