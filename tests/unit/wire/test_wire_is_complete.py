"""What was added to the domain and forgotten on its way to the wire: nothing draws it, so nothing else misses it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, get_args

import msgspec
import pytest

from py_scheduler.domain.events import JournalledEvent, TaskDone, TasksAccepted
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.requests import EventKind, NodeView
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import SampleDone
from py_scheduler.domain.task import RetryPolicy, Task, TaskConfig
from py_scheduler.scheduler.log.event_log import KIND_OF_EVENT
from py_scheduler.wire.common.fields import EVENT_KINDS
from tests.support import strategies

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

DRAWN: list[tuple[type[msgspec.Struct], SearchStrategy[Any]]] = [
    (Task, strategies.tasks),
    (TaskConfig, strategies.configs),
    (RetryPolicy, strategies.configs.map(lambda config: config.retry)),
    (SamplingParams, strategies.samplings()),
    (StoppingCriteria, strategies.stoppings),
    (SampleDone, strategies.samples()),
    (TaskDone, strategies.dones),
    (Resource, strategies.sample_resources | strategies.budget_resources),
    (NodeView, strategies.node_views),
]
STAY_HOME = {"TaskDone.is_eval"}
"""Fields that do not travel."""


@pytest.mark.parametrize(("struct", "strategy"), DRAWN, ids=[struct.__name__ for struct, _ in DRAWN])
def test_the_tests_of_the_wire_draw_every_field(struct: type[msgspec.Struct], strategy: SearchStrategy[Any]) -> None:
    drawn = strategies.some_of(strategy)
    for field in struct.__struct_fields__:
        values = [getattr(value, field) for value in drawn]
        assert any(value != values[0] for value in values) or f"{struct.__name__}.{field}" in STAY_HOME, field


def test_every_event_has_a_kind_that_travels_and_is_drawn() -> None:
    events = set(get_args(JournalledEvent))
    assert set(KIND_OF_EVENT) == events
    assert set(KIND_OF_EVENT.values()) == set(EventKind) == set(EVENT_KINDS.number_of)
    # TasksAccepted travels as ids alone and has a test of its own.
    assert set(strategies.EVENTS_THAT_TRAVEL_WHOLE) == events - {TasksAccepted}
