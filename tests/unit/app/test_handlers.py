"""From `module:Class` to a handler, and each way it can fail."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.errors import ConfigError
from py_scheduler.handlers.loading import load_factory, load_strategy, make_handler
from tests.support.agents.app_handlers import Echo, last_first, made_rows

if TYPE_CHECKING:
    from pathlib import Path

SUPPORT = "tests.support.agents.app_handlers"


def faults_of(name: str, arguments: dict[str, Any] | None = None) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        make_handler(name, arguments or {}, "evaluator[0]")
    return {violation.field: violation.description for violation in caught.value.violations}


def fault_of(name: str) -> str:
    return faults_of(name)["evaluator[0].handler"]


def test_it_takes_arguments() -> None:
    assert isinstance(make_handler(f"{SUPPORT}:Echo", {"seconds": 1.5}, "evaluator[0]"), Echo)


@pytest.mark.parametrize(
    ("name", "missing"), [("nowhere:A", "nowhere"), ("tests.nowhere:A", "tests.nowhere"), ("no.where:A", "no")]
)
def test_a_module_that_is_not_there(name: str, missing: str) -> None:
    assert fault_of(name) == (
        f"there is no module {missing}: put its folder on PYTHONPATH, or the module into the folder of the "
        "configuration file"
    )


def test_a_class_that_is_not_there() -> None:
    assert fault_of(f"{SUPPORT}:Ecco") == f"module {SUPPORT} has no class Ecco; did you mean Echo?"
    assert "has no class Zebra; it has Echo, " in fault_of(f"{SUPPORT}:Zebra"), "handlers alone"
    assert "Reward" not in fault_of(f"{SUPPORT}:Zebra")
    assert "has no class Echo.Inner" in fault_of(f"{SUPPORT}:Echo.Inner")


@pytest.mark.parametrize(
    ("code", "line", "words"),
    [
        ("import json\n\njson.loads('{')\n", None, "JSONDecodeError"),
        ("x = 1\nimport a_library_nobody_has\n", 2, "ModuleNotFoundError: No module named 'a_library_nobody_has'"),
        ("def f():\n    raise SystemExit(3)\n\nf()\n", 2, "SystemExit: 3"),
        ("x = 1\ny = (\n", 2, "SyntaxError"),
    ],
)
def test_an_exception_inside_the_module_names_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, line: int | None, words: str
) -> None:
    (tmp_path / "broken_agents.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    fault = fault_of("broken_agents:Agent")
    assert fault.startswith("importing broken_agents failed at ")
    assert words in fault
    if line is not None:
        assert f"{tmp_path / 'broken_agents.py'}:{line}: " in fault


AGENTS = """
from py_scheduler.domain.evaluator import BaseAgent

class NoEval(BaseAgent):
    async def run(self, episode):
        pass

class Plain(BaseAgent):
    def run(self, episode):
        pass
    async def eval(self, episode, result):
        yield
"""


def test_methods_that_are_missing_or_not_async(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "half_agents.py").write_text(AGENTS)
    monkeypatch.syspath_prepend(tmp_path)
    assert fault_of("half_agents:NoEval") == (
        "half_agents:NoEval has no method eval: it must have `async def eval(self, episode, result)`"
    )
    with pytest.raises(ConfigError) as caught:
        make_handler("half_agents:Plain", {}, "evaluator[0]")
    assert [violation.description for violation in caught.value.violations] == [
        "half_agents:Plain defines run without async: it must have `async def run(self, episode)`",
        "half_agents:Plain defines eval without async: it must have `async def eval(self, episode, result)`",
    ]


TOOLS = """
from py_scheduler.domain.evaluator import BaseAgent

class Tooled(BaseAgent):
    def __init__(self, *, sandbox, turns=1):
        self.sandbox, self.turns = sandbox, turns
    async def run(self, episode):
        pass
    async def eval(self, episode, result):
        pass
"""


def test_a_constructor_gets_the_parts_that_its_parameters_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tool_agents.py").write_text(TOOLS)
    monkeypatch.syspath_prepend(tmp_path)
    asked: list[tuple[object, str]] = []

    def make(table: object, key: str) -> str:
        asked.append((table, key))
        return "a sandbox"

    arguments = {"turns": 3, "sandbox": {"memory_mib": 64}}
    handler = make_handler("tool_agents:Tooled", arguments, "evaluator[2]", {"sandbox": make})
    assert vars(handler) == {"sandbox": "a sandbox", "turns": 3}
    make_handler("tool_agents:Tooled", {}, "evaluator[3]", {"sandbox": make})
    make_handler(f"{SUPPORT}:Echo", {}, "evaluator[4]", {"sandbox": make})
    assert asked == [
        ({"memory_mib": 64}, "evaluator[2].handler_args.sandbox"),
        (None, "evaluator[3].handler_args.sandbox"),
    ]


def test_a_group_scorer_without_async(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scorer = "class Ranks(Echo):\n    def eval_group(self, task, samples):\n        return []\n"
    (tmp_path / "rank_agents.py").write_text(f"from {SUPPORT} import Echo\n\n\n{scorer}")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert fault_of("rank_agents:Ranks") == (
        "rank_agents:Ranks defines eval_group without async: it must have `async def eval_group(self, task, samples)`"
    )


def test_a_batching_strategy_and_what_is_none() -> None:
    assert load_strategy(f"{SUPPORT}:last_first", "scheduler.batching_strategy") is last_first
    for name, words in (
        (f"{SUPPORT}:last_frst", "has no function last_frst; did you mean last_first?"),
        (f"{SUPPORT}:NO_STRATEGY", r"cannot be called: it must be `def NO_STRATEGY\(tasks, specs\)`"),
        ("nowhere:f", "there is no module nowhere"),
    ):
        with pytest.raises(ConfigError, match=rf"scheduler.batching_strategy: .*{words}"):
            load_strategy(name, "scheduler.batching_strategy")


def test_a_factory_of_a_data_set_and_what_is_none() -> None:
    assert load_factory(f"{SUPPORT}:made_rows", {"count": 3}, "dataset[0]") is made_rows
    for name, options, words in (
        (f"{SUPPORT}:made_row", {}, r"dataset\[0\].factory: .* has no function made_row; did you mean made_rows\?"),
        (f"{SUPPORT}:NO_STRATEGY", {}, r"dataset\[0\].factory: .*`def NO_STRATEGY\(epoch, \*\*options\)`"),
        ("nowhere:f", {}, r"dataset\[0\].factory: there is no module nowhere"),
        (
            f"{SUPPORT}:made_rows",
            {"count": 3, "size": 3},
            r"dataset\[0\].options: .*made_rows\(epoch, count=..., size=...\): .*'size'",
        ),
        (f"{SUPPORT}:made_rows", {}, r"dataset\[0\].options: .*made_rows\(epoch\): .*'count'"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_factory(name, options, "dataset[0]")
