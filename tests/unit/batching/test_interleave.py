"""ABCABC over lists of unequal length."""

from __future__ import annotations

from itertools import count, islice

from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.batching import interleave


def test_one_of_each_in_turn_and_the_rest_of_the_longer_ones() -> None:
    assert list(interleave(["aaaa", "b", "", "cc"])) == list("abcacaa")


def test_nothing_to_interleave() -> None:
    assert list(interleave([])) == list(interleave([[], []])) == []


def test_endless_lists_are_read_no_further_than_asked() -> None:
    assert list(islice(interleave([count(), count(10)]), 5)) == [0, 10, 1, 11, 2]


@given(st.lists(st.lists(st.integers(), max_size=8), max_size=5))
def test_each_list_keeps_its_order_and_none_gets_ahead(lists: list[list[int]]) -> None:
    tagged = [[(number, item) for item in items] for number, items in enumerate(lists)]
    mixed = list(interleave(tagged))
    assert [[item for item in mixed if item[0] == number] for number in range(len(lists))] == tagged
    given_so_far = [0] * len(lists)
    for number, _ in mixed:
        given_so_far[number] += 1
        # Whoever has some left is at most one behind.
        behind = [given_so_far[n] for n, items in enumerate(lists) if given_so_far[n] < len(items)]
        assert not behind or max(given_so_far) - min(behind) <= 1
