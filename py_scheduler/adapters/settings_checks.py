"""Which numbers a backend can be set to at all, whether a file or a program sets them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Collection


def check_numbers(settings: msgspec.Struct, *, may_be_zero: Collection[str] = ()) -> None:
    """Every number of `settings` must be above 0; those that `may_be_zero` names, at least 0. None is no number.

    Raises InvalidArgumentError with the name of each field that is not.
    """
    faults = []
    for field in msgspec.structs.fields(settings):
        value = getattr(settings, field.name)
        if not isinstance(value, (int, float)) or value > 0 or (value == 0 and field.name in may_be_zero):
            continue
        bound = "at least 0" if field.name in may_be_zero else "above 0"
        faults.append(FieldViolation(field.name, f"is {value}, must be {bound}"))
    if faults:
        raise InvalidArgumentError(faults)
