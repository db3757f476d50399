"""The command `simulate`: what it reads, its exit codes, and what it prints into a pipe."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from py_scheduler.cli import main
from py_scheduler.config import load_config
from py_scheduler.errors import ConfigError
from py_scheduler.simulation.simulate import simulate
from py_scheduler.simulation.workload import DrawnWorkload

SPECS = """
[cluster.layout]
"n0" = { gpus = [0, 1, 2, 3], cpu = 64, memory_gb = 512 }
"n1" = { gpus = [0, 1, 2, 3], cpu = 64, memory_gb = 512 }

[[evaluator]]
evaluator_id = "math"
resource = { gpu = 64, cpu = 64, concurrency = 16 }
run_resource = { gpu = 0.5, cpu = 1 }

[[evaluator]]
evaluator_id = "judge"
resource = { cpu = 64, concurrency = 4 }
run_resource = { cpu = 1 }
"""
PAGE = Path(__file__).parents[3] / "docs/scheduling.md"


@pytest.fixture
def specs(tmp_path: Path) -> str:
    path = tmp_path / "specs.toml"
    path.write_text(SPECS)
    return str(path)


def cells(shown: str, first: str) -> list[str]:
    """Those of the table's row."""
    (line,) = [line for line in shown.splitlines() if line.startswith(f"| {first} ")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_page_shows_what_its_command_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the configuration of the page."""
    specs = str(tmp_path / "scheduler.toml")
    (written,) = re.findall(r"(?s)```toml\n(.*?)```", PAGE.read_text())
    Path(specs).write_text(written)
    command, _ = re.findall(r"(?m)^py-scheduler simulate scheduler.toml ((?:.*\\\n)*.*)$", PAGE.read_text())
    assert main(["simulate", specs, *command.replace("\\\n", " ").split()]) == 0
    shown = capsys.readouterr().out
    assert "cluster: 1 nodes, 8 GPUs, 64 cores, 512 GiB" in shown
    assert "workload: 1 steps, 40 tasks, 640 samples" in shown
    rows = re.findall(r"(?m)^\| (concurrency=\d+) \| (.*) \|$", PAGE.read_text())
    assert len(rows) == 4
    for setting, said in rows:
        seconds, bound, share, _barrier, p50, p95, tail, *_ = cells(shown, setting)[1:]
        assert said.split(" | ") == [seconds, bound, share, p50, p95, tail]


def test_json_is_one_line_a_run_and_the_same_each_time(specs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "simulate",
        specs,
        "--json",
        "--steps=2",
        "--groups=8",
        "--compare=ahead=0,all",
        "--compare=batch_size=1,2",
    ]
    assert main(words) == 0
    first = capsys.readouterr().out
    runs = [json.loads(line) for line in first.splitlines()]
    assert [run["variant"] for run in runs] == [
        f"ahead={ahead}, batch_size={size}" for ahead in ("0", "all") for size in (1, 2)
    ]
    assert len({run["makespan_seconds"] for run in runs}) > 1
    assert all(run["outcomes"] == {"solved": 128} for run in runs)
    assert main(words) == 0
    assert capsys.readouterr().out == first


def test_evals_failures_and_nodes_that_go(specs: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--evaluator=math", "--eval-groups=5", "--eval-evaluator=judge", "--infra-rate=0.05", "--lose-node=n1@100"]
    assert main(["simulate", specs, "--steps=3", "--groups=10", "--samples=4", *words]) == 0
    shown, said = capsys.readouterr()
    assert "workload: 3 steps, 45 tasks, 135 samples" in shown
    assert int(cells(shown, "as configured")[10]) > 0, "failed attempts"
    assert said == "", "what fails in a simulation was asked to"


def test_durations_from_a_file_and_a_layout_of_its_own(
    specs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = tmp_path / "seconds.txt"
    measured.write_text("30\n10\n20\n")
    words = ["--workload", f"empirical:{measured},alike=0", "--json", "--env-cluster-layout", '{"x": [0]}']
    assert main(["simulate", specs, *words, "--env-num-cpus=8", "--env-memory-gb=8", "--evaluator-concurrency=1"]) == 0
    run = json.loads(capsys.readouterr().out)
    assert run["bound_seconds"] == pytest.approx(512 * 20 / 2, rel=0.1)
    assert run["makespan_seconds"] % 10 == 0


@pytest.mark.parametrize(
    ("numbers", "said"),
    [("30\nlong\n", "line 2 is 'long', must be a number"), ("30\n\n-1\n", "line 3 is -1, must be a number of seconds")],
)
def test_a_number_that_is_no_duration_is_told_with_its_line(
    numbers: str, said: str, specs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "seconds.txt").write_text(numbers)
    assert main(["simulate", specs, "--workload", f"empirical:{tmp_path / 'seconds.txt'}"]) == 2
    assert said in capsys.readouterr().err


def test_numbers_to_draw_from_make_a_barrier_whatever_their_file_is_called(
    specs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = []
    for name in ("seconds.txt", "seconds.csv"):
        (tmp_path / name).write_text("30\n10\n20\n")
        assert main(["simulate", specs, "--workload", f"empirical:{tmp_path / name}", "--steps=2", "--json"]) == 0
        runs.append(json.loads(capsys.readouterr().out))
    assert runs[0] == runs[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--workload=gamma"], "workload: 'gamma' is none of lognormal, pareto, constant, empirical:FILE, or a file"),
        (["--workload=trace.txt"], "workload: 'trace.txt' is none of lognormal, pareto, constant, empirical:FILE, or"),
        (["--workload=."], "workload: '.' is none of lognormal, pareto, constant, empirical:FILE, or a file that ends"),
        (
            ["--workload=normal"],
            "or a file that ends in .csv, .parquet or .jsonl: did you mean 'lognormal'?",
        ),
        (["--workload=pareto:beta=2"], "workload: 'beta=2' says nothing of pareto, which knows shortest, alpha, lon"),
        (["--workload=lognormal:alpha=2"], "workload: 'alpha=2' says nothing of lognormal, which knows median, sigma"),
        (
            ["--workload=constant:5"],
            "'5' says nothing of constant, which knows median, longest, alike: did you mean constant:median=5?",
        ),
        (["--workload=lognormal:median=x"], "workload: 'median=x' cannot be read: median is 'x', must be a number"),
        (["--workload=x.csv", "--groups=3"], "--groups: says how to draw a workload, and x.csv has steps of its own"),
        (["--workload=x.csv", "--eval-groups=3"], "--eval-groups: says how to draw a workload, and x.csv has steps"),
        (["--compare=concurency=16"], "--compare: there is no key 'concurency': did you mean concurrency?"),
        (["--workload=lognormal:median=-3,alike=2"], "workload: median is -3, must be a number above 0"),
        (["--workload=empirical"], "workload: empirical needs a file"),
        (["--workload=empirical:no_such_file"], "workload: 'no_such_file' cannot be read"),
        (["--ahead=some"], "--ahead: is 'some', must be a whole number or \"all\""),
        (["--compare=concurrency"], "--compare: 'concurrency' is not KEY=A,B,.."),
        (["--compare=scheduler.max_bypas=1"], "scheduler.max_bypas: unknown key"),
        (["--compare=concurrency=0.5"], "evaluator[0].resource.concurrency: "),
        (["--evaluator=maths"], "--evaluator: no evaluator is called 'maths': there are math, judge"),
        (["--lose-node=n1"], "--lose-node: 'n1' is not IP@SECONDS"),
        (["--lose-node=n9@3"], "lost_nodes: there is no node 'n9': the layout has n0, n1"),
        (["--lose-node=n1@-5"], "lost_nodes[0]: at_seconds is -5, must be a number from 0 on"),
        (["--infra-rate=1"], "infra_rate: is 1, must be at least 0 and below 1"),
    ],
)
def test_a_fault_is_told_before_anything_runs(
    words: list[str], said: str, specs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", specs, *words]) == 2
    shown, faults = capsys.readouterr()
    assert faults.startswith("py-scheduler: ")
    assert said in faults
    assert shown == ""


def test_work_that_is_left_is_an_error(specs: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(specs).read_text()
    Path(specs).write_text(f"[scheduler]\nhas_fixed_nodes = false\n{text}")
    lost = ["--lose-node=n0@50", "--lose-node=n1@60"]
    assert main(["simulate", specs, *lost]) == 1
    assert "with work left: batch_id 0: 6" in capsys.readouterr().err


def test_with_no_node_left_nothing_is_solved(specs: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", specs, "--lose-node=n0@5", "--lose-node=n1@5"]) == 1
    shown, said = capsys.readouterr()
    assert "512 of 512 samples were given up: no node that is left can hold a sample" in said
    assert shown == ""


def test_from_python_evaluators_need_no_handler_either(specs: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match="handler"):
        load_config(Path(specs))
    figures = simulate(load_config(Path(specs), needs_handlers=False), DrawnWorkload()).figures
    assert main(["simulate", specs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["makespan_seconds"] == figures.makespan_seconds


def test_what_binds_in_place_of_the_concurrency_that_is_compared(
    specs: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", specs, "--groups=2", "--compare=concurrency=64,128"]) == 0
    said = [line for line in capsys.readouterr().out.splitlines() if "bounds the batches" in line]
    assert said == [
        f"concurrency=128: not concurrency bounds the batches of '{name}', but budget cpu" for name in ("math", "judge")
    ]


def test_staleness_needs_a_trainer_that_updates(specs: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = Path(specs).read_text()
    Path(specs).write_text(f"[scheduler.staleness.default]\nmax_staleness = 1\nstep_size = 64\n{text}")
    assert main(["simulate", specs]) == 1
    assert "updates no weights" in capsys.readouterr().err


TRACE = """seconds,group,step,at_seconds,evaluator_id
40,x,0,0,math
40,x,0,0,math
40,y,1,10,math
"""


def test_a_file_of_samples_comes_at_its_moments_unless_steps_wait(
    specs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE)
    for words, seconds in (([], 50.0), (["--ahead=0"], 80.0), (["--ahead=1"], 40.0), (["--ahead=all"], 40.0)):
        assert main(["simulate", specs, "--workload", str(trace), "--json", *words]) == 0
        run = json.loads(capsys.readouterr().out)
        assert (run["makespan_seconds"], run["steps"], run["tasks"], run["samples"]) == (seconds, 2, 2, 3), words


def test_a_file_may_name_only_evaluators_that_there_are(
    specs: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text(TRACE.replace("math", "maths"))
    assert main(["simulate", specs, "--workload", str(trace)]) == 2
    assert "a task is of the evaluator 'maths', the configuration has math, judge" in capsys.readouterr().err
