"""How the fields of every message are read: enums by name, and everything that is wrong with a message at once.

Enums of the domain and enum numbers of the protos belong together by name: `Outcome.SOLVED` <-> `OUTCOME_SOLVED`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

from py_scheduler._generated.rollout_scheduler.v1 import (
    event_pb2,
    rollout_service_pb2,
    runner_pb2,
    scheduler_service_pb2,
    task_pb2,
)
from py_scheduler.domain.events import StopCause
from py_scheduler.domain.generation import FinishReason, LogProbKind
from py_scheduler.domain.limits import MAX_VIOLATIONS
from py_scheduler.domain.requests import Delivery, EventKind
from py_scheduler.domain.results import AttemptState, EpisodePhase, Outcome, TaskState
from py_scheduler.domain.runners.runner import RunnerState
from py_scheduler.domain.training.samples import SampleStatus
from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from enum import StrEnum

E = TypeVar("E", bound="StrEnum")


class EnumTable(Generic[E]):
    """One enum both ways. A member without a number never travels (the live attempt states)."""

    __slots__ = ("_members", "number_of")

    def __init__(self, enum: type[E], wrapper: Any, prefix: str) -> None:
        numbers = dict(wrapper.items())
        self.number_of: dict[E, Any] = {
            member: numbers[name] for member in enum if (name := f"{prefix}_{member.name}") in numbers
        }
        self._members = {number: member for member, number in self.number_of.items()}

    def member(self, number: int, field: str) -> E:
        """Raises InvalidArgumentError for a number that is unset or of a newer version."""
        member = self._members.get(number)
        if member is None:
            known = ", ".join(f"{number} ({member.name})" for number, member in self._members.items())
            raise InvalidArgumentError(f"is {number}, must be one of {known}", field)
        return member

    def member_or_none(self, number: int, field: str) -> E | None:
        """None for a number that is unset. Raises InvalidArgumentError for one of a newer version."""
        return self.member(number, field) if number else None


OUTCOMES = EnumTable(Outcome, task_pb2.Outcome, "OUTCOME")
LOG_PROB_KINDS = EnumTable(LogProbKind, task_pb2.LogProbKind, "LOG_PROB_KIND")
FINISH_REASONS = EnumTable(FinishReason, task_pb2.FinishReason, "FINISH_REASON")
EPISODE_PHASES = EnumTable(EpisodePhase, task_pb2.EpisodePhase, "EPISODE_PHASE")
ATTEMPT_STATES = EnumTable(AttemptState, event_pb2.AttemptState, "ATTEMPT_STATE")
TASK_STATES = EnumTable(TaskState, event_pb2.TaskState, "TASK_STATE")
STOP_CAUSES = EnumTable(StopCause, event_pb2.StopCause, "STOP_CAUSE")
SAMPLE_STATUSES = EnumTable(SampleStatus, rollout_service_pb2.SampleStatus, "SAMPLE_STATUS")
EVENT_KINDS = EnumTable(EventKind, scheduler_service_pb2.EventKind, "EVENT_KIND")
DELIVERIES = EnumTable(Delivery, scheduler_service_pb2.Delivery, "DELIVERY")
RUNNER_STATES = EnumTable(RunnerState, runner_pb2.RunnerState, "RUNNER_STATE")


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
