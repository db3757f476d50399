"""The benchmarks of a whole server in small: they assert their own results, so a run that ends well is what matters."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_noop_benchmark_in_small(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benches/noop_throughput.py"), "--tasks", "1500", "--json", str(report_file)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(report_file.read_text(encoding="utf-8"))
    assert report["tasks"] == 1500
    assert report["submit_calls"] == 2
    assert report["server_cpu_us_per_task"] > 0
    assert report["echo_ratio"] > 0
    assert "1500 no-op tasks, all succeeded" in done.stdout


def test_the_restore_benchmark_in_small(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benches/restore.py"), "--tasks", "1000", "--json", str(report_file)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    reports = json.loads(report_file.read_text(encoding="utf-8"))
    assert [report["store"] for report in reports] == ["waiting", "done", "waiting, checkpoint"]
    assert all(report["restore_seconds"] > 0 for report in reports)


def test_the_cost_of_a_task_in_small() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "benches/task_cost.py"), "--rounds", "1"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert " µs a task, median " in done.stdout


def test_the_cost_of_a_served_sample_in_small(tmp_path: Path) -> None:
    report_file = tmp_path / "report.json"
    done = subprocess.run(
        [sys.executable, "-m", "benches.served_generation", "--rounds", "1", "--scale", "0.02", "--json", report_file],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(report_file.read_text(encoding="utf-8"))
    assert [row["tokens"] for row in rows] == [64, 4_096, 32_768]


def test_one_noop_task_goes_through_no_more_modules_than_somebody_can_read() -> None:
    """At most 40: the program ends with 1 above that, and prints them."""
    done = subprocess.run(
        [sys.executable, "-m", "benches.modules_on_the_way", "--limit", "40"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "scheduler/ledger/ledger.py" in done.stdout, "the way that is counted is a task's"
