"""The server's end of a child: what it hears late, twice, wrongly, or not at all."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgspec
import pytest

from py_scheduler.domain.results import Outcome, Reward
from py_scheduler.domain.runners.frames import (
    PROTOCOL,
    Ask,
    Cancel,
    EvalGroup,
    Generate,
    Hello,
    Pong,
    Raised,
    Ready,
    Returned,
    RewardSaid,
    raw,
)
from py_scheduler.domain.runners.runner import HandlerPlan
from py_scheduler.domain.values.plain import details_json
from py_scheduler.errors import RunnerLostError, RunnerStartError
from py_scheduler.execution.children.session import ChildSession
from tests.support.fake_clock import settle
from tests.support.harness import task_of
from tests.support.runners.fake_children import FakeChild

if TYPE_CHECKING:
    from py_scheduler.execution.workers import Worker


def session_of(child: FakeChild) -> ChildSession:
    return ChildSession(child, lambda _: {}, lambda _: None)


def score(session: ChildSession) -> asyncio.Task[Any]:
    """A phase that needs no episode."""
    return asyncio.create_task(cast("Any", session.eval_group(task_of(), [])))


def rewards(*scores: float) -> msgspec.Raw:
    return raw([RewardSaid(score=one, details=details_json({})) for one in scores])


def order_no(child: FakeChild) -> int:
    """Of the last phase that it was told to play."""
    return [said.order_no for said in child.heard if isinstance(said, EvalGroup)][-1]


async def test_a_word_that_comes_late_answers_no_other_order() -> None:
    child = FakeChild(1, "says nothing to a ping")
    session = session_of(child)
    await session.prepare(HandlerPlan(name="m:C"), ())
    first = asyncio.create_task(session.ping())
    await settle()
    first.cancel()
    await settle()
    second = asyncio.create_task(session.ping())
    await settle()
    child.say(Pong(order_no=2, resident_mib=1.0))
    await settle()
    assert not second.done(), "that was the first one's"
    child.say(Pong(order_no=3, resident_mib=2.0))
    assert await second
    assert session.resident_mib == 2.0


async def test_what_an_earlier_phase_says_once_more_changes_nothing_of_the_next() -> None:
    """As a late report of attempt 1 after attempt 2 began, from the same child."""
    child = FakeChild(1)
    session = session_of(child)
    first = score(session)
    await settle()
    child.say(Returned(order_no=1, value=rewards(1.0)))
    assert await first == [Reward(score=1.0)]
    second = score(session)
    await settle()
    for late in (
        Returned(order_no=1, value=rewards(0.5)),
        Raised(order_no=1, outcome=Outcome.AGENT_TIMEOUT, error="too late"),
    ):
        child.say(late)
    await settle()
    assert not second.done()
    child.say(Returned(order_no=2, value=rewards(2.0)))
    child.say(Returned(order_no=2, value=rewards(3.0)))
    assert await second == [Reward(score=2.0)]
    assert child.is_alive


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (Ready(order_no=1), "Ready to an order of another kind"),
        (Returned(order_no=1, value=raw("odd")), "Expected `array`, got `str`"),
        (Returned(order_no=1, value=msgspec.Raw(b"\xc1")), "it said what no runner says: "),
        (Returned(order_no=1, value=raw([RewardSaid(score=1.0, details=b"{")])), "it said what no runner says: "),
        (Hello(pid=1, protocol=PROTOCOL + 1), "install the same version"),
    ],
)
async def test_a_child_that_answers_what_is_no_answer_is_lost(said: Any, told: str) -> None:
    child = FakeChild(1)
    session = session_of(child)
    playing = score(session)
    await settle()
    child.say(said)
    with pytest.raises(RunnerLostError, match=r"no runner says|install the same version") as lost:
        await playing
    assert told in str(lost.value)
    assert not child.is_alive
    assert not session.is_alive


async def test_nothing_is_heard_of_a_child_that_was_killed() -> None:
    child = FakeChild(1)
    session = session_of(child)
    playing = score(session)
    await settle()
    child.say_bytes(b"GET / HTTP/1.1")
    child.say(Returned(order_no=1, value=rewards(1.0)))
    with pytest.raises(RunnerLostError, match="it said what no runner says"):
        await playing


async def test_a_message_that_cannot_be_sent_costs_its_phase_and_not_the_child(monkeypatch: pytest.MonkeyPatch) -> None:
    child = FakeChild(1)
    session = session_of(child)
    with monkeypatch.context() as patched:

        def too_long(_frame: bytes) -> None:
            raise ValueError("a message of 5 bytes, at most 4 can be sent")

        patched.setattr(child, "send", too_long)
        with pytest.raises(ValueError, match="at most 4"):
            await score(session)
    assert await session.ping()


async def test_two_stops_at_once_are_one_stop_and_the_phase_still_ends_by_the_childs_word() -> None:
    child = FakeChild(1)
    session = session_of(child)
    playing = score(session)
    await settle()
    playing.cancel()
    playing.cancel()
    await settle()
    assert isinstance(child.heard[-1], Cancel)
    playing.cancel()
    await settle()
    assert not playing.done()
    child.say(Raised(order_no=1, outcome=Outcome.INFRA_OTHER, error="CancelledError", is_cancelled=True))
    await asyncio.wait([playing])
    assert playing.cancelled()
    assert child.is_alive
    assert await session.ping()


async def test_a_server_that_ends_while_a_stop_is_under_way_kills_at_once() -> None:
    child = FakeChild(1)
    session = session_of(child)
    worker = SimpleNamespace(is_closing=False)
    session.worker = cast("Worker", worker)
    playing = score(session)
    await settle()
    playing.cancel()
    await settle()
    worker.is_closing = True
    playing.cancel()
    await asyncio.wait([playing])
    assert playing.cancelled()
    assert not child.is_alive
    await session.over.wait()
    assert session.how_it_ended == "the server is ending"


async def test_what_a_child_has_asked_for_ends_with_it_although_nobody_plays_any_more() -> None:
    child, asked = FakeChild(1), asyncio.Event()
    session = session_of(child)

    class Episode:
        generating = True

        async def generate(self, **_: Any) -> None:
            asked.set()
            try:
                await asyncio.Event().wait()
            finally:
                self.generating = False

    episode = Episode()
    session._answers.episode = cast("Any", episode)
    child.say(Ask(call_no=1, question=Generate(role="student", max_new_tokens=None, sampling=None)))
    await asked.wait()
    child.die()
    await settle()
    assert not episode.generating


@pytest.mark.parametrize("order", range(3))
async def test_whichever_order_a_child_dies_at_who_waits_for_its_word_hears_so(order: int) -> None:
    child = FakeChild(1, "says nothing to a ping")
    session = session_of(child)
    if order == 0:
        child.mood = "dies at its start"
        with pytest.raises(RunnerStartError, match="ended before it was ready: signal SIGKILL"):
            await session.prepare(HandlerPlan(name="m:C"), ())
    elif order == 1:
        asked = asyncio.create_task(session.ping())
        await settle()
        child.die()
        assert not await asked
    else:
        playing = score(session)
        await settle()
        child.die()
        with pytest.raises(RunnerLostError, match="signal SIGKILL"):
            await playing
    # And so does who comes later.
    assert not await session.ping()
    with pytest.raises(RunnerLostError, match="signal SIGKILL"):
        await score(session)
    with pytest.raises(RunnerStartError, match="signal SIGKILL"):
        await session.prepare(HandlerPlan(name="m:C"), ())
