"""docs/decisions: every page is in the index, dated, and says what was decided and why."""

from __future__ import annotations

import re
from datetime import date
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[3] / "docs" / "decisions"
PAGES = sorted(FOLDER.glob("[0-9]*.md"))
MOST_BYTES = 1_500


def test_the_index_names_every_page_once_with_its_title_and_date() -> None:
    index = (FOLDER / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"(?m)^\| \[(.+)\]\((\S+)\) \| (\S+) \|$", index)
    told = {name: (title, day) for title, name, day in rows}
    assert len(rows) == len(told) == len(PAGES) > 40
    for page in PAGES:
        title, day = told[page.name]
        assert page.read_text(encoding="utf-8").startswith(f"# {title}\n\nDate: {day}\n"), page.name


def test_the_numbers_have_no_gap() -> None:
    assert [int(page.name.split("-")[0]) for page in PAGES] == list(range(1, len(PAGES) + 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.name))
def test_a_page_is_short_dated_and_says_why(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    date.fromisoformat(re.findall(r"(?m)^Date: (\S+)$", text)[0])
    assert re.findall(r"(?m)^\*\*(\w+)\.\*\* ", text) == ["Context", "Decision", "Why", "Consequences"]
    assert len(text.encode()) <= MOST_BYTES
