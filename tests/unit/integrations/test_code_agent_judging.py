"""The tool agent's two judgements: what a reply asks for, and whether what was returned is what is expected."""

from __future__ import annotations

import time
from typing import Any

import pytest

from py_scheduler.integrations.code_agent import Action, _is_expected, parse_action


@pytest.mark.parametrize(
    ("returned", "expected", "passes"),
    [
        ("[" * 3_000, [], False),
        ("[" * 3_000 + "]" * 3_000, [], False),
        ('{"a":' * 3_000, {}, False),
        ("1" + "0" * 400, 1.5, False),
        ("1" + "0" * 400, 10**400, True),
        ("1" * 100_000, 1.5, False),
        ("1e999", 1.0, False),
        ("NaN", 1.0, False),
        ('"\\ud800"', "x", False),
        ("", 1, False),
        (str(2**64 + 1), 2**64, False),
        (str(2**64 + 1), 2**64 + 1, True),
        (str(10**12 + 1), 10**12, False),
        ("2.0000000001", 2, False),
        ("2.0", 2, True),
        ("2", 2.0, True),
        ("0.30000000000000004", 0.3, True),
        ("0.3001", 0.3, False),
        ("true", 1, False),
        ("1", True, False),
        ('{"a": [1, 2.0000000000001]}', {"a": [1, 2.0]}, True),
    ],
)
def test_a_value_is_the_expected_one_or_wrong_and_never_an_error(returned: str, expected: Any, passes: bool) -> None:
    assert _is_expected(returned, expected) is passes


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        ("```python\n" * 9_900, "The block is not closed."),
        ("```" + " " * 99_000 + "x y", "There is no block."),
        ("```\n" * 24_000, "There are 12000 blocks."),
        ("```python\n" + "x\n" * 60_000 + "```", "The reply has 120013 characters, more than 100000."),
    ],
)
def test_a_reply_is_read_in_a_time_that_grows_with_its_length(text: str, begins: str) -> None:
    started = time.perf_counter()
    found = parse_action(text)
    assert time.perf_counter() - started < 0.5
    assert isinstance(found, str)
    assert found.startswith(begins)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("```python\r\nx\r\n```\r\n", Action("python", "x\r\n")),
        ("```python\nx\n```y\n```", Action("python", "x\n```y\n")),
        ("```a b\n```python\nx\n```", Action("python", "x\n")),
        ("```python\n```sh\nls\n```", Action("python", "```sh\nls\n")),
    ],
)
def test_a_block_ends_at_the_first_bare_fence(text: str, parsed: Action) -> None:
    assert parse_action(text) == parsed
