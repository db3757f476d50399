from __future__ import annotations

import asyncio

from py_scheduler.execution.deadlines import Deadlines
from tests.support.fake_clock import FakeClock


class Item:
    def __init__(self, name: str) -> None:
        self.name = name
        self.is_over = False


def make() -> tuple[FakeClock, Deadlines[Item], list[tuple[str, float]]]:
    clock = FakeClock()
    expired: list[tuple[str, float]] = []
    deadlines: Deadlines[Item] = Deadlines(clock, lambda item, when: expired.append((item.name, when - 1_000)))
    return clock, deadlines, expired


async def test_deadlines_expire_in_order_and_not_early() -> None:
    clock, deadlines, expired = make()
    deadlines.add(1_005, Item("late"))
    deadlines.add(1_002, Item("early"))
    await clock.advance(1.9)
    assert expired == []
    await clock.advance(0.2)
    assert expired == [("early", 2)]
    await clock.advance(10)
    assert expired == [("early", 2), ("late", 5)]


async def test_what_is_over_is_not_told() -> None:
    clock, deadlines, expired = make()
    item = Item("a")
    deadlines.add(1_001, item)
    item.is_over = True
    await clock.advance(5)
    assert expired == []


async def test_finished_items_do_not_pile_up() -> None:
    clock, deadlines, _ = make()
    for number in range(10_000):
        item = Item(str(number))
        deadlines.add(1_000_000 + number, item)
        item.is_over = True
    assert len(deadlines._heap) <= 64
    assert clock.live_timers == 1


async def test_an_expiry_may_set_new_deadlines() -> None:
    clock = FakeClock()
    expired: list[float] = []

    def again(item: Item, when: float) -> None:
        expired.append(when - 1_000)
        if len(expired) < 3:
            deadlines.add(when + 1, item)

    deadlines: Deadlines[Item] = Deadlines(clock, again)
    deadlines.add(1_001, Item("a"))
    await clock.advance(10)
    assert expired == [1, 2, 3]
    assert clock.live_timers == 0


async def test_of_many_that_are_due_together_some_are_told_of_in_each_turn_and_none_after_a_clear() -> None:
    clock, expired = FakeClock(), []
    deadlines: Deadlines[Item] = Deadlines(clock, lambda item, _when: expired.append(item.name), at_once=10)
    for number in range(35):
        deadlines.add(1_001.0, Item(str(number)))
    clock.now += 1.0
    deadlines._expire()
    assert len(expired) == 10
    assert deadlines.is_behind
    deadlines.add(1_000.5, Item("late"))
    await asyncio.sleep(0)
    assert len(expired) == 20
    assert expired[10] == "late"
    deadlines.clear()
    await asyncio.sleep(0)
    assert len(expired) == 20
    assert not deadlines.is_behind
