"""The client of the README, as it stands, in a process of its own against a whole server."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

import msgspec
import pytest
import reasoning_gym  # noqa: F401 - takes long to import, and would keep a loop for so long

from py_scheduler.app import build, running
from py_scheduler.client import SchedulerClient
from py_scheduler.config import parse_config
from tests.support.models.scripted_sglang import ScriptedSglang

ROOT = Path(__file__).parents[2]
ADDRESS = "127.0.0.1:50051"


def config_of(base_url: str) -> str:
    """The demo's, with a scripted engine in the place of its own."""
    text = (ROOT / "examples/demo.toml").read_text(encoding="utf-8")
    engine = f'[generation.student]\nkind = "sglang"\nbase_url = "{base_url}"\n'
    changed, count = re.subn(r"\[generation\.student\]\n(?:\w.*\n)+", engine, text)
    assert count == 1
    return changed


async def test_the_minimal_client_runs() -> None:
    code = (ROOT / "examples/minimal_client.py").read_text(encoding="utf-8")
    assert code.count(f'"{ADDRESS}"') == 1
    async with ScriptedSglang(context_length=100_000) as engine:
        parts = build(parse_config(config_of(engine.base_url)), ROOT / "examples")
        address = parts.api.bind()
        await parts.backends["student"].start()
        async with running(parts):
            await parts.api.start()
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-c",
                code.replace(ADDRESS, address),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                cwd=ROOT,
            )
            try:
                async with asyncio.timeout(120):  # importing reasoning-gym alone takes long on a busy machine
                    stdout, stderr = await process.communicate()
            finally:
                if process.returncode is None:
                    process.kill()
            await parts.api.stop()
        await parts.backends["student"].close()
    assert (process.returncode, stderr.decode()) == (0, "")
    lines = stdout.decode().splitlines()
    samples = [line for line in lines if line.endswith("tokens")]
    # Four problems, four samples of each; the scripted engine never says the right thing.
    assert len(samples) == 4 * 4
    assert all(re.fullmatch(r"\S+ \d wrong_answer 0\.\d\d \d+ tokens", line) for line in samples), samples
    assert sorted(line.rpartition(" ")[2] for line in lines if line not in samples) == ["succeeded"] * 4


@pytest.mark.model
@pytest.mark.parametrize(("handler", "turns"), [("MathAgent", 2), ("CheckingAgent", 4)])
async def test_the_handlers_of_the_readme_run_as_it_says(handler: str, turns: int, tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if "class MathAgent" in block)
    (tmp_path / "my_agents.py").write_text(code)
    (task,) = re.findall(r"(?m)^echo '(.*)' > task.json$", readme)
    (tmp_path / "task.json").write_text(task)
    # The tiny model may talk until its context is full.
    (tmp_path / "short.toml").write_text(
        "[generation.student]\nkind = 'embedded'\n[sampling]\nmax_new_tokens = 16\n[[evaluator]]\nevaluator_id = 'e'\n"
        f"handler = 'my_agents:{handler}'\nresource = {{}}\n"
    )
    (words,) = set(re.findall(r"(?m)^py-scheduler (try-handler my_agents:MathAgent --task-json \S+)", readme))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "py_scheduler.cli",
        *words.replace("MathAgent", handler).split(),
        *("--config", "short.toml", "--json"),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    stdout, stderr = await process.communicate()
    assert process.returncode == 0, (stdout, stderr)
    trial = msgspec.json.decode(stdout)
    assert trial["outcome"] in {"wrong_answer", "solved"}
    assert len(trial["turns"]) == turns


async def test_an_engine_that_does_not_answer_is_shown_without_its_address() -> None:
    async with ScriptedSglang() as engine:
        parts = build(parse_config(config_of(engine.base_url)), ROOT / "examples")
        base_url = engine.base_url
    address = parts.api.bind()
    async with running(parts):
        await parts.api.start()
        async with SchedulerClient(address) as client:
            (student,) = (await client.server_info()).engines
        await parts.api.stop()
    await parts.backends["student"].close()
    assert (student.role, student.model_name, student.vocab_size) == ("student", "", 0)
    assert student.error == "the engine does not answer: the server's log says why"
    assert base_url.removeprefix("http://") not in repr(student)
