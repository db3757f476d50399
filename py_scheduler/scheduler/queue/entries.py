"""What waits for room: a batch of attempts, or a request for a lease. Each is let in whole, or it waits.

An entry carries what it wants from the moment it is pushed: `tokens` of `per_sample`, all at once. A batch of 100
attempts whose budget lets 8 run at a time wants 8 tokens; each of its 100 attempts will use one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import msgspec

from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.domain.resources import Resource
from py_scheduler.execution.attempt import PlannedAttempt

if TYPE_CHECKING:
    from py_scheduler.placement import Lease

FlowKey = tuple[str, bool]
"""Namespace, and whether it is evals."""

OrderKey = tuple[float, int, int, int]
"""The batch id's place (two numbers), when its submission came to wait, and when it came itself."""
CAME: Final = 2
ARRIVAL: Final = 3
ENTRY: Final = -1
"""Where an entry stands in a tuple that sorts it: behind what it is sorted by."""

DemandKey = str | Resource
"""What entries of one demand have in common: their evaluator's id, or the demand itself of a lease."""

Shape = tuple[DemandKey, int]
"""The demand's key, and the count of attempts or tokens. Entries of one flow and shape want the same room."""


class ReadyEntry(msgspec.Struct, gc=False, kw_only=True):
    """Something that waits. Equal are only entries that are the same one: compare with `is`.

    Its class has no cycle collector: nothing that it holds may lead back to it.
    """

    flow: FlowKey
    order: OrderKey
    shape: Shape
    per_sample: Resource
    """What one token holds: of one evaluator always the same object, which the pool has converted already."""
    tokens: int
    """What it takes at once when it is let in."""
    cost: int
    """What its admission is charged to its flow: tokens, as often as they are used."""
    queued_at: float
    """Monotonic seconds."""
    bypassed: int = 0
    """How often it was overtaken, as `ready_queue` defines that."""
    is_gone: bool = False
    """Whether it waits no longer."""
    looked_at: int = 0
    """The queue's `generation` when what it wants was last looked at."""


class ReadyBatch(ReadyEntry, gc=False, kw_only=True):
    """Attempts of one submission and one spec."""

    submission_id: str
    spec: EvaluatorSpec
    attempts: list[PlannedAttempt]

    @property
    def namespace(self) -> str:
        return self.attempts[0].namespace


class ReadyLease(ReadyEntry, gc=True, kw_only=True):
    """Room that a scheduler outside asked for; `grant` gets it in the turn that lets the entry in."""

    budget: Resource
    grant: Callable[[Lease], None]


def age_of(entry: ReadyEntry) -> tuple[float, int]:
    """What it is sorted by among those that go first for their age, the oldest first."""
    return entry.queued_at, entry.order[ARRIVAL]
