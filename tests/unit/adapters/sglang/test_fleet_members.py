"""A fleet whose servers are named while it runs; real HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack

import pytest

from py_scheduler.domain.generation import Endpoints, EndpointState, PauseMode
from py_scheduler.domain.ports import MovableBackend
from py_scheduler.errors import EngineUnavailableError, InvalidArgumentError
from tests.support.fake_clock import FakeClock
from tests.support.models.fleets import (
    CONTINUE,
    MAX_BACKOFF_SECONDS,
    NAME,
    PAUSE,
    UPDATE,
    Controlled,
    controlled,
    fleet_of,
    fleet_on,
    holding,
    request,
    servers,
    start,
    up,
    weights,
)
from tests.support.models.scripted_sglang import ScriptedSglang
from tests.support.waiting import eventually

UP, ASIDE, DRAINING = EndpointState.UP, EndpointState.SET_ASIDE, EndpointState.DRAINING


def named(*servers: ScriptedSglang | str) -> Endpoints:
    return Endpoints(urls=tuple(each if isinstance(each, str) else each.base_url for each in servers))


# -- none yet


async def test_what_is_asked_before_there_is_a_server_waits_for_one_and_no_limit_counts() -> None:
    async with servers(1) as (server,), fleet_on(no_endpoint_seconds=0.05) as (fleet, _):
        assert isinstance(fleet, MovableBackend)
        assert not fleet.is_up
        asked = [
            asyncio.create_task(each) for each in (fleet.generate(request()), fleet.encode("ab"), fleet.model_info())
        ]
        _, waiting = await asyncio.wait(asked, timeout=0.3)
        assert len(waiting) == 3
        fleet.set_endpoints(named(server))
        generation, ids, info = await asyncio.gather(*asked)
        assert len(generation.token_ids) == 8  # type: ignore[attr-defined]
        assert (ids, info.name) == ([97, 98], "tiny")  # type: ignore[attr-defined]


async def test_the_log_says_what_is_waited_for_and_what_comes_up(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "py_scheduler")
    async with servers(1) as (server,), fleet_on(warm_up_seconds=60.0) as (fleet, _):
        fleet.set_endpoints(named(server, "http://127.0.0.1:9"))
        await eventually(lambda: f"{server.base_url} is up and gets generations" in caplog.messages)
        (waiting,) = (message for message in caplog.messages if " is not up yet" in message)
        assert waiting.startswith("http://127.0.0.1:9 is not up yet and has 60 s more to come up: ")


async def test_what_has_waited_is_shared_by_all_that_are_named_together() -> None:
    async with servers(3) as (first, second, third), fleet_on() as (fleet, _):
        waiting = start(fleet, [f"r{n}" for n in range(8)])
        second.load_gate, third.load_status = asyncio.Event(), 500
        fleet.set_endpoints(named(first, second, third))
        await eventually(lambda: up(fleet) == [True, False, False])
        assert first.bodies == [], "it would get all of them"
        second.load_gate.set()
        await asyncio.gather(*waiting)
        assert [len(server.bodies) for server in (first, second, third)] == [4, 4, 0]


async def test_who_is_up_does_not_wait_for_one_that_is_added() -> None:
    async with servers(2) as (first, second), fleet_on(first) as (fleet, _):
        await fleet.generate(request())
        second.load_gate = asyncio.Event()
        fleet.set_endpoints(named(first, second))
        await fleet.generate(request("next"))
        assert len(first.bodies) == 2
        second.load_gate.set()


async def test_a_generation_that_waits_for_the_first_server_can_be_aborted_and_ends_with_the_fleet() -> None:
    async with fleet_on() as (fleet, _):
        aborted, closed = start(fleet, ["aborted", "closed"])
        question = asyncio.create_task(fleet.encode("a"))
        await asyncio.sleep(0)
        await fleet.abort("aborted")
        assert (await aborted).token_ids == []
        await fleet.close()
        for left in (closed, question):
            with pytest.raises(EngineUnavailableError, match="closed"):
                await left


async def test_a_server_that_may_be_loading_its_model_is_waited_for_and_one_that_failed_is_not_for_long() -> None:
    async with servers(1) as (server,), fleet_on(no_endpoint_seconds=0.05, warm_up_seconds=5.0) as (fleet, clock):
        server.load_status = 500
        fleet.set_endpoints(named(server))
        (waiting,) = start(fleet, ["r"])
        await asyncio.wait([waiting], timeout=0.3)
        assert not waiting.done()
        await clock.advance(6.0)
        with pytest.raises(EngineUnavailableError, match="no endpoint came up within"):
            await waiting


async def test_those_that_were_set_before_the_start_are_not_waited_for() -> None:
    """Whoever set them may yet have to start them, and the scheduler has to be there to be told of others."""
    fleet = fleet_of(["http://127.0.0.1:1"], FakeClock())
    fleet.set_endpoints(named("http://127.0.0.1:2"))
    async with asyncio.timeout(5):
        await fleet.start()
    assert [view.url for view in fleet.endpoint_views()] == ["http://127.0.0.1:2"]
    fleet.set_endpoints(None)
    assert fleet.endpoints == named("http://127.0.0.1:1")
    await fleet.close()


# -- removed, and named again


async def test_a_removed_server_gets_nothing_new_finishes_what_it_runs_and_is_closed() -> None:
    async with servers(2) as (first, second), fleet_on(first) as (fleet, _):
        gate = holding(first, 1)
        (running,) = start(fleet, ["running"])
        await first.until(lambda: len(first.running) == 1)
        fleet.set_endpoints(named(second))
        removed = fleet._endpoints[0]
        states = {view.url: (view.state, view.in_flight) for view in fleet.endpoint_views()}
        assert states[first.base_url] == (DRAINING, 1)
        for rid in "abc":
            assert len((await fleet.generate(request(rid))).token_ids) == 8
        assert (len(first.bodies), len(second.bodies)) == (1, 3)
        gate.set()
        assert len((await running).token_ids) == 8
        assert [view.url for view in fleet.endpoint_views()] == [second.base_url]
        await eventually(lambda: removed.backend._http._poster is None)
        assert first.aborts == []


async def test_a_removed_server_that_runs_nothing_is_gone_at_once() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        for n in range(4):
            await fleet.generate(request(f"r{n}", session_id=f"s{n}"))
        fleet.set_endpoints(named(second))
        assert [view.url for view in fleet.endpoint_views()] == [second.base_url]
        assert set(fleet._choice._homes.values()) == set(fleet._endpoints), "sessions that were there hold it no more"
        fleet.set_endpoints(Endpoints(urls=()))
        assert fleet.endpoint_views() == []
        assert not fleet.is_up
        assert (await fleet.model_info()).context_length == 1000


async def test_a_server_that_is_named_again_while_it_drains_goes_on() -> None:
    async with servers(2) as (first, second), fleet_on(first) as (fleet, _):
        gate = holding(first, 1)
        (running,) = start(fleet, ["running"])
        await first.until(lambda: len(first.running) == 1)
        before = fleet._endpoints[0]
        fleet.set_endpoints(named(second))
        fleet.set_endpoints(named(first))
        assert fleet._endpoints[0] is before
        assert fleet.endpoint_views()[0].state is UP
        assert len((await fleet.generate(request("more"))).token_ids) == 8
        assert len(first.bodies) == 2
        gate.set()
        assert len((await running).token_ids) == 8
        assert up(fleet) == [True]


async def test_an_answer_of_its_tokenizer_is_waited_for_too() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        gate = asyncio.Event()
        asked = asyncio.create_task(fleet._ask_any(lambda _backend: gate.wait()))
        await asyncio.sleep(0)
        at = next(each for each in fleet._endpoints if each.questions)
        other = next(each for each in fleet._endpoints if not each.questions)
        fleet.set_endpoints(named(other.base_url))
        assert at in fleet._endpoints
        gate.set()
        assert await asked
        assert fleet._endpoints == [other]


async def test_naming_the_same_again_changes_nothing() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        before = list(fleet._endpoints)
        fleet.set_endpoints(Endpoints(urls=(second.base_url + "/", first.base_url)))
        assert fleet._endpoints == before
        assert up(fleet) == [True, True]


@pytest.mark.parametrize(
    ("urls", "control_urls", "field"),
    [
        (["localhost:1"], [], "urls[0]"),
        (["http://a:1", "http://a:1\n"], [], "urls[1]"),
        (["http://a:1", "http://b:1", "http://a:1/"], [], "urls[2]"),
        (["http://a:1"], ["http://b:1", "http://b:1"], "control_urls[1]"),
        (["http://a:1", "http://b:1"], ["http://c:1"], "control_urls"),
        ([], ["http://c:1"], "control_urls"),
    ],
)
async def test_a_list_with_a_fault_changes_nothing(urls: list[str], control_urls: list[str], field: str) -> None:
    async with servers(1) as (server,), fleet_on(server) as (fleet, _):
        before = fleet.endpoints
        with pytest.raises(InvalidArgumentError) as caught:
            fleet.set_endpoints(Endpoints(urls=tuple(urls), control_urls=tuple(control_urls)))
        assert [violation.field for violation in caught.value.violations] == [field]
        assert fleet.endpoints == before
        assert up(fleet) == [True]


async def test_whatever_is_named_when_every_generation_ends_whole_and_nothing_is_left_over() -> None:
    chance = random.Random(7)
    async with servers(4) as each, fleet_on(each[0], max_concurrency=2) as (fleet, _):
        running: list[asyncio.Task[object]] = []
        for number in range(60):
            running += [asyncio.create_task(fleet.generate(request(f"{number}-{i}", session_id=f"{i}"))) for i in "ab"]
            fleet.set_endpoints(named(*chance.sample(each, chance.randint(0, 4))))
            for _ in range(chance.randint(0, 30)):
                await asyncio.sleep(0)
        fleet.set_endpoints(named(*each))
        async with asyncio.timeout(60):
            generations = await asyncio.gather(*running)
        assert all(len(generation.token_ids) == 8 for generation in generations)  # type: ignore[attr-defined]
        assert sorted(view.url for view in fleet.endpoint_views()) == sorted(server.base_url for server in each)
        assert all(view.in_flight == 0 for view in fleet.endpoint_views())
        assert set(fleet._choice._homes.values()) <= set(fleet._endpoints), "who has left is forgotten"


# -- what a new one has to have


async def test_a_new_server_of_another_model_gets_nothing_and_says_why() -> None:
    async with servers(1) as (first,), ScriptedSglang(model_name="other") as other, fleet_on(first) as (fleet, _):
        fleet.set_endpoints(named(first, other))
        await eventually(lambda: fleet.endpoint_views()[1].state is ASIDE)
        assert "'other'" in fleet.endpoint_views()[1].reason
        for rid in "abc":
            await fleet.generate(request(rid))
        assert other.bodies == []


async def test_a_new_server_has_the_last_update_before_any_traffic() -> None:
    async with controlled() as (fleet, _, first, second), Controlled() as third:
        await fleet.update_weights(weights("1"))
        fleet.set_endpoints(named(first, second, third))
        await eventually(lambda: up(fleet) == [True, True, True])
        assert (third.calls, third.weight_version) == ([UPDATE], "1")


async def test_a_server_that_missed_an_update_while_it_drained_gets_it_when_it_is_named_again() -> None:
    async with controlled() as (fleet, clock, first, second):
        gate = holding(first, 1)
        (running,) = start(fleet, ["running"])
        await first.until(lambda: len(first.running) == 1)
        fleet.set_endpoints(named(second))
        await fleet.update_weights(weights("1"))
        assert (first.weight_version, second.weight_version) == ("default", "1"), "it finishes with those that it has"
        fleet.set_endpoints(named(first, second))
        assert fleet.endpoint_views()[0].state is ASIDE
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])
        assert first.weight_version == "1"
        gate.set()
        await running


@pytest.mark.parametrize("mode", PauseMode)
async def test_a_server_that_is_named_in_a_pause_is_paused_before_it_is_up_and_goes_on_with_the_others(
    mode: PauseMode,
) -> None:
    async with controlled() as (fleet, _, first, second), Controlled() as third:
        await fleet.pause(mode)
        fleet.set_endpoints(named(first, second, third))
        await eventually(lambda: up(fleet) == [True, True, True])
        assert third.is_paused
        await fleet.resume()
        assert not any(each.is_paused for each in (first, second, third))
        assert len((await fleet.generate(request())).token_ids) == 8


async def test_a_pause_that_begins_while_a_new_server_is_met_holds_there_at_once() -> None:
    """A trainer names its servers and pauses: it need not wait until they are probed again."""
    async with Controlled() as server, fleet_on() as (fleet, _):
        server.load_gate = asyncio.Event()
        fleet.set_endpoints(named(server))
        await server.until(lambda: server.load_questions == 1)
        await fleet.pause(PauseMode.RETRACT)
        server.load_gate.set()
        await fleet.name_weights("1")
        assert (up(fleet), server.is_paused, server.weight_version) == ([True], True, "1")
        await fleet.resume()


async def test_what_comes_while_a_server_is_caught_up_is_not_missed() -> None:
    async with Controlled() as server, fleet_on() as (fleet, _):
        await fleet.pause(PauseMode.RETRACT)
        server.control_gate = asyncio.Event()
        fleet.set_endpoints(named(server))
        await server.until(lambda: server.calls == [PAUSE])
        await fleet.resume()
        server.control_gate.set()
        await eventually(lambda: up(fleet) == [True])
        assert (server.calls, server.is_paused) == ([PAUSE, CONTINUE], False)


async def test_a_pause_before_there_is_a_server_holds_for_those_that_come() -> None:
    async with Controlled() as server, fleet_on() as (fleet, _):
        await fleet.pause(PauseMode.RETRACT)
        fleet.set_endpoints(named(server))
        await eventually(lambda: up(fleet) == [True])
        assert [server.is_paused] == [True]
        await fleet.resume()
        assert [server.is_paused] == [False]
        await fleet.pause(PauseMode.ABORT)
        fleet.set_endpoints(Endpoints(urls=()))
        await fleet.resume()
        assert [server.is_paused] == [False]


async def test_a_server_that_comes_back_in_a_pause_is_paused_first() -> None:
    """Else a generation that another one lost would begin there while nothing is to be generated."""
    async with controlled() as (fleet, clock, first, _):
        fleet._endpoints[0].failed("scripted")
        await fleet.pause(PauseMode.IN_PLACE)
        assert [first.is_paused] == [False]
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])
        assert [first.is_paused] == [True]
        await fleet.resume()


async def test_a_server_removed_in_a_pause_is_told_of_its_end_before_it_leaves() -> None:
    async with controlled() as (fleet, _, first, second):
        await fleet.pause(PauseMode.RETRACT)
        fleet.set_endpoints(named(second))
        assert fleet.endpoint_views()[0].state is DRAINING, "idle, but paused by us"
        await fleet.resume()
        assert (first.calls, first.is_paused) == ([PAUSE, CONTINUE], False)
        assert [view.url for view in fleet.endpoint_views()] == [second.base_url]


# -- weights that the trainer pushes


async def test_pushed_weights_are_named_where_the_server_does_not_know_and_nothing_is_loaded() -> None:
    async with controlled() as (fleet, _, first, second):
        await fleet.pause(PauseMode.IN_PLACE)
        first.weight_version = "1"  # pushed with its name
        await fleet.name_weights("1")
        await fleet.resume()
        assert (first.calls, second.calls) == ([PAUSE, CONTINUE], [PAUSE, NAME, CONTINUE])
        assert await fleet.weight_version() == "1"
        assert (await fleet.model_info()).weight_version == "1"


async def test_a_server_without_what_was_pushed_stays_aside_until_it_has_it() -> None:
    async with controlled() as (fleet, _, first, second), Controlled() as third:
        await fleet.name_weights("1")
        fleet.set_endpoints(named(first, second, third))
        await eventually(lambda: fleet.endpoint_views()[2].state is ASIDE)
        assert "push them there too" in fleet.endpoint_views()[2].reason
        third.weight_version = "2"
        await fleet.name_weights("2")
        # Asked at once: nothing here moves the clock by a backoff.
        await fleet._clock.advance(0.0)  # type: ignore[attr-defined]
        await eventually(lambda: up(fleet) == [True, True, True])
        assert NAME not in third.calls


async def test_a_name_that_no_server_takes_is_forgotten() -> None:
    async with controlled() as (fleet, clock, first, second):
        first.control_status = second.control_status = 500
        with pytest.raises(EngineUnavailableError):
            await fleet.name_weights("1")
        first.control_status = second.control_status = 200
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])
        await fleet.name_weights("1")
        assert await fleet.weight_version() == "1"


async def test_servers_named_a_moment_ago_are_told_too() -> None:
    async with Controlled() as server, fleet_on() as (fleet, _):
        fleet.set_endpoints(named(server))
        await fleet.name_weights("1")
        assert server.weight_version == "1"


# -- a router


async def test_a_router_is_set_with_its_workers_and_with_others_it_is_another_one() -> None:
    async with AsyncExitStack() as stack:
        router = await stack.enter_async_context(ScriptedSglang(is_router=True))
        old, new = [await stack.enter_async_context(Controlled()) for _ in range(2)]
        fleet, clock = await stack.enter_async_context(fleet_on())
        gate = holding(router, 1)
        fleet.set_endpoints(Endpoints(urls=(router.base_url,), control_urls=(old.base_url,)))
        (running,) = start(fleet, ["running"])
        await router.until(lambda: len(router.running) == 1)
        await fleet.update_weights(weights("1"))
        fleet.set_endpoints(Endpoints(urls=(router.base_url,), control_urls=(old.base_url, new.base_url)))
        assert [view.state for view in fleet.endpoint_views()] == [DRAINING, EndpointState.WARMING_UP]
        await clock.advance(0.0)
        await eventually(lambda: up(fleet) == [True, True])
        assert new.weight_version == "1", "the one worker's version is not taken for all of theirs"
        gate.set()
        await running
        (left,) = fleet.endpoint_views()
        assert left.control_urls == (old.base_url, new.base_url)
