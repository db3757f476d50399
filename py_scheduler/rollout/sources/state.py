"""What the state of a data source looks like."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from py_scheduler.errors import FailedPreconditionError

if TYPE_CHECKING:
    from py_scheduler.domain.training.data import SourceState

OnEnd = Literal["restart", "stop"]
"""What a source does at its end: begin a new epoch, or give no more."""


class Position(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A source's state; `rows` and `order` tell whether it is this source's."""

    source: str
    epoch: int
    cursor: int
    rows: str = ""
    order: str = ""


def read_position(state: SourceState, name: str) -> Position:
    try:
        position = msgspec.convert(state, Position)
    except msgspec.ValidationError as error:
        raise FailedPreconditionError(f"this is no state of the data source {name!r}: {error}") from error
    if position.source != name:
        raise FailedPreconditionError(f"this is the state of {position.source!r}, not of the data source {name!r}")
    return position
