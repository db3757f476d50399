"""What RunningAttempt sets by itself instead of calling the class that it is made of."""

from __future__ import annotations

import asyncio

from py_scheduler.domain.events import AttemptRef
from py_scheduler.execution.attempt import PlannedAttempt, RunningAttempt
from py_scheduler.execution.stopping import Stoppable
from tests.support.fake_clock import FakeClock
from tests.support.harness import task_of


async def test_a_running_attempt_begins_as_everything_that_can_be_stopped_does() -> None:
    task = asyncio.create_task(asyncio.sleep(0))
    planned = PlannedAttempt(AttemptRef("t", 0, 1), task_of(), 0, 1, "s", "default", (0.0, 0), 0.0)
    running = RunningAttempt(planned, None, task, FakeClock(), lambda _when, _running: None)
    stoppable = Stoppable(task)
    await task
    slots = Stoppable.__slots__
    assert {slot: getattr(running, slot) for slot in slots} == {slot: getattr(stoppable, slot) for slot in slots}
    assert [slot for slot in RunningAttempt.__slots__ if not hasattr(running, slot)] == []
