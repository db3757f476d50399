"""`py-scheduler try-handler` through the command itself: what it shows, and how it ends."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sandbox.sandbox import ProcessSandbox
from py_scheduler.cli import main
from py_scheduler.errors import SandboxError
from tests.support.models.scripted_sglang import ScriptedSglang

if TYPE_CHECKING:
    from collections.abc import Callable

    Tried = Callable[..., tuple[int, str, str]]

ROOT = Path(__file__).parents[3]
COMMAND = [sys.executable, "-m", "py_scheduler.cli", "try-handler"]
AGENTS = """
import logging
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult, Reward

class Speaker(BaseAgent):
    def __init__(self, threshold=0.5):
        self.threshold = threshold

    async def run(self, episode):
        episode.observe([11, 12, 13], "Say " + episode.sample.task.prompt)
        generation = await episode.generate(max_new_tokens=4)
        return AgentResult(answer=generation.text, termination_reason="said it")

    async def eval(self, episode, result):
        sample = episode.sample
        logging.getLogger("py_scheduler.agents").warning("mind the gap")
        topic = sample.task.metadata.get("topic")
        details = {"threshold": self.threshold, "data": len(sample.task.data), "topic": topic}
        return Reward(score=1.0, details=details)

class Silent(Speaker):
    async def run(self, episode):
        return AgentResult(answer=episode.sample.task.prompt)

class Wrong(Silent):
    async def eval(self, episode, result):
        return Reward(score=0.25)

class Broken(Silent):
    async def run(self, episode):
        episode.observe([1], "before it broke")
        return self.fall(20)

    def fall(self, height):
        if height:
            return self.fall(height - 1)
        raise LookupError("the floor is gone")

class Painter(Silent):
    async def run(self, episode):
        episode.observe([1], "\\x1b[2J\\x9b1m[/red] seen")
        return AgentResult(answer="a", termination_reason="\\x1b]0;title\\x07")

    async def eval(self, episode, result):
        return Reward(score=1.0, details={"\\x1b[31m": "\\x9b31m", "nested": ["\\x1b[0m"]})

class Slow(Silent):
    async def run(self, episode):
        import asyncio
        await asyncio.sleep(3600)
"""
CONFIG = """
[cluster.layout]
"10.0.0.7" = { gpus = [0, 1], cpu = 8, memory_gb = 32 }

[[evaluator]]
evaluator_id = "speaking"
handler = "tried_agents:Speaker"
handler_args = { threshold = 0.75 }
resource = { gpu = 1.0, cpu = 4.0, memory_gb = 8.0, concurrency = 2 }
run_resource = { gpu = 0.5, cpu = 1.0, memory_gb = 2.0 }

[[evaluator]]
evaluator_id = "slow"
handler = "tried_agents:Slow"
resource = { concurrency = 2 }
run_timeout_seconds = 0.05
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "tried_agents.py").write_text(AGENTS)
    (tmp_path / "scheduler.toml").write_text(CONFIG)
    # The command appends to it.
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "tried_agents", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def tried(folder: Path, capsys: pytest.CaptureFixture[str]) -> Tried:
    """Runs the command in this process: its exit code, what it printed, what it complained of."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["try-handler", *arguments])
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


async def test_an_agent_that_speaks_openais_api_is_let_in_without_a_configuration(tried: Tried) -> None:
    async with ScriptedSglang(opening="<assistant>") as server:
        arguments = [
            "tests.support.agents.chat_handlers:InlineAgent",
            "--prompt",
            "?",
            "--engine",
            server.base_url,
            "--json",
        ]
        code, text, _ = await asyncio.to_thread(tried, *arguments)
    assert code == 0, text
    assert [turn["source"] for turn in json.loads(text)["turns"]] == ["environment", "student"] * 3


async def test_a_sample_through_the_configured_pool_and_a_real_engine_adapter(tried: Tried, folder: Path) -> None:
    task = {"prompt": "yes", "data": base64.b64encode(b"12345").decode(), "metadata": {"topic": "trees"}}
    (folder / "task.json").write_text(json.dumps(task))
    async with ScriptedSglang() as server:
        arguments = ["--config", "scheduler.toml", "--engine", server.base_url, "--task-json", "task.json"]
        code, text, _ = await asyncio.to_thread(tried, "speaking", *arguments)
        shown = json.loads((await asyncio.to_thread(tried, "tried_agents:Speaker", *arguments, "--json"))[1])
    assert code == 0
    assert "tried_agents:Speaker  evaluator speaking" in text
    assert "Say yes" in text
    assert "outcome   solved  the agent's reason: said it" in text
    assert "held      node 10.0.0.7, gpus [0]; gpu 0.5, cpu 1, memory_gb 2" in text
    assert "tokens    4 of 7 generated, " in text
    assert "warning   mind the gap" in text
    assert shown["is_finished"]
    assert shown["outcome"] == "solved"
    assert shown["reward"] == {"score": 1.0, "details": {"threshold": 0.75, "data": 5, "topic": "trees"}}
    assert [(turn["source"], turn["start"], turn["end"], turn["loss_mask"]) for turn in shown["turns"]] == [
        ("environment", 0, 3, 0),
        ("student", 3, 7, 1),
    ]
    assert (shown["tokens"], shown["generated_tokens"]) == (7, 4)
    assert shown["held"]["node_ip"] == "10.0.0.7"
    assert shown["held"]["gpu_ids"] == [0]
    assert shown["held"]["resource"]["gpu"] == 0.5
    assert shown["timings"]["run_seconds"] >= shown["timings"]["generate_seconds"] > 0
    assert shown["tokens_per_second"] > 0
    assert shown["warnings"] == ["mind the gap"]


def test_without_a_configuration_and_without_an_engine(tried: Tried) -> None:
    code, text, error = tried("tried_agents:Silent", "--engine", "none", "--prompt", "x", "--args", '{"threshold": 2}')
    assert (code, error) == (0, "")
    assert "engine    none: the handler cannot generate" in text
    assert "turns     none: nothing was observed" in text
    assert "  threshold: 2\n" in text
    assert "held      no node: there is no cluster" in text


def test_a_wrong_answer_is_a_finished_sample(tried: Tried) -> None:
    code, text, _ = tried("tried_agents:Wrong", "--engine", "none", "--prompt", "x")
    assert code == 0
    assert "outcome   wrong_answer" in text
    assert "reward    0.25" in text


def test_nothing_of_a_sample_is_a_command_to_the_terminal(tried: Tried) -> None:
    code, text, _ = tried("tried_agents:Painter", "--engine", "none", "--prompt", "x")
    assert code == 0
    assert [character for character in text if not character.isprintable() and character != "\n"] == []
    assert "\\x1b[2J\\x9b1m[/red] seen" in text
    assert "\\x1b]0;title\\x07" in text
    assert "\\x1b[31m: \\x9b31m" in text
    text = tried("tried_agents:Painter", "--engine", "none", "--prompt", "x", "--json")[1]
    assert [character for character in text if not character.isprintable() and character != "\n"] == []
    shown = json.loads(text)
    assert shown["turns"][0]["text"] == "\x1b[2J\x9b1m[/red] seen"
    assert shown["reward"]["details"] == {"\x1b[31m": "\x9b31m", "nested": ["\x1b[0m"]}


@pytest.mark.parametrize("repetition", [1, 2])
def test_a_handler_that_raises_shows_its_own_frames(tried: Tried, repetition: int) -> None:
    code, text, _ = tried("tried_agents:Broken", "--engine", "none", "--prompt", "x")
    assert code == 1
    assert "before it broke" in text
    assert "outcome   infra_other" in text
    assert "error     in run: LookupError: the floor is gone (tried_agents.py:" in text
    trace = text.partition("traceback")[2]
    assert trace.rstrip().endswith("LookupError: the floor is gone")
    assert trace.count("in fall") <= 8
    assert "py_scheduler" not in trace
    assert json.loads(tried("tried_agents:Broken", "--engine", "none", "--prompt", "x", "--json")[1])["traceback"]


def test_a_sample_that_runs_out_of_time_is_not_finished(tried: Tried) -> None:
    code, text, _ = tried("slow", "--config", "scheduler.toml", "--prompt", "x")
    assert code == 1
    assert "outcome   agent_timeout" in text


def test_several_samples_are_one_here_and_it_says_so(tried: Tried, folder: Path) -> None:
    (folder / "task.json").write_text('{"prompt": "x", "config": {"repeat_times": 4}}')
    code, text, _ = tried("tried_agents:Silent", "--engine", "none", "--task-json", "task.json")
    assert code == 0
    assert "warning   repeat_times is 4: one sample is tried" in text


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nowhere:A", "--engine", "none", "--prompt", "x"], "there is no module nowhere"),
        (["tried_agents:Speeker", "--engine", "none", "--prompt", "x"], "did you mean Speaker?"),
        (["Speaker", "--engine", "none", "--prompt", "x"], 'must be "module:Class"'),
        (["Speaker", "--config", "scheduler.toml", "--prompt", "x"], "it has speaking (tried_agents:Speaker), slow"),
        (["tried_agents:Speaker", "--config", "gone.toml", "--prompt", "x"], "cannot read the configuration gone.toml"),
        (["tried_agents:Silent", "--engine", "vllm", "--prompt", "x"], "--engine: is 'vllm'"),
        (["tried_agents:Silent", "--engine", "none", "--prompt", "x", "--args", "{"], "--args: is no JSON object"),
        (
            ["tried_agents:Silent", "--engine", "none", "--prompt", "x", "--args", '{"a": 1}'],
            "evaluator[0].handler_args: tried_agents:Silent does not take these arguments",
        ),
        (["tried_agents:Silent", "--engine", "none", "--task-json", "gone.json"], "gone.json: cannot be read"),
        (["tried_agents:Silent", "--engine", "none", "--task-json", "scheduler.toml"], "is no JSON object"),
        (
            ["tried_agents:Silent", "--engine", "none", "--task-json", "row.json"],
            "what handlers read goes into metadata",
        ),
        (["tried_agents:Silent", "--engine", "none", "--task-json", "odd.json"], "odd.json: Expected `str`"),
    ],
)
def test_bad_input_is_told_with_the_way_out(tried: Tried, folder: Path, arguments: list[str], says: str) -> None:
    (folder / "row.json").write_text('{"prompt": "x", "answer": 7}')
    (folder / "odd.json").write_text('{"prompt": 7}')
    code, text, error = tried(*arguments)
    assert (code, text) == (2, "")
    assert says in error


def test_an_engine_that_is_down_is_named(tried: Tried) -> None:
    code, _, error = tried("tried_agents:Speaker", "--engine", "http://127.0.0.1:1", "--prompt", "x")
    assert code == 1
    assert "generation.student.base_url: the engine does not start" in error


def test_a_process_of_its_own_finds_handlers_in_its_folder(folder: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "tried_agents:Broken", "--engine", "none", "--prompt", "x"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.rstrip().endswith("LookupError: the floor is gone")


def test_a_handler_that_will_not_end_does_not_keep_the_command(folder: Path) -> None:
    settings = "run_timeout_seconds = 0.2\n[scheduler]\nstop_grace_seconds = 0.2\n"
    config = "[[evaluator]]\nevaluator_id = 'deaf'\nhandler = 'tests.support.agents.app_handlers:Deaf'\nresource = {}\n"
    (folder / "deaf.toml").write_text(config + settings)
    done = subprocess.run(
        [*COMMAND, "deaf", "--config", "deaf.toml", "--prompt", "x"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 1
    assert "outcome   agent_timeout" in done.stdout


@pytest.mark.model
@pytest.mark.skipif(
    importlib.util.find_spec("xllamacpp") is None and not os.environ.get("CI"),
    reason="the extra [embedded] is not installed",
)
def test_the_code_agent_with_the_embedded_model(tried: Tried, folder: Path) -> None:
    """Whatever a model of this size writes: it is run or refused, told back to it, and recorded."""
    try:
        ProcessSandbox().probe()
    except SandboxError as error:
        pytest.skip(str(error))
    row = json.loads((ROOT / "examples/code_agent/tasks.jsonl").read_text().splitlines()[0])
    task = {
        "prompt": row["prompt"],
        "metadata": {"code": row["code"]},
        "config": {"stopping": {"max_turns": 2}, "sampling": {"temperature": 0.0, "max_new_tokens": 96}},
    }
    (folder / "task.json").write_text(json.dumps(task))
    config = str(ROOT / "examples/code_agent/scheduler.toml")
    code, text, complaint = tried("code", "--config", config, "--task-json", "task.json", "--json")
    assert (code, complaint) == (0, "")
    shown = json.loads(text)
    assert shown["outcome"] in {"solved", "wrong_answer", "max_turns"}
    assert 1 <= len(shown["reward"]["details"]["turns"]) <= 2
    assert [turn["loss_mask"] for turn in shown["turns"]] == [0, 1, 0, 1][: len(shown["turns"])]
    assert shown["timings"]["generate_seconds"] > 0
