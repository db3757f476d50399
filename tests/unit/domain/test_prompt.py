"""A context that grows turn by turn, and what is kept of it from one turn to the next."""

from __future__ import annotations

import json
from array import array
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.generation import FinishReason, Generation
from py_scheduler.domain.prompt import Prompt
from py_scheduler.domain.trajectory import TrajectoryBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

IDS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=5)


@given(turns=st.lists(st.tuples(IDS, st.booleans()), max_size=6))
def test_each_prompt_is_the_ids_so_far_and_stays_so(turns: Sequence[tuple[list[int], bool]]) -> None:
    prompt, context = Prompt.of(()), list[int]()
    seen: list[tuple[Prompt, list[int]]] = [(prompt, [])]
    for more, is_asked in turns:
        prompt, context = prompt.grown(array("i", more)), context + more
        seen.append((prompt, context))
        if is_asked:
            prompt.json()
    for each, ids in seen:
        assert (list(each), len(each), bool(each)) == (ids, len(ids), bool(ids))
        assert (each.low, each.high) == (min(ids, default=0), max(ids, default=0))
        assert msgspec.json.decode(each.json()) == ids


@pytest.mark.parametrize("count", [1, 99, 100, 101])
def test_the_ends_of_few_ids_are_found_as_those_of_many(count: int) -> None:
    ids = [3, *range(5, 4 + count)]
    for each in (ids, ids[::-1]):
        assert (Prompt.of(each).low, Prompt.of(each).high) == (min(ids), max(ids))


def test_a_turn_writes_its_own_ids_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A conversation of 50 turns over 64k tokens would otherwise be written 25 times over."""
    written: list[int] = []

    def encode(value: Any) -> bytes:
        written.append(len(value))
        return json.dumps(value).encode()

    monkeypatch.setattr("py_scheduler.domain.prompt.msgspec", SimpleNamespace(json=SimpleNamespace(encode=encode)))
    builder = TrajectoryBuilder()
    for turn in range(4):
        builder.append_environment(range(10 + turn))
        builder.prompt().json()
        builder.append_generation(Generation.of([7], [-1.0], text="", finish_reason=FinishReason.STOP), "student")
    assert written == [10, 1 + 11, 1 + 12, 1 + 13]


def test_a_prompt_is_no_view_of_what_it_was_made_of() -> None:
    ids = array("i", [1, 2])
    prompt = Prompt.of(ids)
    ids.append(3)
    assert list(prompt) == [1, 2]
    assert (prompt[1], list(prompt[1:])) == (2, [2])


@pytest.mark.parametrize("token_ids", [[2**31], [-(2**31) - 1]])
def test_what_is_no_int32_is_no_prompt(token_ids: list[int]) -> None:
    with pytest.raises(OverflowError):
        Prompt.of(token_ids)
