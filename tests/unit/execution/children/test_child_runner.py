"""Places for children: who gets which, and what becomes of those that die, with children that a test plays."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.domain.runners.runner import RunnerState
from py_scheduler.execution.children.handle import EmptyHandle
from py_scheduler.execution.runner import RunnerGoneError
from tests.support.fake_clock import settle
from tests.support.runners.fake_children import MOODS, FakeToken, Rig


async def test_who_dies_before_it_is_pinged_is_replaced_and_costs_nothing() -> None:
    rig = Rig(max_runners=1)
    (await rig.take()).leave()
    rig.host.launched[0][1].is_alive = False  # It has ended, and nobody has told yet.
    handle = rig.take()
    await settle()
    rig.host.launched[0][1]._on_end("signal SIGKILL")
    (await handle).leave()
    assert [view.restarts for view in rig.runner.views()] == [1]
    await rig.runner.close()


async def test_a_child_that_leaves_when_it_is_asked_is_not_killed_later() -> None:
    rig = Rig(max_runners=1, max_resident_mib=0.5)
    (await rig.take()).leave()
    child = rig.host.launched[0][1]
    await settle()
    assert (child.is_alive, rig.clock.live_timers) == (True, 1)
    child.die("exit status 0")
    await settle()
    assert rig.clock.live_timers == 0
    (await rig.take()).leave()
    await rig.clock.advance(5.0)
    assert not rig.host.launched[1][1].is_alive, "it did not leave"
    await rig.runner.close()


async def test_a_child_that_dies_between_its_handle_and_its_play_is_replaced_and_the_next_takes_its_place() -> None:
    rig = Rig(max_runners=1)
    handle, waiting = await rig.take(), rig.take()
    await settle()
    rig.host.launched[0][1].die()
    await settle()
    assert not waiting.done(), "its place is its handle's until that is left"
    handle.leave()
    (await waiting).leave()
    assert [(view.restarts, view.state) for view in rig.runner.views()] == [(1, RunnerState.IDLE)]
    assert len(rig.host.live) == 1
    await rig.runner.close()


async def test_a_child_whose_work_was_stopped_is_killed_and_not_asked_to_leave_however_large_it_is() -> None:
    rig = Rig(max_runners=1, max_resident_mib=0.5)
    handle = await rig.take()
    handle._suspicion = "its work was stopped"
    handle.leave()
    await settle()
    assert not rig.host.launched[0][1].is_alive
    assert rig.clock.live_timers == 0
    assert "its work was stopped" in rig.runner.views()[0].message
    await rig.runner.close()


@pytest.mark.parametrize("way_out", ["replaced", "let go", "too large"])
async def test_a_child_that_is_to_end_keeps_its_room_until_it_has_ended(way_out: str) -> None:
    rig = Rig(max_runners=1, max_resident_mib=0.5 if way_out == "too large" else None)
    rig.host.mood = "lingers"
    handle = await rig.take(FakeToken("", 0))
    if way_out == "replaced":
        handle._suspicion = "its work was stopped"
    handle.leave()
    waiting = rig.take(FakeToken("", 1 if way_out == "let go" else 0))
    await settle()
    assert len(rig.host.launched) == 1, "two children, where there may be one"
    rig.host.mood = ""
    rig.host.launched[0][1].die()
    (await waiting).leave()
    assert len(rig.host.launched) == 2
    await rig.runner.close()


async def test_who_waits_for_the_room_of_a_child_that_does_not_end_hears_so() -> None:
    rig = Rig(max_runners=1, prepare_max_retries=0, start_seconds=0.01)
    rig.host.mood = "lingers"
    handle = await rig.take()
    handle._suspicion = "its work was stopped"
    handle.leave()
    empty = await rig.take()
    assert isinstance(empty, EmptyHandle)
    assert "has not ended" in empty._how
    rig.host.launched[0][1].die()
    await rig.runner.close()


async def test_a_runner_that_closes_ends_those_that_leave_those_that_start_and_those_that_wait() -> None:
    rig = Rig(max_runners=2, max_resident_mib=0.5)
    (await rig.take()).leave()  # Too large: it is asked to leave, and another comes.
    await settle()
    handle = await rig.take()
    rig.host.gate.clear()
    waiting = [rig.take() for _ in range(2)]
    await settle()
    assert len(rig.host.live) == 2
    await asyncio.gather(rig.runner.close(), rig.runner.close())
    for one in waiting:
        with pytest.raises(RunnerGoneError):
            await one
    with pytest.raises(RunnerGoneError):
        await rig.take()
    handle.leave()
    assert rig.host.live == []
    assert rig.clock.live_timers == 0
    assert rig.host.starting == 0


async def test_a_child_plays_for_the_gpus_it_was_started_with_alone() -> None:
    rig = Rig(max_runners=2)
    first, second = await rig.take(FakeToken("", 0)), await rig.take(FakeToken("", 1))
    third = rig.take(FakeToken("", 2))
    await settle()
    assert not third.done(), "there is no place"
    first.leave()
    (await third).leave()
    assert [key for key, _ in rig.host.launched] == [("", (0,)), ("", (1,)), ("", (2,))]
    assert not rig.host.launched[0][1].is_alive, "its place was needed"
    second.leave()
    again = await rig.take(FakeToken("", 1))
    assert len(rig.host.launched) == 3
    again.leave()
    await rig.runner.close()


async def test_who_has_waited_longest_is_next_whichever_children_would_do() -> None:
    rig = Rig(max_runners=1)
    handle = await rig.take(FakeToken("", 0))
    order: list[str] = []

    async def take(name: str, token: Any) -> None:
        taken = await rig.runner.take_handle(token)
        order.append(name)
        taken.leave()

    waiting = []
    for name, token in (("a", FakeToken("", 0)), ("any", None), ("b", FakeToken("", 0))):
        waiting.append(asyncio.create_task(take(name, token)))
        await settle()
    handle.leave()
    await asyncio.wait(waiting)
    assert order == ["a", "any", "b"]
    await rig.runner.close()


async def test_who_waits_for_gpus_without_a_child_is_not_passed_over_by_those_who_share_one() -> None:
    rig = Rig(max_runners=1)
    handle, second = await rig.take(FakeToken("", 0)), rig.take(FakeToken("", 0))
    await settle()
    other = rig.take(FakeToken("", 1))
    await settle()
    handle.leave()
    handle, third = await second, rig.take(FakeToken("", 0))
    await settle()
    handle.leave()
    handle = await other
    assert rig.host.live == [("", (1,))]
    assert not third.done()
    handle.leave()
    (await third).leave()
    await rig.runner.close()


async def test_who_gives_up_waiting_in_the_moment_that_he_is_given_a_child_gives_it_on() -> None:
    rig = Rig(max_runners=1)
    handle, waiting = await rig.take(), rig.take()
    await settle()
    handle.leave()
    waiting.cancel()
    await settle()
    assert rig.states == [RunnerState.IDLE]
    (await rig.take()).leave()
    await rig.runner.close()


async def test_nobody_waits_on_a_node_that_is_gone() -> None:
    rig = Rig(max_runners=1)
    handle = await rig.take(FakeToken("node-a"))
    waiting = rig.take(FakeToken("node-a"))
    await settle()
    rig.runner.drop_node("node-a")
    with pytest.raises(RunnerGoneError):
        await waiting
    with pytest.raises(RunnerGoneError):
        await rig.take(FakeToken("node-a"))
    rig.host.launched[0][1].die("its node is gone")
    await settle()
    handle.leave()
    assert rig.runner.views() == [], "it is not started there again"
    (await rig.take(FakeToken("node-b"))).leave()
    rig.runner.add_node("node-a")
    (await rig.take(FakeToken("node-a"))).leave()
    await rig.runner.close()


class Chaos:
    """What permits, children and the machine may do, each at any moment."""

    def __init__(self) -> None:
        self.rig = Rig(max_runners=3)
        self.waiting: list[asyncio.Task[Any]] = []
        self.taken: list[Any] = []
        self.is_spoiled = False

    async def turn(self) -> None:
        await settle()
        for handle in [handle for handle in self.waiting if handle.done()]:
            self.waiting.remove(handle)
            if handle.cancelled() or isinstance(handle.exception(), RunnerGoneError):
                continue
            if isinstance(handle.result(), EmptyHandle):
                assert self.is_spoiled
            else:
                self.taken.append(handle.result())
        assert len(self.taken) <= 3
        assert len(self.rig.host.live) <= 3
        assert sum(state != RunnerState.FAILED for state in self.rig.states) <= 3

    async def take(self, number: int) -> None:
        self.waiting.append(self.rig.take(FakeToken("ab"[number % 2], number % 3)))

    async def leave(self, number: int) -> None:
        if self.taken:
            self.taken.pop(number % len(self.taken)).leave()

    async def cancel(self, number: int) -> None:
        if self.waiting:
            self.waiting[number % len(self.waiting)].cancel()

    async def die(self, number: int) -> None:
        if launched := self.rig.host.launched:
            launched[number % len(launched)][1].die()

    async def bury(self, _number: int) -> None:
        for _, child in self.rig.host.launched:
            if child.is_killed:
                child.die()

    async def spoil(self, number: int) -> None:
        self.rig.host.mood = (*MOODS, "lingers")[number % (len(MOODS) + 1)]
        self.is_spoiled = True

    async def lose_a_node(self, number: int) -> None:
        """Its children die with it, before or after the runner hears of it."""
        node = "ab"[number % 2]
        dying = [child for key, child in self.rig.host.launched if key[0] == node]
        if number % 3:
            self.rig.runner.drop_node(node)
        for child in dying:
            child.die()
        self.rig.runner.drop_node(node)

    async def add_a_node(self, number: int) -> None:
        self.rig.runner.add_node("ab"[number % 2])

    async def wait(self, number: int) -> None:
        await self.rig.clock.advance(number)

    async def end(self) -> None:
        """All that is wrong is put right, whoever has a handle leaves it, and whoever waits gets one."""
        self.rig.host.mood = ""
        for node in "ab":
            self.rig.runner.add_node(node)
        for _ in range(200):
            await self.bury(0)
            await self.turn()
            if not (self.waiting or self.taken):
                break
            while self.taken:
                self.taken.pop().leave()
            await self.rig.clock.advance(30.0)
        assert not self.waiting, "somebody waits for ever"
        assert RunnerState.BUSY not in self.rig.states
        for _, child in self.rig.host.launched:
            child.mood = ""
        await self.rig.runner.close()
        assert self.rig.host.live == []
        assert self.rig.clock.live_timers == 0


STEPS = st.lists(
    st.tuples(
        st.sampled_from(
            ["take", "take", "leave", "cancel", "die", "bury", "spoil", "lose_a_node", "add_a_node", "wait"]
        ),
        st.integers(0, 7),
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=100)
@given(STEPS)
def test_no_place_is_ever_lost(steps: list[tuple[str, int, bool]]) -> None:
    """Whatever happens in whichever order, everybody who waits gets a handle in the end, and never too many at once."""

    async def play() -> None:
        chaos = Chaos()
        for name, number, has_turn in steps:
            await getattr(chaos, name)(number)
            if has_turn:
                await chaos.turn()
        await chaos.end()

    asyncio.run(play())
