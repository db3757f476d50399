"""Pauses and weights of the vLLM adapter, and what becomes of what breaks off half-way."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.adapters.vllm.fleet import VllmFleet
from py_scheduler.domain.generation import FinishReason, PauseMode, WeightSpan, WeightUpdate
from py_scheduler.domain.ports import GenerationControl, MovableBackend, ProbedBackend
from py_scheduler.errors import EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ids
from tests.support.models.scripted_vllm import ScriptedVllm
from tests.support.models.served_backends import QUICK_VLLM, request, vllm_on

V1 = WeightUpdate(model_path="/weights/1", weight_version="v1")
DROP = "/reset_prefix_cache reset_running_requests=true"
LOAD = ["/update_weight_version loading v1", "/collective_rpc /weights/1"]


@pytest.mark.parametrize(
    ("mode", "told", "drops"),
    [
        (PauseMode.ABORT, ["/pause mode=abort"], [DROP]),
        (PauseMode.RETRACT, ["/pause mode=keep", DROP], [DROP]),
        (PauseMode.IN_PLACE, ["/pause mode=keep"], []),
    ],
)
async def test_weights_are_loaded_in_a_pause_and_the_cache_goes_where_it_can(
    mode: PauseMode, told: list[str], drops: list[str]
) -> None:
    async with vllm_on() as (engine, server):
        assert isinstance(engine, GenerationControl)
        await engine.pause(mode)
        await engine.update_weights(V1)
        assert server.is_paused
        assert (await engine.weight_version(), (await engine.model_info()).weight_version) == ("v1", "v1")
        await engine.resume()
        assert server.calls == [*told, *LOAD, *drops, "/update_weight_version v1", "/resume"]


async def test_a_pause_in_mode_abort_ends_what_runs_and_keeps_its_tokens() -> None:
    async with vllm_on() as (engine, server):
        server.scripts.append(Script(stall_after=3))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: server.streamed == 3)
        await engine.pause(PauseMode.ABORT)
        generation = await task
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, ids(3))
        await engine.resume()


async def test_a_server_that_is_not_paused_finishes_first_and_loads_in_between() -> None:
    async with vllm_on() as (engine, server):
        gate = asyncio.Event()
        server.scripts.append(Script(gate=gate))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        updating = asyncio.create_task(engine.update_weights(V1))
        await server.until(lambda: bool(server.calls))
        assert server.calls == ["/pause mode=wait"]
        gate.set()
        await updating
        assert (await task).weight_spans == (WeightSpan("default", 0, 8),)
        assert server.calls[1:] == [*LOAD, DROP, "/update_weight_version v1", "/resume"]


@pytest.mark.parametrize("paused", [True, False])
async def test_a_server_whose_load_failed_says_that_nobody_knows_its_weights(paused: bool) -> None:
    async with vllm_on() as (engine, server):
        if paused:
            await engine.pause(PauseMode.ABORT)
        server.loads_weights = False
        with pytest.raises(EngineUnavailableError, match="no weights there"):
            await engine.update_weights(V1)
        assert await engine.weight_version() == "loading v1"
        assert server.is_paused is paused
        server.loads_weights = True
        await engine.update_weights(V1)
        assert await engine.weight_version() == "v1"


async def test_a_server_that_did_not_hear_that_it_may_go_on_after_an_update_hears_it_before_it_generates() -> None:
    async with vllm_on() as (engine, server):
        server.nonsense["/resume"] = 500, b"{}"
        with pytest.raises(EngineUnavailableError, match="/resume answered 500"):
            await engine.update_weights(V1)
        was_paused = server.is_paused
        del server.nonsense["/resume"]
        assert (await engine.generate(request())).weight_spans == (WeightSpan("v1", 0, 8),)
        assert (was_paused, server.is_paused) == (True, False)


async def test_a_pause_in_which_weights_are_loaded_is_not_ended_by_who_meets_the_server_meanwhile() -> None:
    async with vllm_on() as (engine, server):
        server.control_gate = asyncio.Event()
        updating = asyncio.create_task(engine.update_weights(V1))
        await server.until(lambda: bool(server.calls))
        await engine.refresh_model_info()
        assert server.calls == ["/pause mode=wait"]
        server.control_gate.set()
        await updating


async def test_while_it_loads_it_tells_the_weights_that_it_had() -> None:
    """Whoever asks meanwhile must not take the name in between for other weights."""
    async with vllm_on() as (engine, server):
        await engine.pause(PauseMode.ABORT)
        updating = asyncio.create_task(engine.update_weights(V1))
        await server.until(lambda: server.weight_version == "loading v1")
        assert await engine.weight_version() == "default"
        await updating
        assert await engine.weight_version() == "v1"


async def test_pushed_weights_are_named() -> None:
    async with vllm_on() as (engine, server):
        await engine.name_weights("pushed")
        await engine.name_weights("pushed")
        assert server.calls == ["/update_weight_version pushed"]
        assert (await engine.model_info()).weight_version == "pushed"


@pytest.mark.parametrize("answer", [b"<html>", b"{}", b"[]", b"null", b'{"status": 5}'])
async def test_what_answers_200_and_is_no_vllm_has_not_obeyed(answer: bytes) -> None:
    async with vllm_on() as (engine, server):
        server.nonsense["/pause"] = 200, answer
        with pytest.raises(EngineUnavailableError):
            await engine.pause(PauseMode.ABORT)


async def test_a_fleet_of_them_is_one_backend_with_one_version() -> None:
    async with ScriptedVllm() as first, ScriptedVllm() as second:
        fleet = VllmFleet([first.base_url, second.base_url], settings=QUICK_VLLM)
        assert isinstance(fleet, GenerationControl)
        assert isinstance(fleet, MovableBackend)
        assert isinstance(fleet, ProbedBackend)
        await fleet.start()
        tasks = [asyncio.create_task(fleet.generate(request(f"r{n}"))) for n in range(8)]
        assert [(await task).token_ids for task in tasks] == [ids(8)] * 8
        assert len(first.bodies) == len(second.bodies) == 4
        first.scripts.append(Script(disconnect_before=True))
        second.scripts.append(Script(disconnect_before=True))
        assert (await fleet.generate(request("moved"))).token_ids == ids(8)
        await fleet.pause(PauseMode.ABORT)
        await fleet.update_weights(V1)
        await fleet.resume()
        assert await fleet.weight_version() == first.weight_version == second.weight_version == "v1"
        await fleet.close()


async def test_one_of_a_fleet_whose_load_failed_gets_nothing_before_it_has_the_weights() -> None:
    async with ScriptedVllm() as first, ScriptedVllm() as second:
        fleet = VllmFleet([first.base_url, second.base_url], settings=QUICK_VLLM)
        await fleet.start()
        await fleet.pause(PauseMode.ABORT)
        second.loads_weights = False
        await fleet.update_weights(V1)
        await fleet.resume()
        for number in range(4):
            assert (await fleet.generate(request(f"r{number}"))).weight_spans == (WeightSpan("v1", 0, 8),)
        assert not second.bodies
        second.loads_weights = True
        await second.until(lambda: second.weight_version == "v1")
        await fleet.close()
