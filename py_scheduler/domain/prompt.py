"""What a model reads, asked turn after turn: a context that only grows.

Invariant: a prompt never changes, and whatever a backend made of its ids (their text in JSON, the least and the
greatest of them) is kept by each prompt that grows out of it. So the objects of a turn are as many as its new tokens,
however long the context is; the rest is copied as a block.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, overload

import msgspec
import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_FEW = 100
"""Ids up to which Python finds the least and the greatest sooner than numpy has begun: 20 take 2 µs, and there 14."""


class Prompt(Sequence[int]):
    """Token ids, none of which is said to be valid. `low`, `high`: the least and the greatest; 0 without ids."""

    __slots__ = ("_ids", "_text", "_written", "high", "low")

    def __init__(self, ids: array[int], low: int, high: int, text: bytes, written: int) -> None:
        """Nobody else has `ids`. text: the first `written` of them in JSON. See `of` and `grown`."""
        self._ids = ids
        self.low = low
        self.high = high
        self._text = text
        self._written = written

    @classmethod
    def of(cls, token_ids: Sequence[int]) -> Prompt:
        """The same, if it is one already. Raises OverflowError for an id that is no int32."""
        if isinstance(token_ids, Prompt):
            return token_ids
        ids = id_array(token_ids)
        return cls(ids, *ends_of(ids), b"", 0)

    def grown(self, more: array[int]) -> Prompt:
        """With `more` behind it."""
        if not more:
            return self
        low, high = ends_of(more)
        if self._ids:
            low, high = min(self.low, low), max(self.high, high)
        return Prompt(self._ids + more, low, high, self._text, self._written)

    def json(self) -> bytes:
        """As a JSON list. Only ids that no earlier prompt has written are written here."""
        if self._written < len(self._ids):
            text = msgspec.json.encode(self._ids[self._written :].tolist())[1:-1]
            self._text = b"%b,%b" % (self._text, text) if self._text else text
            self._written = len(self._ids)
        return b"[%b]" % self._text

    def __len__(self) -> int:
        return len(self._ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids)

    @overload
    def __getitem__(self, place: int) -> int: ...
    @overload
    def __getitem__(self, place: slice) -> array[int]: ...
    def __getitem__(self, place: int | slice) -> int | array[int]:
        return self._ids[place]


def id_array(token_ids: Iterable[int]) -> array[int]:
    """A copy. Made whole or not at all: raises OverflowError for an id that is no int32, TypeError for no integer."""
    return array("i", token_ids if isinstance(token_ids, array) else [*token_ids])


def ends_of(ids: array[int]) -> tuple[int, int]:
    """The least and the greatest; 0 without ids."""
    if len(ids) < _FEW:
        return min(ids, default=0), max(ids, default=0)
    values = np.frombuffer(ids, dtype=np.int32)
    return int(values.min()), int(values.max())
