"""The event loop standing still, noticed from outside it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import TYPE_CHECKING

from py_scheduler.app.loop_watchdog import LoopWatchdog
from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.results import AgentResult, Reward
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of

if TYPE_CHECKING:
    import pytest

BLOCKED_SECONDS = 0.2


class Blocking(BaseAgent):
    async def run(self, episode: Episode) -> AgentResult:
        stand_still()
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


def stand_still() -> None:
    time.sleep(4 * BLOCKED_SECONDS)


class Changes(list[bool]):
    """What the watchdog says, and a way to wait for it."""

    def __init__(self) -> None:
        self.came = asyncio.Event()

    def __call__(self, is_blocked: bool) -> None:
        self.append(is_blocked)
        self.came.set()

    async def until(self, expected: list[bool]) -> None:
        async with asyncio.timeout(10):
            while list(self) != expected:
                self.came.clear()
                await self.came.wait()


class Time:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self._loop_thread = threading.get_ident()
        self._asked = asyncio.Event()

    def __call__(self) -> float:
        if threading.get_ident() == self._loop_thread:
            self._asked.set()
        return self.now

    async def asked_by_the_loop(self) -> None:
        self._asked.clear()
        async with asyncio.timeout(60):
            await self._asked.wait()


async def test_a_handler_that_blocks_is_named_and_the_loop_counts_as_blocked_for_a_while(
    caplog: pytest.LogCaptureFixture,
) -> None:
    changes = Changes()
    with caplog.at_level(logging.WARNING, "py_scheduler.app.loop_watchdog"):
        async with LoopWatchdog(BLOCKED_SECONDS, changes), running_engine(spec_of(Blocking(), "blocker")) as harness:
            await harness.done(await harness.submit([task_of(task_type="blocker")]))
            await changes.until([True])
            await changes.until([True, False])
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert len(told) == 1, "one stop is told of once"
    assert "in handler Blocking.run (" in told[0]
    assert f"{__file__}:" in told[0]
    assert "of evaluator 'blocker'" in told[0]
    assert "stand_still" in told[0], "the stack shows where"


async def test_a_loop_that_moves_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    """Its time goes on from one of the watchdog's beats to the next, however long this machine takes for that."""
    changes, clock = Changes(), Time()
    async with LoopWatchdog(BLOCKED_SECONDS, changes, clock):
        for _ in range(10):
            clock.now += BLOCKED_SECONDS / 4
            await clock.asked_by_the_loop()
    assert not changes
    assert not caplog.records


async def test_what_blocks_and_is_no_handler_is_named_too(caplog: pytest.LogCaptureFixture) -> None:
    changes = Changes()
    async with LoopWatchdog(BLOCKED_SECONDS, changes):
        stand_still()
        await changes.until([True])
    assert "in stand_still (" in caplog.text
