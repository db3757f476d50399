"""How long a flight may wait."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.in_flight import Flight, Flights

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


async def test_one_timer_serves_all_and_is_not_moved_by_any_event(monkeypatch: pytest.MonkeyPatch) -> None:
    flights = Flights()
    with flights.enter("r") as flight, flights.enter("s") as other:
        async with flight.watched(600.0), other.watched(700.0):
            timers = watch_timers(monkeypatch)
            for _ in range(1_000):
                flight.allow(120.0)
                other.allow(120.0)
            assert len(timers) == 1
            assert timers[0] == pytest.approx(120.0, abs=1.0)
            flight.allow(30.0)
            flight.allow(600.0)
            assert len(timers) == 2, "a nearer limit holds at once"
    await flights.close(1.0)


async def silent_for(flight: Flight, seconds: float, events: int = 0) -> float:
    """How long after the last of its events it is told that it waits in vain."""
    loop = asyncio.get_running_loop()
    heard_at = loop.time()

    async def wait() -> None:
        nonlocal heard_at
        async with flight.watched(seconds):
            for _ in range(events):
                await asyncio.sleep(seconds / 2)
                heard_at = loop.time()
                flight.allow(seconds)
            await asyncio.sleep(600.0)

    with pytest.raises(TimeoutError):
        await wait()
    return loop.time() - heard_at


async def test_each_is_told_of_its_own_silence_and_not_before_it_was_long_enough() -> None:
    flights, limits = Flights(), (0.3, 0.1, 0.2, 0.1)

    async def fly(number: int, seconds: float) -> float:
        with flights.enter(f"r{number}") as flight:
            return await silent_for(flight, seconds, events=number)

    lasted = await asyncio.gather(*(fly(number, seconds) for number, seconds in enumerate(limits)))
    for seconds, took in zip(limits, lasted, strict=True):
        assert took >= seconds - 0.002, "the loop's clock has ticks"


async def test_a_pause_of_one_lets_the_timer_of_the_others_alone() -> None:
    flights = Flights()
    with flights.enter("r") as flight, flights.enter("s") as other:
        async with other.watched(600.0):
            other.stand_still(True)
            assert await silent_for(flight, 0.05) >= 0.048
            other.stand_still(False)
        async with other.watched(600.0):
            flights.stand_still()
            flights.go_on()
            assert await silent_for(flight, 0.05) >= 0.048


async def test_a_flight_that_is_cut_waits_no_more_whatever_it_is_allowed() -> None:
    flights = Flights()
    with flights.enter("r") as flight:

        async def wait() -> None:
            async with flight.watched(600.0):
                flight.allow(600.0)
                flight.cut()
                flight.allow(600.0)
                await asyncio.sleep(600.0)

        with pytest.raises(TimeoutError):
            await wait()
        with pytest.raises(TimeoutError):
            await wait()


async def test_one_that_is_being_told_is_not_told_again() -> None:
    flights = Flights()
    with flights.enter("r") as flight:

        async def wait() -> None:
            async with flight.watched(600.0):
                try:
                    flight.cut()
                    await asyncio.sleep(600.0)
                finally:
                    flight.cut()
                    flight.stand_still(True)
                    flight.stand_still(False)

        with pytest.raises(TimeoutError):
            await wait()
