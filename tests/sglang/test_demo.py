"""The demo on SGLang in small: a real language model behind a real server, and every process in between."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyarrow.parquet as pq
import pytest

from tests.sglang.asking import RealSglang
from tests.sglang.conftest import SMOLLM2

if TYPE_CHECKING:
    from examples.sglang.serve_cpu import CpuServer

pytestmark = [pytest.mark.model, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
PORT_OF_THE_DEMO = ":30000"


async def test_the_demo_on_sglang(smollm2_server: CpuServer, tmp_path: Path) -> None:
    config = tmp_path / "demo.toml"
    text = (ROOT / "examples/sglang/demo.toml").read_text(encoding="utf-8")
    assert PORT_OF_THE_DEMO in text
    config.write_text(text.replace(PORT_OF_THE_DEMO, f":{smollm2_server.port}"), encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "examples/demo.py"),
        *("--config", str(config), "--output", str(tmp_path), "--groups", "6", "--samples", "4"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    output = (await process.communicate())[0].decode()
    assert process.returncode == 0, output
    async with RealSglang(smollm2_server.base_url, SMOLLM2) as real:
        await real.until_idle()
    assert "6 groups, 24 samples" in output
    rows = pq.read_table(tmp_path / "trajectories.parquet").to_pylist()
    assert len(rows) == 24
    assert {row["outcome"] for row in rows} <= {"solved", "wrong_answer"}
    for row in rows:
        generated = [score for score, mask in zip(row["log_probs"], row["loss_mask"], strict=True) if mask]
        assert generated
        assert all(score <= 0 for score in generated)
        assert row["turns"][-1]["log_prob_kind"] == "sampled"
    # It is a small model, but it is one: random weights would answer none of these.
    assert any(row["outcome"] == "solved" for row in rows)
