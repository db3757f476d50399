"""Starts of children, and those that fail: tries, backoffs, who hears of it, and who plays meanwhile."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.domain.runners.runner import RunnerState
from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.children.handle import EmptyHandle
from tests.support.fake_clock import settle
from tests.support.runners.fake_children import MOODS, FakeToken, Rig


async def test_starts_are_bounded_and_a_place_is_no_capacity_before_its_child_is_ready() -> None:
    rig = Rig(max_runners=20, prepare_concurrency=8)
    rig.host.gate.clear()
    handles = [rig.take() for _ in range(20)]
    await settle()
    assert rig.host.peak == 8
    assert rig.states == [RunnerState.STARTING] * 20
    assert not any(handle.done() for handle in handles)
    rig.host.gate.set()
    await asyncio.wait(handles)
    assert rig.states == [RunnerState.BUSY] * 20
    assert rig.host.peak == 8
    await rig.runner.close()


async def test_a_start_that_fails_is_tried_again_at_once_and_then_after_a_backoff_that_grows() -> None:
    rig = Rig(max_runners=1, prepare_max_retries=2)
    rig.host.mood = "unfit"
    handle = rig.take()
    waits = []
    for starts in (3, 6, 9, 12):
        await settle()
        assert len(rig.host.launched) == starts
        assert rig.states == [RunnerState.FAILED]
        assert rig.runner.views()[0].message == "no model"
        assert isinstance(await handle, EmptyHandle), "who waited hears so"
        handle, begun = rig.take(), rig.clock.now
        while len(rig.host.launched) == starts:
            await rig.clock.advance(0.25)
        waits.append(rig.clock.now - begun)
    assert all(whole / 2 <= wait <= whole for wait, whole in zip(waits, (1.0, 2.0, 4.0, 8.0), strict=True))
    assert isinstance(await handle, EmptyHandle)
    rig.host.mood = ""
    handle = rig.take()
    await rig.clock.advance(30.0)
    (await handle).leave()
    assert rig.states == [RunnerState.IDLE]
    await rig.runner.close()


async def test_however_often_a_place_has_failed_it_is_tried_again() -> None:
    rig = Rig(max_runners=1, prepare_max_retries=0)
    rig.host.mood = "unfit"
    assert isinstance(await rig.take(), EmptyHandle)
    (slot,) = rig.runner._slots
    slot.failed_rounds = 2_000  # Two to the power of that is no float.
    handle = rig.take()
    await settle()
    await rig.clock.advance(30.0)
    assert isinstance(await handle, EmptyHandle)
    rig.host.mood = ""
    handle = rig.take()
    await rig.clock.advance(30.0)
    (await handle).leave()
    await rig.runner.close()


async def test_whatever_keeps_a_host_from_a_start_the_place_is_tried_again() -> None:
    rig = Rig(max_runners=1, prepare_max_retries=0)
    rig.host.broken = OSError(24, "Too many open files")
    assert isinstance(await rig.take(), EmptyHandle)
    assert rig.states == [RunnerState.FAILED]
    assert rig.runner.views()[0].message == "OSError: [Errno 24] Too many open files"
    rig.host.broken = None
    handle = rig.take()
    await rig.clock.advance(1.0)
    (await handle).leave()
    assert rig.states == [RunnerState.IDLE]
    await rig.runner.close()


async def test_a_failed_place_that_nobody_waits_for_is_given_up() -> None:
    rig = Rig()
    rig.host.mood = "unfit"
    assert isinstance(await rig.take(), EmptyHandle)
    handle = rig.take()
    await settle()
    handle.cancel()
    await rig.clock.advance(60.0)
    assert rig.runner.views() == []
    assert len(rig.host.launched) == 3
    await rig.runner.close()


async def test_an_engine_that_wants_runners_at_its_start_hears_why_there_are_none() -> None:
    rig = Rig(min_runners=2)
    rig.host.mood = "unfit"
    with pytest.raises(RunnerStartError, match="no model"):
        await rig.runner.start()
    assert not any(child.is_alive for _, child in rig.host.launched)


async def test_a_place_that_cannot_be_started_keeps_no_other_gpus_children_from_playing() -> None:
    rig = Rig(max_runners=1, prepare_max_retries=0)
    rig.host.moods = {("", (0,)): "unfit"}
    others = 0
    for _ in range(4):  # Each time its backoff is longer, and somebody waits for it.
        failing = rig.take(FakeToken("", 0))
        await settle()
        for gpu in (1, 2):
            handle = await rig.take(FakeToken("", gpu))
            assert rig.host.live == [("", (gpu,))], "max_runners holds, with places that failed or without"
            handle.leave()
            others += 1
        await rig.clock.advance(30.0)
        assert isinstance(await failing, EmptyHandle)
    assert sum(key == ("", (0,)) for key, _ in rig.host.launched) >= 4, "it is tried again, when there is room"
    rig.host.moods = {}
    failing = rig.take(FakeToken("", 0))
    await rig.clock.advance(30.0)
    (await failing).leave()
    assert rig.states == [RunnerState.IDLE]
    await rig.runner.close()


async def test_who_can_be_served_by_a_child_that_lives_is_not_told_of_a_start_that_failed() -> None:
    rig = Rig(max_runners=2, prepare_max_retries=0)
    handle = await rig.take(FakeToken("", 0))
    rig.host.mood = "unfit"
    waiting = rig.take(FakeToken("", 0))
    await settle()
    assert rig.states == [RunnerState.BUSY, RunnerState.FAILED]
    assert not waiting.done()
    handle.leave()
    (await waiting).leave()
    await rig.clock.advance(30.0)
    assert rig.states == [RunnerState.IDLE], "nobody needs the other"
    await rig.runner.close()


async def test_a_child_that_dies_with_the_word_that_it_is_ready_is_none_to_start_with() -> None:
    rig = Rig(min_runners=1)
    rig.host.mood = "dies when it is ready"
    with pytest.raises(RunnerStartError, match="the runner ended"):
        await rig.runner.start()


@pytest.mark.parametrize("mood", MOODS[1:])
async def test_children_that_never_get_to_play_are_not_started_in_a_loop(mood: str) -> None:
    """Whichever step of the way to their first attempt they do not survive."""
    rig = Rig(max_runners=1, prepare_max_retries=2)
    rig.host.mood = mood
    for starts in (3, 6):
        handle = rig.take()
        while not handle.done():
            await rig.clock.advance(0.25)
        assert isinstance(await handle, EmptyHandle)
        assert len(rig.host.launched) == starts
        assert rig.states == [RunnerState.FAILED]
    rig.host.mood = ""
    handle = rig.take()
    await rig.clock.advance(30.0)
    (await handle).leave()
    assert rig.states == [RunnerState.IDLE]
    assert rig.host.live == [("", None)]
    await rig.runner.close()
