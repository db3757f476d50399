"""From a configuration file over two steps and an eval of a real loop to what `py-scheduler report` says of them."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING

from py_scheduler.app import in_process
from py_scheduler.cli import main
from py_scheduler.config import load_config
from py_scheduler.knobs import overrides_of

if TYPE_CHECKING:
    from pathlib import Path

    import pytest

CONFIG = """
[cluster.layout]
"10.0.0.1" = { gpus = [0, 1], cpu = 8, memory_gb = 8 }

[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Recording"
resource = { gpu = 2, cpu = 4 }
run_resource = { gpu = 0.5, cpu = 1 }
batch_size = 2

[rollout]
groups_per_step = 4
samples_per_group = 2
artifact_dir = "out"
reuse = { mode = "never" }

[[dataset]]
name = "numbers"
path = "numbers.jsonl"
task_type = "echo"

[[eval_dataset]]
name = "held_out"
path = "numbers.jsonl"
task_type = "echo"
limit = 3

[[eval_dataset]]
name = "short"
path = "numbers.jsonl"
task_type = "echo"
limit = 1
"""


async def test_a_loop_and_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "scheduler.toml"
    file.write_text(CONFIG)
    (tmp_path / "numbers.jsonl").write_text("".join(json.dumps({"prompt": str(n)}) + "\n" for n in range(10)))
    monkeypatch.setenv("STACX_SAVE_PER_ITER_PT", "0")
    flags = {"--save-eval-details": True, "--n-samples-per-eval-prompt": "2"}
    async with in_process(load_config(file, overrides_of(flags, os.environ)), tmp_path) as scheduler:
        for rollout_id in range(2):
            result = await scheduler.execute_rollout(rollout_id)
            assert [len(group) for group in result.samples] == [2] * 4
        metrics = (await scheduler.execute_eval(1)).metrics
    assert metrics["eval/held_out/pass@2"] == metrics["eval/short/accuracy"] == 1.0
    out = tmp_path / "out"
    assert (out / "trajectory_sft_samples.parquet").is_file()
    assert not list(out.glob("*_iter_*"))
    details = {path.name for path in (out / "eval_details").iterdir()}
    assert {"train_0.summary.json", "train_1.summary.json", "1.summary.json", "1.jsonl"} <= details
    assert main(["report", str(out), "--no-plots"]) == 0
    shown = capsys.readouterr()
    assert shown.err == ""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in shown.out.splitlines() if "|" in line]
    perfect = ["4", "8", "100.0", "1.000"]
    found = [row[:6] for row in rows if row[1] == "0.00" and len(row) == 9]
    assert found == [["0", "0.00", *perfect], ["1", "0.00", *perfect], ["1", "0.00", *perfect]]
    assert ["eval 1", "held_out", "6", "100.0", "100.0", "100.0", "1.000"] in rows
    assert ["eval 1", "short", "2", "100.0", "100.0", "100.0", "1.000"] in rows
