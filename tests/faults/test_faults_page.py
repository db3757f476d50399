"""What docs/faults.md says of tests is true: each that it names is there."""

from __future__ import annotations

import re

from tests.support.served_process import ROOT

_NAMED = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")


def test_every_test_that_the_page_names_exists() -> None:
    named = _NAMED.findall((ROOT / "docs/faults.md").read_text())
    assert len(named) > 50
    for file, name in named:
        source = (ROOT / file).read_text()
        assert not name or re.search(rf"^(async def {name}\(|def {name}\(|{name} = )", source, re.MULTILINE), (
            file,
            name,
        )


def test_every_row_and_every_case_is_there() -> None:
    page = (ROOT / "docs/faults.md").read_text()
    cases = page[page.index("## Cases") : page.index("## Faults found")]
    numbers = [int(n) for row in re.findall(r"^\| ([\d, ]+) \|", cases, re.MULTILINE) for n in row.split(",")]
    assert sorted(numbers) == list(range(1, 33))
