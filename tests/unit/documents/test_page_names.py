"""What the pages name is there: files, classes, functions, settings. And ARCHITECTURE.md stays short."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

from py_scheduler.knobs import CONFIG, KNOBS

ROOT = Path(__file__).parents[3]
PAGES = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")),
    # The first columns of these two are the names of other schedulers; test_reference.py holds what they lead to.
    *sorted(page for page in (ROOT / "docs").glob("*.md") if page.name not in {"reference.md", "trinity.md"}),
]
SOURCES = ("py_scheduler", "placement_core", "proto", "tests", "benches", "examples", ".ci", ".github", "requirements")
SUFFIXES = {".py", ".pyi", ".rs", ".proto", ".toml", ".txt", ".jinja", ".yaml"}
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|pyi|rs|proto|toml|md|txt|binpb)|/)(?:::\w+)?")
IDENTIFIER = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*(?:\(\))?")
OF_OTHERS = {
    *("Vec", "calloc", "freelist", "fdatasync", "grpcio", "valgrind", "clippy", "protobuf", "rustfmt"),
    *("AsyncOpenAI", "TOKEN", "XDG_STATE_HOME", "subjectAltName"),
}
"""Names of the language, of tools and of other libraries."""
OF_READERS = {"my_agents.py"}
"""Files that an example has its reader write."""
MOST_BYTES = 30_000
MOST_COLUMNS = 120


@cache
def files() -> tuple[Path, ...]:
    found = [path for folder in SOURCES for path in (ROOT / folder).rglob("*") if "target" not in path.parts]
    return (*found, *ROOT.glob("*"), *(ROOT / "docs").rglob("*"))


@cache
def known_paths() -> frozenset[str]:
    """Every path, from the root or from any folder below it on; folders end with a slash."""
    known: set[str] = set()
    for path in files():
        parts = path.relative_to(ROOT).parts
        end = "/" if path.is_dir() else ""
        known.update("/".join(parts[start:]) + end for start in range(len(parts)))
    return frozenset(known)


@cache
def known_words() -> frozenset[str]:
    words = {knob.variable for knob in (CONFIG, *KNOBS)}
    for path in files():
        if path.is_file() and (path.suffix in SUFFIXES or path.name in {"Makefile", "run"}):
            words.update(re.findall(r"[A-Za-z_]\w*", path.read_text(encoding="utf-8")))
        words.add(path.stem)
        words.add(path.name)
    return frozenset(words)


def quoted(page: Path) -> list[str]:
    """What stands in backticks in a page's prose and tables."""
    prose = re.sub(r"(?ms)^```.*?^```$", "", page.read_text(encoding="utf-8"))
    return re.findall(r"`([^`\n]+)`", prose)


def missing_paths(names: list[str]) -> set[str]:
    paths = {name for name in names if PATH.fullmatch(name)}
    return {path for path in paths - OF_READERS if path.split("::")[0] not in known_paths()}


def missing_words(names: list[str]) -> set[str]:
    dotted = {name.removesuffix("()") for name in names if IDENTIFIER.fullmatch(name) and not PATH.fullmatch(name)}
    return {
        name for name in dotted if name not in OF_OTHERS and not all(part in known_words() for part in name.split("."))
    }


def page_id(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_file_that_a_page_names_is_there(page: Path) -> None:
    assert missing_paths(quoted(page)) == set()


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_every_class_function_and_setting_that_a_page_names_is_there(page: Path) -> None:
    assert missing_words(quoted(page)) == set()


def test_what_is_not_there_would_be_noticed() -> None:
    gone = "scheduler/lease_" + "desk.py"
    assert missing_paths([gone, "scheduler/engine.py", "scheduler/ledger/"]) == {gone}
    word = "Lease" + "Desk"
    assert missing_words([word, "LeaseRecord", "ledger.apply()", f"Ledger.{word}"]) == {word, f"Ledger.{word}"}


def test_every_module_of_the_drawings_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    drawn = re.findall(r"(?ms)^```\n(.*?)^```$", text)
    paths = {path for drawing in drawn for path in re.findall(r"[\w/]+(?:\.py|/(?=[\s─]))", drawing)}
    assert len(paths) > 12
    assert missing_paths(sorted(paths)) == set()


def test_architecture_is_short_enough_to_be_read() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    assert len(text.encode()) <= MOST_BYTES
    assert [line for line in text.splitlines() if len(line) > MOST_COLUMNS] == []
