"""No server is left paused by a fleet: whatever fails and whoever is removed, each hears the end of a pause."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec
import pytest

from py_scheduler.adapters.fleet.control import UNTOLD_SECONDS
from py_scheduler.domain.generation import Endpoints, EndpointState, PauseMode
from py_scheduler.errors import EngineRejectedError, GenerationError
from tests.support.fake_clock import settle
from tests.support.models.fleets import (
    CONTINUE,
    MAX_BACKOFF_SECONDS,
    PAUSE,
    Controlled,
    controlled,
    fleet_on,
    up,
)
from tests.support.models.scripted_sglang import VOCAB_SIZE, ScriptedSglang
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from py_scheduler.adapters.sglang.fleet import SglangFleet
    from tests.support.fake_clock import FakeClock

DRAINING = EndpointState.DRAINING


def named(*servers: ScriptedSglang) -> Endpoints:
    return Endpoints(urls=tuple(each.base_url for each in servers))


def urls(fleet: SglangFleet) -> list[str]:
    return [view.url for view in fleet.endpoint_views()]


def without_its_vocabulary(fleet: SglangFleet) -> None:
    """Nobody asks a server that is named from now on: while it is paused it holds that question for its whole limit."""
    fleet._settings = msgspec.structs.replace(fleet._settings, vocab_size=VOCAB_SIZE)


async def all_looked(fleet: SglangFleet, clock: FakeClock, seconds: float = MAX_BACKOFF_SECONDS) -> None:
    """So much later, when each of its endpoints has been asked whatever it is asked then."""
    await clock.advance(seconds)
    await eventually(lambda: all(each._looking is None for each in fleet._endpoints))


async def test_a_removed_server_that_does_not_obey_the_end_of_a_pause_stays_until_it_does() -> None:
    async with controlled() as (fleet, clock, first, second):
        await fleet.pause(PauseMode.RETRACT)
        fleet.set_endpoints(named(second))
        first.control_status = 500
        await fleet.resume()
        view = fleet.endpoint_views()[0]
        assert (view.url, view.state) == (first.base_url, DRAINING)
        assert "answered 500" in view.reason
        first.control_status = 200
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: urls(fleet) == [second.base_url])
        assert not first.is_paused


async def test_a_server_that_is_removed_while_it_is_caught_up_with_a_pause_hears_its_end() -> None:
    async with Controlled() as first, Controlled() as second, fleet_on(second) as (fleet, _):
        await fleet.pause(PauseMode.RETRACT)
        first.control_gate = asyncio.Event()
        fleet.set_endpoints(named(first, second))
        await first.until(lambda: PAUSE in first.calls)
        fleet.set_endpoints(named(second))
        await fleet.resume()
        first.control_gate.set()
        await eventually(lambda: urls(fleet) == [second.base_url])
        assert (first.calls, first.is_paused) == ([PAUSE, CONTINUE], False)


async def test_a_server_that_was_set_aside_in_a_pause_and_removed_hears_its_end() -> None:
    async with controlled() as (fleet, clock, first, second):
        await fleet.pause(PauseMode.RETRACT)
        fleet._endpoints[0].failed("scripted")
        fleet.set_endpoints(named(second))
        await fleet.resume()
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: urls(fleet) == [second.base_url])
        assert (first.calls, first.is_paused) == ([PAUSE, CONTINUE], False)


async def test_one_that_is_named_again_before_it_has_heard_the_end_is_not_up_before() -> None:
    async with controlled() as (fleet, clock, first, second):
        await fleet.pause(PauseMode.RETRACT)
        fleet.set_endpoints(named(second))
        first.control_status = 500
        await fleet.resume()
        fleet.set_endpoints(named(first, second))
        assert up(fleet) == [False, True]
        first.control_status = 200
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])
        assert not first.is_paused


@pytest.mark.parametrize("are_pauses_repeated", [False, True])
async def test_a_removed_server_that_never_answers_leaves_and_hears_the_end_if_it_is_named_again(
    are_pauses_repeated: bool,
) -> None:
    async with (
        Controlled() as first,
        Controlled() as second,
        fleet_on(first, second, load_interval_seconds=60.0, set_aside_max_seconds=60.0) as (fleet, clock),
    ):
        without_its_vocabulary(fleet)
        await fleet.pause(PauseMode.RETRACT)
        fleet.set_endpoints(named(second))
        first.control_status = 500
        await fleet.resume()
        for _ in range(4):
            if are_pauses_repeated:
                await fleet.pause(PauseMode.RETRACT)
                await fleet.resume()
            assert first.base_url in urls(fleet)
            await clock.advance(UNTOLD_SECONDS / 4)
            await all_looked(fleet, clock, 0.0)
        await all_looked(fleet, clock, 60.0)
        assert urls(fleet) == [second.base_url]
        assert first.is_paused
        fleet.set_endpoints(named(first, second))
        await all_looked(fleet, clock, 0.0)
        assert up(fleet) == [True, False], "the server still does not obey"
        first.control_status = 200
        await all_looked(fleet, clock, 60.0)
        assert (up(fleet), first.is_paused) == ([True, True], False)


async def test_a_pause_before_others_are_named_succeeds_while_a_removed_server_does_not_answer() -> None:
    async with controlled() as (fleet, _, first, second):
        await fleet.pause(PauseMode.RETRACT)
        fleet.set_endpoints(named())
        first.control_status = second.control_status = 500
        await fleet.resume()
        await fleet.pause(PauseMode.RETRACT)
        assert [view.state for view in fleet.endpoint_views()] == [DRAINING, DRAINING]


async def test_a_server_that_refuses_the_end_of_a_pause_is_not_up_and_the_others_have_heard_it() -> None:
    async with controlled() as (fleet, clock, first, second):
        await fleet.pause(PauseMode.RETRACT)
        second.control_status = 400
        with pytest.raises(EngineRejectedError):
            await fleet.resume()
        assert (up(fleet), first.is_paused) == ([True, False], False)
        fleet.set_endpoints(named(second))
        assert urls(fleet) == [second.base_url], "the first has nothing to wait for"
        second.control_status = 200
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True])
        assert not second.is_paused


async def test_an_end_of_a_pause_that_its_caller_gives_up_is_heard_all_the_same() -> None:
    async with controlled() as (fleet, clock, first, second):
        await fleet.pause(PauseMode.RETRACT)
        second.control_gate = asyncio.Event()
        ending = asyncio.create_task(fleet.resume())
        await second.until(lambda: CONTINUE in second.calls)
        ending.cancel()
        await asyncio.wait([ending])
        assert not fleet._endpoints[1].is_up, "nobody knows whether it goes on"
        fleet.set_endpoints(named(first))
        second.control_gate.set()
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: urls(fleet) == [first.base_url])
        assert (first.is_paused, second.is_paused) == (False, False)


async def test_a_worker_that_has_not_heard_the_end_does_so_before_its_router_is_up_with_others() -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(ScriptedSglang(is_router=True))
        old, new = [await stack.enter_async_context(Controlled()) for _ in range(2)]
        fleet, clock = await stack.enter_async_context(fleet_on())
        without_its_vocabulary(fleet)
        fleet.set_endpoints(Endpoints(urls=(router.base_url,), control_urls=(old.base_url,)))
        await eventually(lambda: up(fleet) == [True])
        await fleet.pause(PauseMode.RETRACT)
        old.control_status = 500
        await fleet.resume()
        fleet.set_endpoints(Endpoints(urls=(router.base_url,), control_urls=(old.base_url, new.base_url)))
        await all_looked(fleet, clock)
        assert up(fleet) == [False, False]
        old.control_status = 200
        await all_looked(fleet, clock)
        await eventually(lambda: up(fleet) == [True])
        assert (old.is_paused, new.is_paused) == (False, False)


@pytest.mark.parametrize("seed", range(6))
async def test_whatever_happens_no_server_is_up_and_paused_after_a_resume_and_none_is_left_paused(seed: int) -> None:
    chance = random.Random(seed)
    async with AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(Controlled()) for _ in range(3)]
        fleet, clock = await stack.enter_async_context(fleet_on(*servers[:2]))
        for _ in range(40):
            await _step(chance, fleet, clock, servers)
        for server in servers:
            server.control_status = 200
        await fleet.resume()
        _check_none_is_up_and_paused(fleet, servers)
        for _ in range(3):
            await all_looked(fleet, clock)
        assert not any(server.is_paused for server in servers)
        assert sorted(urls(fleet)) == sorted(fleet.endpoints.urls), "whoever was removed has left"


async def _step(chance: random.Random, fleet: SglangFleet, clock: FakeClock, servers: list[Controlled]) -> None:
    match chance.choice(("pause", "resume", "resume", "name", "name", "answer", "fail", "wait", "turns")):
        case "pause":
            # As the gateway has it: another mode only after the end of a pause.
            mode = fleet._paused_in or chance.choice(list(PauseMode))
            await _called(chance, fleet.pause(mode))
        case "resume":
            if await _called(chance, fleet.resume()):
                _check_none_is_up_and_paused(fleet, servers)
        case "name":
            fleet.set_endpoints(named(*chance.sample(servers, chance.randint(0, len(servers)))))
        case "answer":
            chance.choice(servers).control_status = chance.choice((200, 200, 400, 500))
        case "fail" if fleet._endpoints:
            chance.choice(fleet._endpoints).failed("scripted")
        case "wait":
            await clock.advance(chance.uniform(0.0, MAX_BACKOFF_SECONDS))
        case _:
            for _ in range(chance.randint(0, 20)):
                await asyncio.sleep(0)
    await settle()


async def _called(chance: random.Random, call: object) -> bool:
    """Whether it was not given up."""
    task = asyncio.ensure_future(call)  # type: ignore[call-overload]
    if chance.random() < 0.2:
        for _ in range(chance.randint(0, 8)):
            await asyncio.sleep(0)
        task.cancel()
    answers = await asyncio.gather(task, return_exceptions=True)
    assert isinstance(answers[0], GenerationError | asyncio.CancelledError | None)
    return not isinstance(answers[0], asyncio.CancelledError)


def _check_none_is_up_and_paused(fleet: SglangFleet, servers: list[Controlled]) -> None:
    paused = {server.base_url for server in servers if server.is_paused}
    assert not [view for view in fleet.endpoint_views() if view.state is EndpointState.UP and view.url in paused]
