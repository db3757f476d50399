"""The handles of an evaluator's permits: what is taken is left, whoever is cancelled when."""

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


class OneHandle:
    """A runner whose only handle is given when the test says so, and a board that nobody plays for."""

    kind = "fake"
    standing_handle = None
    is_usable = True

    def __init__(self) -> None:
        self.given = asyncio.Event()
        self.taken = self.left = self.free_permits = 0

    async def take_handle(self, _token: object) -> OneHandle:
        await self.given.wait()
        self.taken += 1
        return self

    def leave(self) -> None:
        self.left += 1

    def begin(self, *_: object) -> None:
        """The attempt is no longer to be run."""

    def node_is_gone(self, *_: object) -> bool:
        return False

    def permit_is_free(self, *_: object) -> None:
        self.free_permits += 1


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("cancellations", [1, 2, 3])
async def test_a_slot_that_is_cancelled_as_it_gets_its_handle_leaves_it(turns: int, cancellations: int) -> None:
    handle: Any = OneHandle()
    attempt = PlannedAttempt(AttemptRef("s-1", 0, 1), task_of(), 0, 1, "s", "default", (0, 0), 0.0)
    evaluator = Evaluator(spec_of(BaseAgent()), [attempt], SimpleNamespace(), handle, 0.0, handle)  # type: ignore[arg-type]
    worker: Any = SimpleNamespace(takes_work=True, turn_is_over=lambda: False)
    permit = asyncio.create_task(evaluator.drain(None, worker))
    await settle()
    handle.given.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    for _ in range(cancellations):
        permit.cancel()
        await asyncio.sleep(0)
    await asyncio.wait([permit])
    await settle()
    assert (handle.left, handle.free_permits) == (handle.taken, 1)
