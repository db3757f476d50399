"""How long a flight may wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.in_flight import Flight

if TYPE_CHECKING:
    from collections.abc import Callable


def watch_timers(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """When each timer that is set from now on is due, in seconds from its making."""
    loop, made = asyncio.get_running_loop(), list[float]()
    plain: Callable[..., asyncio.TimerHandle] = loop.call_at

    def call_at(when: float, *others: object, **named: object) -> asyncio.TimerHandle:
        made.append(when - loop.time())
        return plain(when, *others, **named)

    monkeypatch.setattr(loop, "call_at", call_at)
    return made


async def test_a_timer_is_not_moved_by_every_event_and_never_due_too_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    flight = Flight("r")
    async with flight.watched(600.0):
        timers = watch_timers(monkeypatch)
        for _ in range(1_000):
            flight.allow(120.0)
        assert len(timers) == 1
        assert timers[0] == pytest.approx(120.0 * 17 / 16, abs=1.0)
        flight.allow(30.0)
        flight.allow(600.0)
        assert len(timers) == 3, "another limit holds at once"


async def test_silence_is_allowed_for_at_least_as_long_as_was_said_after_every_event() -> None:
    flight, loop = Flight("r"), asyncio.get_running_loop()
    async with flight.watched(600.0):
        for seconds in (0.5, 0.5, 20.0, 0.5, 20.0, 20.0):
            for _ in range(100):
                now = loop.time()
                flight.allow(seconds)
                assert flight._scope is not None
                due = flight._scope.when()
                assert due is not None
                assert now + seconds <= due <= loop.time() + seconds * 17 / 16


async def test_a_flight_that_is_cut_waits_no_more_whatever_it_is_allowed() -> None:
    flight = Flight("r")

    async def wait() -> None:
        async with flight.watched(600.0):
            flight.allow(600.0)
            flight.cut()
            flight.allow(600.0)
            await asyncio.sleep(600.0)

    with pytest.raises(TimeoutError):
        await wait()
