"""What stands in examples/ and benches/ works as it is."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.llama_cpp import LlamaCppSettings
from py_scheduler.app import build_generation, build_pool, build_specs
from py_scheduler.config import convert_table, load_config, parse_config
from py_scheduler.domain.resources import Resource
from py_scheduler.integrations.reasoning_gym import ReasoningGymAgent
from tests.support.scripted_episode import ScriptedEpisode

if TYPE_CHECKING:
    from py_scheduler.errors import FieldViolation

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["examples/scheduler.toml", "examples/demo.toml", "benches/noop.toml"])
def test_a_configuration_loads_and_its_batches_fit_its_cluster(name: str) -> None:
    path = ROOT / name
    config = load_config(path)
    pool = build_pool(config, path.parent)
    assert pool is not None
    for spec in build_specs(config, []):
        assert pool.max_tokens_for(spec.sample_resource) >= spec.resource.concurrency


def test_the_commented_tables_load_and_show_the_defaults() -> None:
    path = ROOT / "examples/scheduler.toml"
    text = path.read_text(encoding="utf-8")
    in_use = '[generation.student]\nkind = "sglang"\nbase_url = "http://127.0.0.1:30000"\n'
    assert in_use in text
    config = parse_config(re.sub(r"(?m)^#(?=[\[a-z])", "", text.replace(in_use, "")))
    assert set(config.generation) == {"student", "teacher"}
    faults: list[FieldViolation] = []
    build_generation(config, path.parent, faults)
    assert {fault.field for fault in faults} <= {"generation.student.gguf_path"}, "the model may not be fetched yet"
    student = dict(config.generation["student"])
    assert (student.pop("kind"), student.pop("gguf_path")) == ("embedded", "")
    assert set(student) == set(LlamaCppSettings.__struct_fields__) - {"threads"}
    assert convert_table(student, LlamaCppSettings, "generation.student") == LlamaCppSettings()


async def test_the_own_handler_is_found_beside_its_configuration_and_solves(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = ROOT / "examples/own_handler"
    monkeypatch.syspath_prepend(folder)
    faults: list[FieldViolation] = []
    (spec,) = build_specs(load_config(folder / "scheduler.toml"), faults)
    assert not faults
    client = runpy.run_path(str(folder / "client.py"))
    tasks = client["make_tasks"]()
    assert {task.config.task_type for task in tasks} == {spec.evaluator_id}
    for answer, score in ((f" {tasks[0].metadata['answer']}.", 1.0), ("none", 0.0), ("-1", 0.0)):
        episode = ScriptedEpisode(tasks[0], answer)
        result = await spec.handler.run(episode)
        assert (await spec.handler.eval(episode, result)).score == score
        assert episode.messages[-1].content == episode.observed_text == tasks[0].prompt


def test_the_demo_shares_gpus() -> None:
    (spec,) = build_specs(load_config(ROOT / "examples/demo.toml"), [])
    assert isinstance(spec.handler, ReasoningGymAgent)
    assert 0 < spec.sample_resource.gpu < 1
    assert spec.sample_resource == Resource(gpu=0.5, cpu=1.0, memory_gb=2.0)


def minimal_client() -> str:
    """Without the words above it."""
    return (ROOT / "examples/minimal_client.py").read_text(encoding="utf-8").rpartition('"""')[2].strip()


def test_the_client_in_the_readme_is_the_minimal_client() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert minimal_client() in [block.strip() for block in blocks]


def test_the_minimal_client_is_minimal() -> None:
    code = minimal_client()
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
