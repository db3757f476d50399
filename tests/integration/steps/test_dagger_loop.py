"""The loop of examples/dagger_loop.py, killed in iteration 3 and run again: the same tasks as without the kill."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.rollout.files.iteration_summary import read_summary
from py_scheduler.rollout.files.loop_state import LoopState, read_loop_state
from py_scheduler.rollout.files.store import read_samples
from tests.support.models.scripted_sglang import ScriptedSglang
from tests.support.steps.rows import write_lines
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[3]
CONFIG = """
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.agents.step_handlers:HeldInIteration"
handler_args = {{ rollout_id = 3, free = 5, gate = "{gate}" }}
resource = {{ concurrency = 4 }}
[scheduler]
max_running_samples = 6
[rollout]
reuse = {{ mode = "never" }}
groups_per_step = 4
n_samples_per_eval_prompt = 2
save_eval_details = true
export_environment = false
filters = {{ rejection = "spread" }}
dagger = {{ decay = "linear", beta_start = 1.0, beta_end = 0.0, decay_iterations = 4, t_max_start = 1, t_max_end = 5 }}
"""
TABLE = """
[[{kind}]]
name = "{name}"
path = "{name}.jsonl"
task_type = "agent"
repeat_times = 2
shuffle = {shuffle}
"""
ROWS = {
    "sums": [{"prompt": f"sum {n}", "scores": [1.0, n % 2]} for n in range(24)],
    "words": [{"prompt": f"word {n}", "scores": [1.0, n % 3]} for n in range(17)],
    "short": [{"prompt": f"short {n}", "scores": [1.0]} for n in range(2)],
    "long": [{"prompt": f"long {n}", "scores": [0.0]} for n in range(5)],
}


class Loop:
    """The example as a process."""

    def __init__(self, config: Path, output: Path, *flags: str) -> None:
        self._arguments = ["--config", str(config), "--output", str(output), *flags]
        self.process: asyncio.subprocess.Process

    async def start(self) -> Loop:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            str(ROOT / "examples/dagger_loop.py"),
            *self._arguments,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        return self

    async def until(self, wanted: str) -> None:
        """Reads until this has been said."""
        text = ""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            text += line.decode()
            if wanted in text:
                return
        raise AssertionError(f"the loop ended before it said {wanted!r}: {text}")

    async def end(self) -> str:
        output = (await self.process.communicate())[0].decode()
        assert self.process.returncode == 0, output
        return output


def config_in(folder: Path, gate: Path) -> Path:
    config = CONFIG.format(gate=gate)
    for name, rows in ROWS.items():
        write_lines(folder / f"{name}.jsonl", rows)
        is_training = name in ("sums", "words")
        config += TABLE.format(
            kind="dataset" if is_training else "eval_dataset", name=name, shuffle=str(is_training).lower()
        )
    path = folder / "loop.toml"
    path.write_text(config)
    return path


def prompts_of(output: Path, iterations: Sequence[int]) -> list[list[str]]:
    files = [output / f"trajectory_sft_samples_iter_{number:03d}.parquet" for number in iterations]
    return [[sample.prompt for group in read_samples(file) for sample in group] for file in files]


def check_iteration(number: int, killed: Path, whole: Path) -> None:
    """Its context, its filters and its eval are those of the loop that nobody killed."""
    summary, undisturbed = (
        read_summary(root / f"eval_details/train_{number}.summary.json") for root in (killed, whole)
    )
    assert summary.context is not None
    assert (summary.context.beta, summary.context.t_max) == (1 - number / 4, round(1 + 4 * number / 10))
    assert [report.group_reasons for report in summary.filters] == [
        report.group_reasons for report in undisturbed.filters
    ]
    evaluated = read_summary(killed / f"eval_details/{number}.summary.json")
    assert evaluated.metrics == {
        "eval/short/accuracy": 1.0,
        "eval/short/pass@1": 1.0,
        "eval/short/pass@2": 1.0,
        "eval/long/accuracy": 0.0,
        "eval/long/pass@1": 0.0,
        "eval/long/pass@2": 0.0,
    }


async def test_a_kill_in_iteration_3_and_a_restart_finish_all_5_with_the_same_tasks(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    config = config_in(tmp_path, gate)
    killed, whole = tmp_path / "killed", tmp_path / "whole"

    first = await Loop(config, killed).start()
    await first.until("iteration 3: ")
    await eventually(lambda: list((killed / "partial").glob("iter_003/*.parquet")), pause_seconds=0.02)
    first.process.send_signal(signal.SIGKILL)
    await first.process.communicate()
    state = read_loop_state(killed / "loop_state.json")
    assert isinstance(state, LoopState)
    assert (state.rollout_id, state.unfinished) == (3, 3)
    assert not (killed / "trajectory_sft_samples_iter_003.parquet").exists()

    gate.touch()
    output = await (await Loop(config, killed).start()).end()
    assert "3 iterations are done; going on with unfinished 3" in output
    assert "5 iterations are done" in output
    await (await Loop(config, whole).start()).end()

    assert prompts_of(killed, range(5)) == prompts_of(whole, range(5))
    assert len({prompt for prompts in prompts_of(killed, range(2)) for prompt in prompts}) == 8, "no task twice"
    for number in range(5):
        check_iteration(number, killed, whole)
    state = read_loop_state(killed / "loop_state.json")
    assert state is not None
    assert (state.rollout_id, state.is_finished) == (4, True)
    assert not list((killed / "partial").iterdir()), "the saved files have made the checkpoints superfluous"
    again = await (await Loop(config, killed).start()).end()
    assert "5 iterations are done" in again
    assert " rounds, " not in again, "there was nothing left to execute"


async def test_flags_and_variables_beat_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_in(tmp_path, tmp_path / "gate")
    monkeypatch.setenv("STACX_DAGGER_ENV_CONCURRENCY", "0")
    process = (await Loop(config, tmp_path / "out", "--n-samples-per-eval-prompt", "0").start()).process
    output = (await process.communicate())[0].decode()
    assert process.returncode == 1
    assert "rollout.n_samples_per_eval_prompt: must be `int` >= 1" in output
    process = (await Loop(config, tmp_path / "out").start()).process
    output = (await process.communicate())[0].decode()
    assert "evaluator[0].resource.concurrency: must be at least 1" in output


async def test_the_command_line_at_the_top_of_the_example_runs_as_printed(tmp_path: Path) -> None:
    """In a copy of the folder, whose model says a word: the paths are those of a clone."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    config = tmp_path / "examples/dagger_loop.toml"
    code = (tmp_path / "examples/dagger_loop.py").read_text(encoding="utf-8")
    (words,) = re.findall(r"(?m)^ +python (examples/dagger_loop\.py)", code)
    text = config.read_text(encoding="utf-8")
    async with ScriptedSglang(context_length=100_000) as engine:
        student = f'[generation.student]\nkind = "sglang"\nbase_url = "{engine.base_url}"\n'
        text, count = re.subn(r"\[generation\.student\]\n(?:\w.*\n)+", student, text)
        assert count == 1
        # The scripted model is never right and never stops, so that the filters would leave nothing.
        text = text.replace('rejection = "spread"', 'rejection = "off"').replace("finish_only = true", "")
        config.write_text(text, encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *words.split(),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    assert "5 iterations are done" in output
    assert (tmp_path / "dagger_output/loop_state.json").exists()
