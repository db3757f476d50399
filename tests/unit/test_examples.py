"""What stands in examples/ and benches/ works as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from py_scheduler.app import build_pool, build_specs
from py_scheduler.config import load_config
from py_scheduler.domain.resources import Resource
from py_scheduler.integrations.reasoning_gym import ReasoningGymAgent

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["examples/scheduler.toml", "examples/demo.toml", "benches/noop.toml"])
def test_a_configuration_loads_and_its_batches_fit_its_cluster(name: str) -> None:
    path = ROOT / name
    config = load_config(path)
    pool = build_pool(config, path.parent)
    assert pool is not None
    for spec in build_specs(config, []):
        assert pool.max_tokens_for(spec.sample_resource) >= spec.resource.concurrency


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
