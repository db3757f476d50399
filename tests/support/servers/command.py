"""`py-scheduler` in a process of its own, as somebody starts it who types; `served_process` is for the loop."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from py_scheduler.domain.task import Task, TaskConfig

ROOT = Path(__file__).parents[3]
EVALUATOR = """
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Echo"
resource = { concurrency = 8 }
"""
SERVER = '[server]\nlisten = "127.0.0.1:0"\n'


def config_file(folder: Path, text: str) -> Path:
    path = folder / "scheduler.toml"
    path.write_text(text)
    return path


class Command:
    """One run of it."""

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


def echo(count: int, **config: Any) -> list[Task]:
    return [Task(config=TaskConfig(task_type="echo", **config), prompt=str(number)) for number in range(count)]
