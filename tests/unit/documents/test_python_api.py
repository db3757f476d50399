"""The public face: `py_scheduler` has every name that its users need, and loads each when it is asked for."""

from __future__ import annotations

import ast
import importlib
import inspect
import pydoc
import re
import rlcompleter
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import pytest

import py_scheduler
from py_scheduler import errors
from py_scheduler.domain.requests import WatchedEvent

ROOT = Path(__file__).parents[3]
NAMES = list(py_scheduler.__all__)
STUB = ast.parse((ROOT / "py_scheduler/__init__.pyi").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/python_api.md").read_text(encoding="utf-8")
ALIASES = {"BatchId", "RolloutEvent", "StepEvent"}
CLIENTS = [name for name in NAMES if name.endswith("Client")]


def face() -> dict[str, str]:
    """Each name and the module that it is loaded from."""
    return {name: f"py_scheduler.{module}" for name, module in py_scheduler.__dict__["_MODULE_OF"].items()}


def loaded_by(code: str) -> set[str]:
    """The modules that a fresh interpreter has after it."""
    printed = f"{code}\nimport sys\nprint(*sys.modules)"
    run = [sys.executable, "-c", printed]
    return set(subprocess.run(run, capture_output=True, text=True, check=True, cwd=ROOT).stdout.split())


# What it has


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(py_scheduler, name)
    assert found is getattr(importlib.import_module(face()[name]), name)
    if name not in ALIASES:
        assert found.__doc__
        assert inspect.isfunction(found) or "__doc__" in vars(found), "its own, not that of what it derives from"


def test_the_list_is_sorted_and_dir_shows_it() -> None:
    assert sorted(set(NAMES)) == NAMES
    assert set(NAMES) <= set(dir(py_scheduler))


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="module 'py_scheduler' has no attribute 'Taks'"):
        _ = py_scheduler.Taks  # type: ignore[attr-defined]


def test_a_star_import_gives_every_name() -> None:
    space: dict[str, Any] = {}
    exec("from py_scheduler import *", space)
    assert space.keys() - {"__builtins__"} == set(NAMES)


def test_a_type_checker_is_told_the_same() -> None:
    imported = {
        alias.name: node.module for node in STUB.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert imported == face()
    (listed,) = [node.value for node in STUB.body if isinstance(node, ast.Assign)]
    assert ast.literal_eval(listed) == NAMES


def test_the_tree_of_errors_is_whole() -> None:
    tree = {
        name for name, found in vars(errors).items() if inspect.isclass(found) and inspect.getmodule(found) is errors
    }
    assert tree <= set(NAMES)


def test_every_event_that_a_watch_brings_is_there() -> None:
    assert {event.__name__ for event in get_args(WatchedEvent)} <= set(NAMES)


@pytest.mark.parametrize("client", CLIENTS)
def test_every_type_that_a_client_takes_or_gives_is_there(client: str) -> None:
    kind = getattr(py_scheduler, client)
    methods = [found for name, found in inspect.getmembers(kind, callable) if not name.startswith("_")]
    said = {word for method in methods for word in re.findall(r"\b[A-Z]\w+", str(inspect.signature(method)))}
    elsewhere = {"Any", "AsyncGenerator", "AsyncIterator", "Iterable", "Iterator", "Self", "Sequence", "Unpack"}
    values = {"ABORT", "False", "None", "True", "WATCH"}
    assert said - elsewhere - values - {"ConnectionSettings"} <= set(NAMES)


# What it loads

HEAVY = {"aiohttp", "grpc", "msgspec", "numpy", "py_scheduler._placement_core", "ray", "rich"}
SERVER = {"aiohttp", "apsw", "py_scheduler._placement_core", "py_scheduler.api", "py_scheduler.scheduler", "ray"}


def test_nothing_is_loaded_with_the_package_alone() -> None:
    loaded = loaded_by("import py_scheduler\ndir(py_scheduler)")
    assert {name for name in loaded if name.startswith("py_scheduler")} == {"py_scheduler"}
    assert not HEAVY & loaded


@pytest.mark.parametrize(
    ("name", "never"),
    [
        ("Task", HEAVY - {"msgspec"}),
        ("SchedulerError", HEAVY),
        ("SchedulerClient", SERVER),
        ("BaseAgent", SERVER | {"grpc"}),
        ("PlacementPool", HEAVY - {"msgspec", "py_scheduler._placement_core"}),
        ("TaskScheduler", {"aiohttp", "grpc", "ray"}),
        ("load_config", {"aiohttp", "grpc", "ray"}),
    ],
)
def test_a_name_loads_what_it_needs_alone(name: str, never: set[str]) -> None:
    loaded = loaded_by(f"from py_scheduler import {name}")
    assert "py_scheduler" in loaded
    assert not never & loaded


# Who uses it

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))
NAMED = re.compile(r"py_scheduler\.(integrations(\.\w+)+|interfaces\.trinity)")


def code_of(file: Path) -> str:
    """A program, or all Python of a page."""
    text = file.read_text(encoding="utf-8")
    return "\n".join(re.findall(r"```python\n(.*?)```", text, re.DOTALL)) if file.suffix == ".md" else text


def imports_of(file: Path) -> list[tuple[str, str]]:
    """Of this package: module and name."""
    found = []
    for node in ast.walk(ast.parse(code_of(file))):
        if isinstance(node, ast.ImportFrom):
            found += [(node.module or "", alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names]
    return [(module, name) for module, name in found if module.partition(".")[0] == "py_scheduler"]


@pytest.mark.parametrize("file", [*PAGES, *EXAMPLES], ids=lambda file: str(file.relative_to(ROOT)))
def test_pages_and_examples_import_from_the_face_and_named_integrations_alone(file: Path) -> None:
    for module, name in imports_of(file):
        assert name in NAMES if module == "py_scheduler" else NAMED.fullmatch(module), f"{module} {name}"


def test_pages_and_examples_do_import() -> None:
    assert sum(len(imports_of(file)) for file in PAGES) > 20
    assert sum(len(imports_of(file)) for file in EXAMPLES) > 20


def test_the_page_says_of_each_name_what_it_is_in_one_line() -> None:
    rows = re.findall(r"(?m)^\| `(\w+)` \| (.+) \|$", PAGE)
    assert sorted(name for name, _ in rows) == NAMES
    assert all(said.endswith(".") for _, said in rows)


def test_the_changelog_says_of_each_name_where_it_was() -> None:
    """Only the errors are told as a whole."""
    told = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    table = told.partition("| `from py_scheduler import ...` |\n")[2].partition("\n\n")[0]
    named = [name for row in table.splitlines()[1:-1] for name in re.findall(r"`(\w+)`", row.split(" | ")[1])]
    assert sorted(named) == [name for name in NAMES if not hasattr(errors, name)]


@pytest.mark.parametrize("name", py_scheduler.__all__)
def test_help_and_completion_work_for_every_name(name: str) -> None:
    """A hint that is not there at run time ends `help(py_scheduler)` and the prompt's completion in a traceback."""
    assert "Python Library Documentation" in pydoc.render_doc(getattr(py_scheduler, name))
    assert rlcompleter.Completer({"py_scheduler": py_scheduler}).complete(f"py_scheduler.{name}", 0)
