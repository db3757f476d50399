"""The runners' states as a table for people to read."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler.domain.aligned_table import aligned

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


def state_table(states: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Its lines: a head, a rule, and a runner to each line; "-" where it has no such key."""
    keys = sorted({key for state in states.values() for key in state})
    rows = [["runner_id", *keys]]
    rows += [[str(runner_id), *(str(state.get(key, "-")) for key in keys)] for runner_id, state in states.items()]
    return aligned(rows)
