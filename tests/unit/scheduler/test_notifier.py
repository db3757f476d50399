"""What wakes all who wait for a change."""

from __future__ import annotations

import asyncio

from py_scheduler.scheduler.notifier import Notifier, rings_within


async def test_a_ring_wakes_all_who_wait_and_nobody_who_comes_later() -> None:
    notifier = Notifier()
    early = [asyncio.ensure_future(notifier.next_ring().wait()) for _ in range(3)]
    await asyncio.sleep(0)
    notifier.ring()
    assert not notifier.next_ring().is_set()
    await asyncio.gather(*early)


async def test_what_changes_between_the_look_and_the_wait_is_not_missed() -> None:
    notifier = Notifier()
    ring = notifier.next_ring()
    notifier.ring()
    assert await rings_within(60.0, ring)


async def test_who_waits_in_vain_is_told_so() -> None:
    assert not await rings_within(0.0, Notifier().next_ring())
