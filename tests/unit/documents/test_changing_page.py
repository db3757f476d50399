"""docs/changing.md: every file and every test that it names is there."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "changing.md"
LEAST_ROWS = 25
TEST = re.compile(r"((?:\w+/)*(?:test_\w+\.py|\w+\.rs))(?:::(\w+))?")


class Row(NamedTuple):
    to: str
    touch: tuple[str, ...]
    tests: tuple[str, ...]


def rows() -> list[Row]:
    found = []
    for line in PAGE.read_text(encoding="utf-8").splitlines():
        if line.startswith("| ") and not line.startswith("| to |"):
            to, touch, tests = line.strip("| ").split(" | ")
            found.append(Row(to, *(tuple(re.findall(r"`([^`]+)`", cell)) for cell in (touch, tests))))
    return found


ROWS = rows()


def is_path(name: str) -> bool:
    return " " not in name and (
        "/" in name or name.endswith((".py", ".rs", ".md", ".toml", ".pyi")) or name == "Makefile"
    )


@cache
def files_of_tests() -> tuple[Path, ...]:
    folders = (ROOT / "tests", ROOT / "placement_core" / "tests")
    return tuple(path for folder in folders for path in folder.rglob("*") if path.suffix in {".py", ".rs"})


def has_test(name: str) -> bool:
    """One Python file that ends so, with a function, a class or a machine's test case in it; or one of Rust."""
    match = TEST.fullmatch(name)
    if match is None:
        return False
    found = [path for path in files_of_tests() if f"/{path.as_posix()}".endswith(f"/{match.group(1)}")]
    wanted = match.group(2)
    pattern = rf"(?m)^\s*(?:async )?(?:def|class|fn) {wanted}\b|^{wanted} = "
    return len(found) == 1 and (not wanted or bool(re.search(pattern, found[0].read_text(encoding="utf-8"))))


def test_there_are_many_rows_and_no_change_twice() -> None:
    assert len(ROWS) >= LEAST_ROWS
    assert len({row.to for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: str(row.to)[:60])
def test_what_a_row_names_is_there(row: Row) -> None:
    paths = [name for name in row.touch if is_path(name)]
    assert [path for path in paths if not ((ROOT / path).exists() or (ROOT / "py_scheduler" / path).exists())] == []
    tests = [name for name in row.tests if name != "make check"]
    assert [name for name in tests if not has_test(name)] == []
    assert row.tests


def test_what_is_not_there_would_be_noticed() -> None:
    assert has_test("test_flows.py::test_a_flow_that_was_idle_has_no_credit")
    assert not has_test("test_flows.py::test_a_flow_that_was_idle")
    assert not has_test("test_flow.py")
    assert not has_test("test_staleness.py"), "there are two"
    assert not has_test("flows")
