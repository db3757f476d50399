"""The command `plan`: what it reads, its exit codes, and what it prints into a pipe."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from py_scheduler.cli import main

ROOT = Path(__file__).parents[3]
SPECS = """
[[evaluator]]
evaluator_id = "math"
resource = { gpu = 2, cpu = 8, concurrency = 4 }
run_resource = { gpu = 0.5, cpu = 1 }
eval_resource = { cpu = 2 }
"""
LARGE = """
[[evaluator]]
evaluator_id = "large"
resource = { gpu = 64, concurrency = 9 }
run_resource = { gpu = 1 }
batch_size = 3
"""
LAYOUT = '{"10.0.0.1": [0, 1, 2], "10.0.0.2": {"gpus": [0], "cpu": 1, "memory_gb": 8}}'
FALLBACKS = ["--num-cpus", "64", "--memory-gb", "128"]


@pytest.fixture
def specs(tmp_path: Path) -> Path:
    path = tmp_path / "specs.toml"
    path.write_text(SPECS)
    return path


def row(shown: str, first: str) -> list[str]:
    """The cells of the table's row."""
    (line,) = [line for line in shown.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_layout_and_specs_without_handlers(specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", LAYOUT, str(specs), *FALLBACKS]) == 0
    shown = capsys.readouterr().out
    assert "cluster: 2 nodes, 4 GPUs, 65 cores, 136 GiB" in shown
    # The second node has no two cores for a sample's scoring.
    assert row(shown, "math")[:4] == ["math", "4", "6", "1"]
    assert "gpu on 1 node, cpu on 1 node" in shown
    assert row(shown, "evaluator")[-1] == "one more node like 10.0.0.1"
    assert row(shown, "math")[-1] == "+6 tokens, +2 batches"
    assert row(shown, "math")[4] == "budget concurrency, gpu, cpu"
    drawn = [line.split() for line in shown.splitlines() if line.startswith("10.0.0.")]
    full, free = ("████", "····") if "█" in shown else ("####", "....")
    assert drawn == [
        ["10.0.0.1", full, full, free, "4", "8/64", "0/128"],
        ["10.0.0.2", free, "0", "0/1", "0/8"],
    ]


def test_a_servers_configuration_has_both(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "nodes.json").write_text('{"n1": [0, 1]}')
    path = tmp_path / "server.toml"
    path.write_text(
        SPECS.replace('"math"', '"math"\nhandler = "nowhere:Missing"')
        + '[cluster]\nlayout = "nodes.json"\nnum_cpus = 4\nmemory_gb = 8\n[scheduler]\nmax_running_samples = 1'
    )
    assert main(["plan", str(path)]) == 1
    assert "can give 2" in capsys.readouterr().out
    assert main(["plan", str(path), "--num-cpus", "16"]) == 0
    assert row(capsys.readouterr().out, "math")[:4] == ["math", "4", "4", "1"]


def test_json_specs_and_samples_per_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "specs.json"
    table = {
        "evaluator_id": "e",
        "resource": {"gpu": 8, "concurrency": 50},
        "run_resource": {"gpu": 0.25},
        "batch_size": 2,
    }
    path.write_text(json.dumps({"evaluator": [table]}))
    assert main(["plan", LAYOUT, str(path), *FALLBACKS]) == 1
    assert row(capsys.readouterr().out, "e")[:4] == ["e", "32", "16", "0"]
    assert main(["plan", LAYOUT, str(path), *FALLBACKS, "--samples-per-task", "3"]) == 0
    shown = capsys.readouterr().out
    assert row(shown, "e")[:5] == ["e", "6", "16", "2", "batch size"]


def test_one_that_never_fits_makes_the_exit_code_and_is_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "specs.toml"
    path.write_text(LARGE + SPECS)
    assert main(["plan", LAYOUT, str(path), *FALLBACKS]) == 1
    shown = capsys.readouterr().out
    assert row(shown, "large")[1:4] == ["9", "4", "0"]
    assert "filled with batches of math" in shown
    (never,) = [line for line in shown.splitlines() if line.startswith("never: ")]
    assert re.search("'large' needs 9 tokens .* can give 4 .* 2 more nodes like 10.0.0.1 would do", never)
    assert main(["plan", LAYOUT, str(path), *FALLBACKS, "--draw", "large"]) == 1
    assert "filled with" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{specs}"], "there is no cluster layout"),
        (["nothing.json", "{specs}"], "the cluster layout is neither"),
        ([LAYOUT, "nothing.toml"], "cannot read the evaluators' file nothing.toml"),
        ([LAYOUT, "{specs}"], "10.0.0.1: cpu is absent: give it here or with --env-num-cpus"),
        ([LAYOUT, "{specs}", *FALLBACKS, "--draw", "maths"], "no evaluator is called 'maths': there are math"),
    ],
)
def test_faults_of_the_call(
    specs: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["plan", *(argument.replace("{specs}", str(specs)) for argument in arguments)]) == 2
    assert message in capsys.readouterr().err


def test_a_misspelt_key_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "specs.toml"
    path.write_text(SPECS.replace("cpu = 8", "cpus = 8"))
    assert main(["plan", LAYOUT, str(path), *FALLBACKS]) == 2
    assert "evaluator[0].resource.cpus: unknown key: did you mean cpu?" in capsys.readouterr().err


def test_many_nodes_alike_are_one_row(specs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    layout = {f"n{number}": [0, 1] for number in range(500)}
    # The budget holds four samples, which fill one node: 500 batches, were it not for the limit of the server.
    assert main(["plan", json.dumps(layout), str(specs), *FALLBACKS]) == 0
    shown = capsys.readouterr().out
    assert row(shown, "math")[2:4] == ["2,000", "500"]
    assert "n0 and 499 alike" in shown
    assert len(shown.splitlines()) < 12


def test_a_pipe_gets_no_colour_and_ascii_where_the_locale_has_no_more(specs: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "ascii", "TERM": "xterm-256color"}
    command = [sys.executable, "-m", "py_scheduler.cli", "plan", LAYOUT, str(specs), *FALLBACKS]
    done = subprocess.run(command, capture_output=True, check=False, env=environment, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    shown = done.stdout.decode("ascii")
    assert "\x1b" not in shown
    assert re.search(r"10\.0\.0\.1 +#### #### \.\.\.\. +4 ", shown)
