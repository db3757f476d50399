"""Several SGLang servers behind one engine: real HTTP servers on loopback that misbehave as told."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from aiohttp import web

from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.domain.generation import ChatMessage, FinishReason
from py_scheduler.errors import (
    EngineRejectedError,
    EngineUnavailableError,
)
from tests.support.models.fleets import QUICK, fleet_on, holding, request, servers, start, up
from tests.support.models.scripted_sglang import Script, ScriptedSglang
from tests.support.waiting import eventually

# -- choice


async def test_generations_spread_by_what_is_in_flight_here() -> None:
    async with servers(3) as three, fleet_on(*three) as (fleet, _):
        gates = [holding(server, 4) for server in three]
        tasks = start(fleet, [f"r{n}" for n in range(12)])
        for server in three:
            await server.until(lambda server=server: len(server.running) == 4)  # type: ignore[misc]
        for gate in gates:
            gate.set()
        await asyncio.gather(*tasks)
    assert [server.load_questions for server in three] == [1, 1, 1]


async def test_the_load_that_a_server_tells_counts_with_what_was_sent_since() -> None:
    """Six requests of others at the first: the next six of ours go to the second, then both get some."""
    async with servers(2) as (first, second):
        first.foreign_requests = 6
        async with fleet_on(first, second) as (fleet, _):
            gates = [holding(first, 8), holding(second, 8)]
            tasks = start(fleet, [f"a{n}" for n in range(6)])
            await second.until(lambda: len(second.running) == 6)
            assert not first.running
            tasks += start(fleet, [f"b{n}" for n in range(4)])
            await second.until(lambda: len(second.running) == 8)
            await first.until(lambda: len(first.running) == 2)
            for gate in gates:
                gate.set()
            await asyncio.gather(*tasks)


async def test_the_load_is_asked_at_the_interval_however_many_generations_there_are() -> None:
    async with servers(2) as (first, second), fleet_on(first, second, load_interval_seconds=5.0) as (fleet, clock):
        for n in range(40):
            await fleet.generate(request(f"r{n}"))
        assert (first.load_questions, second.load_questions) == (1, 1)
        first.foreign_requests = 100
        for asked in (2, 3):
            await clock.advance(4.9)
            assert first.load_questions == asked - 1
            await clock.advance(0.1)
            await eventually(lambda asked=asked: first.load_questions == second.load_questions == asked)  # type: ignore[misc]
            await eventually(lambda: clock.live_timers == 2)
        already = len(first.bodies)
        for n in range(10):
            await fleet.generate(request(f"s{n}"))
        assert len(first.bodies) == already


async def test_a_server_that_does_not_tell_its_load_is_chosen_last_and_not_set_aside() -> None:
    async with servers(2) as (first, second), fleet_on(first, second, max_concurrency=1) as (fleet, clock):
        first.load_status = 500
        await clock.advance(1.0)
        await eventually(lambda: clock.live_timers == 2 and fleet._endpoints[0].is_silent)
        assert up(fleet) == [True, True]
        gate = holding(second, 1)
        (waiting,) = start(fleet, ["a"])
        await second.until(lambda: len(second.running) == 1)
        await fleet.generate(request("b"))
        assert len(first.bodies) == 1
        gate.set()
        await waiting


# -- stickiness


async def test_a_session_stays_with_its_endpoint() -> None:
    async with servers(3) as three, fleet_on(*three) as (fleet, _):
        for turn in range(5):
            await asyncio.gather(*(fleet.generate(request(f"s{s}-{turn}", session_id=f"s{s}")) for s in range(9)))
        homes = [{body["session_id"] for body in server.bodies} for server in three]
        assert [len(home) for home in homes] == [3, 3, 3]
        assert set.union(*homes) == {f"s{s}" for s in range(9)}


async def test_a_session_leaves_an_endpoint_that_is_much_more_loaded_and_not_one_that_is_a_little() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, clock):
        await fleet.generate(request("t0", session_id="s"))
        assert len(first.bodies) == 1
        for foreign, turn in ((8, "t1"), (9, "t2")):
            first.foreign_requests = foreign
            await clock.advance(1.0)
            await eventually(lambda foreign=foreign: fleet._endpoints[0].load == foreign)  # type: ignore[misc]
            await fleet.generate(request(turn, session_id="s"))
        assert [body["rid"].split("~")[0] for body in first.bodies] == ["t0", "t1"]
        first.foreign_requests = 0
        await clock.advance(1.0)
        await eventually(lambda: fleet._endpoints[0].load == 0)
        await fleet.generate(request("t3", session_id="s"))
        assert [body["rid"].split("~")[0] for body in second.bodies] == ["t2", "t3"], "it has moved"


async def test_so_many_sessions_are_remembered_and_no_more() -> None:
    async with servers(2) as (first, second), fleet_on(first, second, remembered_sessions=3) as (fleet, _):
        for n in range(20):
            await fleet.generate(request(f"r{n}", session_id=f"s{n % 5}"))
            assert len(fleet._choice._homes) <= 3
        assert list(fleet._choice._homes) == ["s2", "s3", "s4"]


# -- the cap


async def test_an_endpoint_gets_no_more_than_its_cap_and_the_rest_waits_in_order() -> None:
    async with servers(2) as pair, fleet_on(*pair, max_concurrency=4) as (fleet, _):
        gates = [asyncio.Event() for _ in range(30)]
        for server in pair:
            server.scripts.extend(Script(gate=gate) for gate in gates)
        tasks = start(fleet, [f"r{n}" for n in range(30)])
        for server in pair:
            await server.until(lambda server=server: len(server.running) == 4)  # type: ignore[misc]
        for gate in gates:
            gate.set()
        await asyncio.gather(*tasks)
        assert [server.most_running for server in pair] == [4, 4]
        sent = [int(rid.split("~")[0][1:]) for server in pair for rid in server.rids[:4]]
        assert sorted(sent) == list(range(8))
        assert [endpoint.in_flight for endpoint in fleet._endpoints] == [0, 0]


async def test_one_that_waits_and_is_cancelled_or_aborted_takes_no_place() -> None:
    async with servers(1) as (server,), fleet_on(server, max_concurrency=1) as (fleet, _):
        gate = holding(server, 1)
        first, cancelled, aborted, last = start(fleet, ["first", "cancelled", "aborted", "last"])
        await server.until(lambda: len(server.running) == 1)
        cancelled.cancel()
        await fleet.abort("aborted")
        assert (await aborted).finish_reason is FinishReason.ABORT
        assert not first.done()
        gate.set()
        assert len((await last).token_ids) == 8
        assert len((await first).token_ids) == 8
        assert [rid.split("~")[0] for rid in server.rids] == ["first", "last"]
        assert not server.aborts


async def test_one_that_is_cancelled_just_as_it_gets_its_place_gives_it_back() -> None:
    async with servers(1) as (server,), fleet_on(server, max_concurrency=1) as (fleet, _):
        gate = holding(server, 1)
        first, cancelled = start(fleet, ["first", "cancelled"])
        await server.until(lambda: len(server.running) == 1)
        first.add_done_callback(lambda _: cancelled.cancel())
        gate.set()
        await first
        await asyncio.wait([cancelled])
        assert len((await fleet.generate(request("last"))).token_ids) == 8


# -- keep-alive


class Forgetful(ScriptedSglang):
    """Drops every connection that is used a second time for a generation, as if it had been idle for too long."""

    def __init__(self) -> None:
        super().__init__()
        self.used: set[object] = set()

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        if request.protocol in self.used and request.transport is not None:
            request.transport.abort()
            return web.Response()
        self.used.add(request.protocol)
        return await super()._generate(request)


async def test_kept_connections_that_are_all_dead_set_nothing_aside() -> None:
    async with Forgetful() as server, fleet_on(server, no_endpoint_seconds=1.0) as (fleet, _):
        gate = holding(server, 20)
        tasks = start(fleet, [f"r{n}" for n in range(20)])
        await server.until(lambda: len(server.running) == 20)
        gate.set()
        await asyncio.gather(*tasks)
        # 20 connections are kept. One at a time, so that a second try could take another of them.
        for n in range(5):
            assert len((await fleet.generate(request(f"s{n}"))).token_ids) == 8
        assert fleet._endpoints[0].taken == 25
        assert fleet._endpoints[0].is_up


# -- aborts and the rest of an engine


async def test_an_abort_goes_to_the_endpoint_that_has_the_rid() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        for server in (first, second):
            server.scripts.append(Script(stall_after=3))
        a, b = start(fleet, ["a", "b"])
        await first.until(lambda: first.streamed == 3)
        await second.until(lambda: second.streamed == 3)
        await fleet.abort("b")
        assert len((await b).token_ids) == 3
        assert (len(first.aborts), len(second.aborts)) == (0, 1)
        await fleet.abort("nobody")
        await fleet.abort("a")
        assert (await a).finish_reason is FinishReason.ABORT
        assert (len(first.aborts), len(second.aborts)) == (1, 1)
        assert up(fleet) == [True, True]


async def test_a_rid_in_flight_anywhere_is_refused() -> None:
    async with servers(2) as pair, fleet_on(*pair) as (fleet, _):
        gate = holding(pair[0], 1)
        (task,) = start(fleet, ["r"])
        await pair[0].until(lambda: len(pair[0].running) == 1)
        with pytest.raises(EngineRejectedError, match="in flight already"):
            await fleet.generate(request("r"))
        gate.set()
        await task


async def test_closing_ends_what_runs_and_what_waits() -> None:
    async with servers(2) as pair, fleet_on(*pair, max_concurrency=1) as (fleet, _):
        for server in pair:
            server.scripts.append(Script(stall_after=3))
        tasks = start(fleet, ["a", "b", "waits"])
        for server in pair:
            await server.until(lambda server=server: server.streamed == 3)  # type: ignore[misc]
        await fleet.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert Counter(map(type, outcomes)) == {EngineUnavailableError: 3}
        assert [len(server.bodies) for server in pair] == [1, 1]


async def test_text_is_encoded_by_any_endpoint_that_can() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        first.tokenize_status = 500
        assert await fleet.encode("ab") == [97, 98]
        assert await fleet.encode_chat([ChatMessage("u", "a")]) == [60, 117, 62, 97]
        second.tokenize_status = 500
        with pytest.raises(EngineUnavailableError, match="answered 500"):
            await fleet.encode("abc")
        assert up(fleet) == [True, True]


# -- behind a router


async def test_behind_a_router_the_workers_get_everything_but_generations() -> None:
    async with (
        servers(2) as (worker, other),
        ScriptedSglang(is_router=True) as router,
    ):
        urls = [worker.base_url, other.base_url]
        engine = SglangBackend(router.base_url, control_urls=urls, settings=QUICK)
        await engine.start()
        assert (await engine.model_info()).vocab_size == 512
        assert await engine.encode("ab") == [97, 98]
        assert len((await engine.generate(request("a"))).token_ids) == 8
        router.scripts.append(Script(stall_after=3))
        (task,) = [asyncio.create_task(engine.generate(request("b")))]
        await router.until(lambda: router.streamed == 11)
        aborting = asyncio.create_task(engine.abort("b"))
        await other.until(lambda: bool(other.aborts))
        # The worker that has it ends it, and so the router's stream.
        router.running[worker.aborts[0]].set()
        await aborting
        assert len((await task).token_ids) == 3
        assert worker.aborts == other.aborts == [router.rids[-1]] * len(other.aborts)
        assert not router.aborts
        worker.tokenize_status = 500
        assert await engine.encode("abc") == [97, 98, 99], "another worker can, too"
        await engine.close()


@pytest.mark.parametrize(
    "script",
    [
        Script(status=502, message="the worker was lost"),
        Script(status=400, message="Duplicate request ID detected: r"),
        Script(status=400, message="Duplicate request ID detected: r", form="stream"),
    ],
    ids=["it lost the worker", "it sent it twice", "it sent it twice, and said so in the stream"],
)
async def test_what_a_router_lost_may_run_on_and_is_aborted_before_the_next_attempt(script: Script) -> None:
    async with servers(2) as workers, ScriptedSglang(is_router=True) as router:
        urls = [worker.base_url for worker in workers]
        engine = SglangBackend(router.base_url, control_urls=urls, settings=QUICK)
        await engine.start()
        gate = asyncio.Event()
        router.scripts.extend([script, Script(gate=gate)])
        task = asyncio.create_task(engine.generate(request()))
        await router.until(lambda: len(router.bodies) == 2)
        aborted = [list(worker.aborts) for worker in workers]
        gate.set()
        assert len((await task).token_ids) == 8
        assert aborted == [[router.rids[0]]] * 2
        assert router.rids[0] != router.rids[1]
        await engine.close()


async def test_a_router_alone_is_no_engine() -> None:
    async with ScriptedSglang(is_router=True) as router:
        with pytest.raises(EngineUnavailableError, match="404"):
            await SglangBackend(router.base_url, settings=QUICK).start()
