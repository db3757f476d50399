"""The demo in small: two processes, the real model, and what it leaves behind."""

from __future__ import annotations

import asyncio
import re
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]

ROOT = Path(__file__).parents[3]
DATASETS = 3


async def start_demo(output: Path, *arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples/demo.py"),
        "--output",
        str(output),
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )


async def read_until(process: asyncio.subprocess.Process, pattern: str) -> str:
    assert process.stdout is not None
    text = ""
    async for line in process.stdout:
        text += line.decode()
        if re.search(pattern, text):
            return text
    raise AssertionError(f"the demo ended before it said {pattern!r}: {text}")


def listens(text: str) -> tuple[str, int]:
    found = re.search(r"listens on (\S+):(\d+)", text)
    assert found is not None
    return found[1], int(found[2])


async def assert_gone(address: tuple[str, int]) -> None:
    with pytest.raises(OSError, match=r".*"):
        await asyncio.open_connection(*address)


async def test_a_small_demo(tmp_path: Path) -> None:
    process = await start_demo(tmp_path, "--groups", "6", "--samples", "2")
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    await assert_gone(listens(output))
    assert "\x1b" not in output
    assert re.search(r"│ all +│ +12 │", output), output
    assert "6 groups, 12 samples" in output
    assert re.search(r"placement held [1-9]\d* % of the GPU·seconds of 4 GPUs on 2 nodes", output), output
    assert str(tmp_path / "trajectories.parquet") in output

    rows = pq.read_table(tmp_path / "trajectories.parquet").to_pylist()
    assert len(rows) == 12
    assert len({(row["task_id"], row["sample_no"]) for row in rows}) == 12
    assert len({row["dataset"] for row in rows}) == DATASETS
    assert {row["node_ip"] for row in rows} <= {"10.0.0.1", "10.0.0.2"}
    for row in rows:
        check_row(row)


def check_row(row: dict[str, Any]) -> None:
    tokens, log_probs, mask = (np.array(row[name]) for name in ("token_ids", "log_probs", "loss_mask"))
    assert tokens.shape == log_probs.shape == mask.shape
    assert tokens.min() >= 0
    assert row["outcome"] in {"solved", "wrong_answer"}
    assert (row["outcome"] == "solved") == (row["reward"] >= 1.0)

    generated = mask == 1
    assert generated.any()
    assert np.isfinite(log_probs).all()
    assert (log_probs[generated] <= 0).all()
    assert (log_probs[~generated] == 0).all()

    prompt, answer = row["turns"]
    assert (prompt["source"], answer["source"]) == ("environment", "student")
    assert (prompt["start"], prompt["end"], answer["end"]) == (0, answer["start"], len(mask))
    assert (~generated[: prompt["end"]]).all()
    assert generated[answer["start"] :].all()

    (span,) = row["weight_spans"]
    assert span["version"]
    assert (span["start"], span["end"]) == (answer["start"], answer["end"])
    assert row["prompt"]
    assert len(row["gpu_ids"]) == 1
    assert row["run_seconds"] >= row["generate_seconds"] > 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
async def test_an_interrupted_demo_stops_its_server(tmp_path: Path, stop: signal.Signals) -> None:
    process = await start_demo(tmp_path, "--groups", "30", "--samples", "4")
    address = listens(await read_until(process, r"listens on .*\n"))
    process.send_signal(stop)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 130, output
    await assert_gone(address)


async def test_what_was_finished_is_kept(tmp_path: Path) -> None:
    process = await start_demo(tmp_path, "--groups", "40", "--samples", "4")
    await read_until(process, r"\d+/160 samples")
    process.send_signal(signal.SIGINT)
    output = (await process.communicate())[0].decode()
    assert process.returncode == 130, output
    kept = re.search(r"broken off; (\d+) trajectories: ", output)
    assert kept is not None, output
    rows = pq.read_table(tmp_path / "trajectories.parquet").to_pylist()
    assert 0 < len(rows) == int(kept[1]) < 160
    assert all(row["dataset"] and row["model"] and row["weight_version"] and row["batch_id"] == "0" for row in rows)


async def test_a_server_that_does_not_start_is_told_with_its_log(tmp_path: Path) -> None:
    config = tmp_path / "broken.toml"
    config.write_text("[server]\nlisten = 7\n", encoding="utf-8")
    process = await start_demo(tmp_path, "--config", str(config))
    output = (await process.communicate())[0].decode()
    assert process.returncode == 1
    assert "server.listen" in output
    assert "before it listened" in output
