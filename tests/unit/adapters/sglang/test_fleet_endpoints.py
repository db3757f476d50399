"""Endpoints of a fleet that fail, recover, warm up, or serve something else; real HTTP servers on loopback."""

from __future__ import annotations

import asyncio
import logging

import pytest
from msgspec.structs import replace

from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.domain.generation import Generation
from py_scheduler.errors import (
    ContextOverflowError,
    EngineRejectedError,
    EngineUnavailableError,
)
from tests.support.fake_clock import FakeClock
from tests.support.models.fleets import (
    MAX_BACKOFF_SECONDS,
    QUICK,
    fleet_of,
    fleet_on,
    holding,
    request,
    servers,
    start,
    up,
)
from tests.support.models.scripted_sglang import Script, ScriptedSglang
from tests.support.waiting import eventually

# -- set aside, and back


async def test_a_generation_that_failed_before_its_first_token_moves() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        first.scripts.extend([Script(status=500), Script(disconnect_before=True)])
        generation = await fleet.generate(request(session_id="s"))
        assert len(generation.token_ids) == 8
        assert (len(first.bodies), len(second.bodies)) == (2, 1)
        assert up(fleet) == [False, True]
        await fleet.generate(request("next", session_id="s"))
        assert len(second.bodies) == 2, "and so does its session"


@pytest.mark.parametrize("status", [302, 401, 404, 413])
async def test_an_endpoint_whose_proxy_answers_for_it_swallows_no_rollout(status: int) -> None:
    """It is never busy, so that it looks least loaded to all that come."""
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        first.nonsense["/generate"] = status, b"<html>gone</html>"
        generations = await asyncio.gather(*(fleet.generate(request(f"r{n}")) for n in range(20)))
        assert all(len(generation.token_ids) == 8 for generation in generations)
        assert (len(first.bodies), len(second.bodies)) == (0, 20)
        assert up(fleet) == [False, True]
        assert f"status {status}: <html>gone</html>" in fleet._endpoints[0].reason


async def test_a_generation_with_tokens_does_not_start_again_elsewhere() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        first.scripts.append(Script(disconnect_after=3))
        with pytest.raises(EngineUnavailableError, match="3 tokens were received") as raised:
            await fleet.generate(request())
        assert isinstance(raised.value.partial, Generation)
        assert len(raised.value.partial.token_ids) == 3
        assert not second.bodies
        assert up(fleet) == [False, True]


async def test_the_backoff_doubles_up_to_its_bound_and_is_jittered(caplog: pytest.LogCaptureFixture) -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, clock):
        first.load_status = 500
        first.scripts.extend([Script(status=500)] * 2)
        await fleet.generate(request())
        waits = []
        for longest in (1.0, 2.0, 4.0, 8.0, 8.0):
            questions, begun = first.load_questions, clock.now
            await clock.advance(longest / 2 - 0.01)
            while first.load_questions == questions:
                await clock.advance(longest / 100)
                await eventually(lambda: fleet._endpoints[0]._looking is None)
            waits.append((clock.now - begun) / longest)
            assert first.load_questions == questions + 1
        assert all(0.5 <= wait <= 1.02 for wait in waits)
        assert len(set(waits)) > 1
        assert up(fleet) == [False, True]
    assert sum("is set aside" in record.message for record in caplog.records) == 2, "for the failure, then the probe's"


async def test_an_endpoint_that_recovers_gets_traffic_again(caplog: pytest.LogCaptureFixture) -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, clock):
        first.scripts.extend([Script(status=503)] * 2)
        await fleet.generate(request())
        assert up(fleet) == [False, True]
        await clock.advance(1.0)
        await eventually(lambda: up(fleet) == [True, True])
        await asyncio.gather(*(fleet.generate(request(f"r{n}")) for n in range(10)))
        assert len(first.bodies) == 2 + 5
        assert fleet._endpoints[0]._failures == 0
    assert "is back and gets generations again" in caplog.text


async def test_an_endpoint_that_passes_its_probes_and_fails_generations_waits_longer_each_time() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, clock):
        for failures in (1, 2, 3):
            second.foreign_requests = 50
            await clock.advance(MAX_BACKOFF_SECONDS)
            await eventually(lambda: up(fleet) == [True, True] and fleet._endpoints[1].load == 50)
            first.scripts.extend([Script(status=500)] * 2)
            await fleet.generate(request())
            assert fleet._endpoints[0]._failures == failures


async def test_many_generations_that_fail_together_count_once() -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        first.scripts.extend([Script(disconnect_before=True)] * 20)
        await asyncio.gather(*(fleet.generate(request(f"r{n}")) for n in range(20)))
        assert fleet._endpoints[0]._failures == 1
        assert len(second.bodies) == 20


async def test_a_dead_server_and_its_return_to_the_same_place() -> None:
    async with servers(1) as (second,):
        async with ScriptedSglang() as first:
            fleet = fleet_of([first.base_url, second.base_url], clock := FakeClock())
            await fleet.start()
            assert up(fleet) == [True, True]
        await clock.advance(1.0)
        await eventually(lambda: up(fleet) == [False, True])
        assert "Cannot connect" in fleet._endpoints[0].reason
        await asyncio.gather(*(fleet.generate(request(f"r{n}")) for n in range(4)))
        assert len(second.bodies) == 4
        async with ScriptedSglang(port=first.port) as restarted:
            await clock.advance(MAX_BACKOFF_SECONDS)
            await eventually(lambda: up(fleet) == [True, True])
            await asyncio.gather(*(fleet.generate(request(f"s{n}")) for n in range(4)))
            assert len(restarted.bodies) == 2
            await fleet.close()


async def test_a_generation_waits_for_an_endpoint_while_there_is_none() -> None:
    async with servers(1) as (server,), fleet_on(server) as (fleet, clock):
        server.scripts.extend([Script(status=503)] * 2)
        (task,) = start(fleet, ["r"])
        await eventually(lambda: up(fleet) == [False])
        text = asyncio.create_task(fleet.encode("ab"))
        await clock.advance(1.0)
        assert len((await task).token_ids) == 8
        assert await text == [97, 98]
        assert len(server.bodies) == 3


async def test_it_gives_up_when_no_endpoint_comes_back_in_time() -> None:
    async with servers(1) as (server,), fleet_on(server, no_endpoint_seconds=0.05) as (fleet, _):
        server.scripts.extend([Script(status=503, message="out of order")] * 2)
        with pytest.raises(EngineUnavailableError, match=r"no endpoint came up within 0.05 s: .*out of order"):
            await fleet.generate(request())
        with pytest.raises(EngineUnavailableError, match="no endpoint came up within"):
            await fleet.encode("ab")


async def test_it_gives_up_after_so_many_endpoints() -> None:
    async with servers(3) as three, fleet_on(*three, max_attempts=3) as (fleet, _):
        for server in three:
            server.scripts.extend([Script(status=500, message="broken")] * 2)
        with pytest.raises(EngineUnavailableError, match=r"failed at 3 endpoints in a row, last: .*broken"):
            await fleet.generate(request())
        assert [len(server.bodies) for server in three] == [2, 2, 2]


# -- what is no fault of the endpoint


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (Script(status=400, message="Requested token count exceeds the model's maximum"), ContextOverflowError),
        (Script(status=400, message="exceeds the maximum allowed length", form="stream"), ContextOverflowError),
        (Script(status=400, message="top_p must be in (0, 1]"), EngineRejectedError),
    ],
)
async def test_a_refusal_sets_nothing_aside(script: Script, kind: type[Exception]) -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, _):
        first.scripts.append(script)
        with pytest.raises(kind):
            await fleet.generate(request())
        assert up(fleet) == [True, True]
        assert (len(first.bodies), len(second.bodies)) == (1, 0)


async def test_a_context_is_too_long_for_all_when_it_is_for_one() -> None:
    async with servers(2) as (first, second):
        second.context_length = 100
        async with fleet_on(first, second) as (fleet, _):
            assert (await fleet.model_info()).context_length == 100
            with pytest.raises(ContextOverflowError):
                await fleet.generate(request(prompt=99))
            assert not first.bodies


async def test_paused_is_not_dead() -> None:
    """/health and /ready say 503, and what is asked for is held; neither is a reason to set it aside."""
    async with servers(2) as pair, fleet_on(*pair) as (fleet, clock):
        gates = []
        for server in pair:
            server.is_paused = True
            gates.append(holding(server, 2))
        tasks = start(fleet, [f"r{n}" for n in range(4)])
        for server in pair:
            await server.until(lambda server=server: len(server.running) == 2)  # type: ignore[misc]
        for _ in range(30):
            questions = pair[0].load_questions
            await clock.advance(1.0)
            await eventually(lambda questions=questions: pair[0].load_questions > questions)  # type: ignore[misc]
            await eventually(lambda: clock.live_timers == 2)
        assert up(fleet) == [True, True]
        for gate in gates:
            gate.set()
        assert [len((await task).token_ids) for task in tasks] == [8] * 4
        assert [server.health_questions for server in pair] == [0, 0], "it costs a token and a second"


async def test_an_endpoint_that_is_paused_when_it_is_met_is_up_and_holds_what_it_gets() -> None:
    async with servers(2) as (first, second):
        first.is_paused = True
        settings = replace(QUICK, control_timeout_seconds=0.2)
        fleet = SglangFleet([first.base_url, second.base_url], settings=settings, clock=FakeClock())
        await fleet.start()
        assert up(fleet) == [True, True]
        assert (await fleet.model_info()).vocab_size == 512
        tasks = start(fleet, [f"r{n}" for n in range(4)])
        await first.until(lambda: first.vocabulary_questions == 2)
        await asyncio.gather(*tasks[1::2])
        assert not first.bodies
        first.go_on()
        assert [len((await task).token_ids) for task in tasks] == [8] * 4
        assert (len(first.bodies), len(second.bodies)) == (2, 2)
        await fleet.close()


# -- warming up


async def test_an_endpoint_that_refuses_at_the_start_is_warming_up(caplog: pytest.LogCaptureFixture) -> None:
    async with servers(1) as (ready,):
        async with ScriptedSglang() as away:
            pass
        fleet = fleet_of([away.base_url, ready.base_url], clock := FakeClock(), warm_up_seconds=60.0)
        await fleet.start()
        for n in range(4):
            await fleet.generate(request(f"r{n}"))
        for _ in range(20):
            await clock.advance(1.0)
            await eventually(lambda: clock.live_timers == 2)
        assert "set aside" not in caplog.text
        async with ScriptedSglang(port=away.port) as late:
            await clock.advance(1.0)
            await eventually(lambda: up(fleet) == [True, True])
            await fleet.generate(request("s"))
            assert len(late.bodies) == 1
            await fleet.close()


async def test_the_start_waits_for_the_first_endpoint() -> None:
    async with ScriptedSglang() as away:
        pass
    fleet = fleet_of([away.base_url], clock := FakeClock(), warm_up_seconds=60.0)
    starting = asyncio.create_task(fleet.start())
    await eventually(lambda: clock.live_timers == 1)
    for _ in range(5):
        await clock.advance(1.0)
        await eventually(lambda: clock.live_timers == 1)
    assert not starting.done()
    async with ScriptedSglang(port=away.port):
        await clock.advance(1.0)
        await starting
        assert (await fleet.model_info()).name == "tiny"
        await fleet.close()


async def test_after_the_deadline_warming_up_is_over() -> None:
    async with ScriptedSglang() as away:
        pass
    fleet = fleet_of([away.base_url], clock := FakeClock(), warm_up_seconds=3.0)
    starting = asyncio.create_task(fleet.start())
    while not starting.done():
        await eventually(lambda: clock.live_timers == 1 or starting.done())
        await clock.advance(1.0)
    with pytest.raises(EngineUnavailableError, match=f"no endpoint came up: {away.base_url}: .*Cannot connect"):
        await starting
    assert 3.0 <= clock.now - 1000.0 <= 5.0
    assert clock.live_timers == 0


# -- one model


@pytest.mark.parametrize("other", [{"model_name": "other"}, {"vocab_size": 513}])
async def test_two_models_do_not_start(other: dict[str, object]) -> None:
    async with servers(1) as (first,), ScriptedSglang(**other) as second:  # type: ignore[arg-type]
        fleet = fleet_of([first.base_url, second.base_url], FakeClock())
        with pytest.raises(EngineUnavailableError, match="serve one model at all of them"):
            await fleet.start()


async def test_an_endpoint_that_comes_back_with_another_model_gets_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with servers(2) as (first, second), fleet_on(first, second) as (fleet, clock):
        first.scripts.extend([Script(status=500)] * 2)
        first.model_name = "other"
        first.context_length = 10
        await fleet.generate(request())
        await clock.advance(1.0)
        await eventually(lambda: "'other' with a vocabulary of 512" in caplog.text)
        for n in range(4):
            await fleet.generate(request(f"r{n}"))
        assert len(first.bodies) == 2
        info = await fleet.model_info()
        assert (info.name, info.context_length) == ("tiny", 1000)
        first.model_name = "tiny"
        await clock.advance(MAX_BACKOFF_SECONDS)
        await eventually(lambda: up(fleet) == [True, True])


async def test_an_endpoint_with_other_weights_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with servers(2) as (first, second):
        second.weight_version = "step-7"
        async with fleet_on(first, second) as (fleet, _):
            assert up(fleet) == [True, True]
    (said,) = [record.message for record in caplog.records if "its samples are of other weights" in record.message]
    assert "step-7" in said
    assert "default" in said
