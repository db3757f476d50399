"""The seats of an evaluator's slots: what is taken is left, whoever is cancelled when."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.events import AttemptRef
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.execution.evaluator import Evaluator
from tests.support.fake_clock import settle
from tests.support.handlers import spec_of
from tests.support.harness import task_of


class OneSeat:
    """A runner whose only seat is given when the test says so, and a board that nobody plays for."""

    kind = "fake"
    standing_seat = None
    is_usable = True

    def __init__(self) -> None:
        self.given = asyncio.Event()
        self.taken = self.left = self.free_slots = 0

    async def take_seat(self, _token: object) -> OneSeat:
        await self.given.wait()
        self.taken += 1
        return self

    def leave(self) -> None:
        self.left += 1

    def begin(self, *_: object) -> None:
        """The attempt is no longer to be run."""

    def slot_is_free(self, *_: object) -> None:
        self.free_slots += 1


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("cancellations", [1, 2, 3])
async def test_a_slot_that_is_cancelled_as_it_gets_its_seat_leaves_it(turns: int, cancellations: int) -> None:
    seat: Any = OneSeat()
    attempt = PlannedAttempt(AttemptRef("s-1", 0, 1), task_of(), 0, 1, "s", "default", (0, 0), 0.0)
    evaluator = Evaluator(spec_of(BaseAgent()), [attempt], SimpleNamespace(), seat, 0.0, seat)  # type: ignore[arg-type]
    worker: Any = SimpleNamespace(is_abandoned=False, turn_is_over=lambda: False)
    slot = asyncio.create_task(evaluator.drain(None, worker))
    await settle()
    seat.given.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(cancellations):
        slot.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([slot])
    await settle()
    assert (seat.left, seat.free_slots) == (seat.taken, 1)
