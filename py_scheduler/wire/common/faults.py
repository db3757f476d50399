"""Collects everything that is wrong with one message, so that a caller can mend all of it at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.domain.limits import MAX_VIOLATIONS
from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable


class Faults:
    """Grows while a message is read; `check` ends the reading."""

    __slots__ = ("_violations", "are_many")

    def __init__(self) -> None:
        self._violations: list[FieldViolation] = []
        self.are_many = False
        """No more are taken, so a reader may stop."""

    def add(self, field: str, description: str) -> None:
        if len(self._violations) < MAX_VIOLATIONS:
            self._violations.append(FieldViolation(field, description))
        else:
            self.are_many = True

    def add_all(self, prefix: str, violations: Iterable[FieldViolation]) -> None:
        """Takes violations of a part of the message whose path is `prefix`."""
        for violation in violations:
            self.add(".".join(filter(None, (prefix, violation.field))), violation.description)

    def check(self) -> None:
        """Raises InvalidArgumentError if anything was found."""
        if not self._violations:
            return
        if self.are_many:
            self._violations.append(FieldViolation("", "and more"))
        raise InvalidArgumentError(self._violations)
