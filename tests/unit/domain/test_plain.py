"""What of a handler's values can be sent and stored."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from py_scheduler.domain.values.plain import are_plain, details_json, plain_number, safe_text


def nested(depth: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(depth):
        value = {"in": value}
    return value


def circle() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["in"] = value
    return value


@pytest.mark.parametrize(
    ("odd", "fault"),
    [
        (object(), "TypeError: object is no JSON value"),
        (1j, "TypeError: complex is no JSON value"),
        (circle(), "RecursionError"),
        (nested(3_000), "RecursionError"),
        (nested(65), "nested more than 64 deep"),
        (["\ud800"], "UnicodeEncodeError"),
        (2**70, "OverflowError"),
        ([{"n": -(2**63) - 1}], "OverflowError"),
        (np.array([object()]), "TypeError: object is no JSON value"),
    ],
    ids=["object", "complex", "circle", "deep", "rather deep", "surrogate", "big", "big inside", "array of objects"],
)
def test_an_entry_that_json_cannot_carry_is_replaced_and_the_others_stay(odd: object, fault: str) -> None:
    details = msgspec.json.decode(details_json({"odd": odd, "good": [1, {"a": None}]}))
    assert details["good"] == [1, {"a": None}]
    assert details["odd"].startswith("unreadable_details: ")
    assert fault in details["odd"]


def test_what_is_large_and_flat_is_not_deep() -> None:
    rows = {"rows": [{"n": number} for number in range(1_000)]}
    assert msgspec.json.decode(details_json(rows)) == rows


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)


@given(details=st.dictionaries(st.text(max_size=3), SCALARS | st.lists(SCALARS, max_size=2), max_size=4))
@example({"n": 2**63 - 1, "m": -(2**63)})
@example({"n": 2**63})
@example({"score": float("nan")})
@example({"score": float("inf")})
@example({"zero": -0.0, "tiny": 5e-324, "large": 1e22, "whole": 1.0})
@example({"text": "\ud800"})
def test_what_is_plain_comes_back_as_it_is(details: dict[str, Any]) -> None:
    if are_plain(details):
        back = msgspec.json.decode(details_json(details))
        # As repr tells -0.0 from 0.0, and 1.0 from 1.
        assert repr(back) == repr(details)


@pytest.mark.parametrize("value", ["x" * 1_000, True, 7, -0.5, None])
def test_most_details_are_plain(value: object) -> None:
    assert are_plain({"answer": value})


@pytest.mark.parametrize(
    "odd", [np.float64(0.5), np.int64(1), [1], {"a": 1}, "x" * 1_001, "\u00fc", float("nan"), 2**63, object()]
)
def test_what_might_be_changed_or_large_is_not(odd: object) -> None:
    assert not are_plain({"answer": odd})
    assert not are_plain({odd if isinstance(odd, str) else 1: 1})
    assert not are_plain({str(number): 1 for number in range(33)})


@pytest.mark.parametrize("number", [np.float32(0.5), np.float64(0.5), np.array(0.5), 0.5])
def test_numbers_of_numpy_are_numbers(number: object) -> None:
    plain = plain_number(number)
    assert type(plain) is float
    assert plain == 0.5


def test_text_is_what_utf8_carries() -> None:
    class Text(str):
        __slots__ = ()

    assert safe_text("é \ud800") == "é ?"
    assert type(safe_text(Text("plain"))) is str
