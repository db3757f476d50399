"""Cursors: opaque, bound to filter and store, and never taken for something else."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.domain.requests import EventFilter, EventKind
from py_scheduler.errors import CursorExpiredError, CursorMismatchError, InvalidArgumentError
from py_scheduler.wire.common.cursor import CursorCodec
from tests.support import strategies

EPOCH = bytes(range(16))
filters = st.builds(
    EventFilter,
    submission_id=strategies.optional_names,
    kinds=st.frozensets(st.sampled_from(EventKind)),
    namespace=strategies.names,
)


@given(filters, st.integers(0, 2**64 - 1))
def test_a_cursor_comes_back(event_filter: EventFilter, sequence: int) -> None:
    assert CursorCodec(EPOCH, event_filter).decode(CursorCodec(EPOCH, event_filter).encode(sequence)) == sequence


def test_no_cursor_is_the_oldest_event() -> None:
    assert CursorCodec(EPOCH, EventFilter()).decode(b"") is None


@given(filters, filters)
def test_a_cursor_belongs_to_its_filter(made_for: EventFilter, used_with: EventFilter) -> None:
    cursor = CursorCodec(EPOCH, made_for).encode(7)
    same_scope = (made_for.submission_id, made_for.namespace) == (used_with.submission_id, used_with.namespace)
    if same_scope and made_for.kinds in (used_with.kinds, frozenset()):
        assert CursorCodec(EPOCH, used_with).decode(cursor) == 7
    else:
        with pytest.raises(CursorMismatchError):
            CursorCodec(EPOCH, used_with).decode(cursor)


def test_field_boundaries_count() -> None:
    cursor = CursorCodec(EPOCH, EventFilter(namespace="ab", submission_id="c")).encode(1)
    with pytest.raises(CursorMismatchError):
        CursorCodec(EPOCH, EventFilter(namespace="a", submission_id="bc")).decode(cursor)


def test_another_store_is_told_whatever_the_filter() -> None:
    cursor = CursorCodec(bytes(16), EventFilter(submission_id="a")).encode(7)
    with pytest.raises(CursorExpiredError, match="call execute_rollout") as caught:
        CursorCodec(EPOCH, EventFilter(), oldest_sequence=5).decode(cursor)
    assert caught.value.oldest_sequence == 5


@given(st.binary(min_size=1, max_size=60))
def test_garbage_is_no_cursor(garbage: bytes) -> None:
    with pytest.raises(InvalidArgumentError, match="not a cursor"):
        CursorCodec(EPOCH, EventFilter()).decode(garbage)


@given(st.integers(0, 36), st.integers(1, 255))
def test_a_damaged_byte_is_noticed(position: int, flip: int) -> None:
    cursor = bytearray(CursorCodec(EPOCH, EventFilter()).encode(7))
    cursor[position] ^= flip
    with pytest.raises(InvalidArgumentError, match="not a cursor"):
        CursorCodec(EPOCH, EventFilter()).decode(bytes(cursor))
