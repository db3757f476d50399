"""What docs/faults.md says of tests is true: each that it names is there, and what it says is missing is missing."""

from __future__ import annotations

import re

from tests.support.servers.served_process import ROOT

_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_MISSING = re.compile(r"\b(?:there is|there are|has|have) no\b (`?)([\w.-]+)")
_CASE = re.compile(r"Case (\d+) of the faults")
_DEFINED = r"""(?m)(^\s*(?:async def|def|class) {name}\b|["']{name}["'])"""


def page() -> str:
    return (ROOT / "docs/faults.md").read_text()


def rows() -> list[str]:
    return [line for line in page().splitlines() if line.startswith("| ")]


def cases() -> dict[int, str]:
    """The row of each case."""
    text = page()
    found: dict[int, str] = {}
    for row in text[text.index("## Cases") : text.index("## Faults found")].splitlines():
        if numbers := re.match(r"\| ([\d, ]+) \|", row):
            found |= {int(number): row for number in numbers[1].split(",")}
    return found


def test_every_test_that_the_page_names_exists() -> None:
    named = _NAMED.findall(page())
    assert len(named) > 50
    for file, name in named:
        source = (ROOT / file).read_text()
        assert not name or re.search(rf"^(async def {name}\(|def {name}\(|{name} = )", source, re.MULTILINE), (
            file,
            name,
        )


def test_every_row_and_every_case_is_there() -> None:
    assert sorted(cases()) == list(range(1, 33))


def contradicted(row: str) -> list[str]:
    """What a row denies: names that the package knows all the same, and what has no name that could be looked for."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "py_scheduler").rglob("*.py")]
    return [
        name
        for quote, name in _MISSING.findall(row)
        if not quote or any(re.search(_DEFINED.format(name=re.escape(name)), source) for source in sources)
    ]


def test_what_a_row_says_there_is_none_of_is_not_there() -> None:
    assert {row: names for row in rows() if (names := contradicted(row))} == {}


def test_a_row_that_denies_what_there_is_would_be_noticed() -> None:
    assert contradicted("| Ray node dies | not shown yet: there is no `ray` runner |") == ["ray"]
    assert contradicted("| x | not shown yet: there is no `Collector` |") == ["Collector"]
    assert contradicted("| x | not shown yet: there are no such processes |") == ["such"]
    assert contradicted("| x | not shown yet: there is no `thread` runner |") == []


def test_a_case_that_a_test_says_it_is_of_names_that_test() -> None:
    for path in (ROOT / "tests").rglob("test_*.py"):
        for number in map(int, _CASE.findall(path.read_text(encoding="utf-8"))):
            assert str(path.relative_to(ROOT)) in cases()[number], (path, number)
