"""ABCABC instead of AABBCC, so that what runs at the same time comes from all data sets. Source: seed 1, section 2."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

T = TypeVar("T")


def interleave(lists: Iterable[Iterable[T]]) -> Iterator[T]:
    """One item of each list in turn, in the order of the lists; one that is at its end is left out from then on."""
    running = [iter(items) for items in lists]
    while running:
        still_running = []
        for items in running:
            try:
                yield next(items)
            except StopIteration:
                continue
            still_running.append(items)
        running = still_running
