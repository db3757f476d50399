"""Control calls of the SGLang adapter, against a server with the traps of the real one."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec
import pytest

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.domain.generation import FinishReason, GenerationRequest, PauseMode, SamplingParams, WeightUpdate
from py_scheduler.domain.ports import GenerationControl
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError
from tests.support.models.controlled_sglang import ControlledSglang

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = pytest.mark.usefixtures("either_way")

STILL = [PauseMode.RETRACT, PauseMode.IN_PLACE]
SETTINGS = SglangSettings(
    retry=RetrySettings(attempts=3, base_seconds=0.001, max_seconds=0.002),
    pause_timeout_seconds=5.0,
    first_token_timeout_seconds=5.0,
    idle_read_timeout_seconds=0.2,
)
V1 = WeightUpdate(model_path="/weights/1", weight_version="v1")


@asynccontextmanager
async def controlled(settings: SglangSettings = SETTINGS) -> AsyncIterator[tuple[ControlledSglang, SglangBackend]]:
    async with ControlledSglang() as server:
        engine = SglangBackend(server.base_url, settings=settings)
        await engine.start()
        try:
            yield server, engine
        finally:
            await engine.close()


def request(rid: str = "r") -> GenerationRequest:
    return GenerationRequest(rid=rid, token_ids=[0, 1, 2], sampling=SamplingParams(max_new_tokens=10))


def names(server: ControlledSglang) -> list[str]:
    return [name for name, _ in server.calls]


async def test_the_engine_is_one_that_can_be_controlled() -> None:
    async with controlled() as (_, engine):
        assert isinstance(engine, GenerationControl)
        assert await engine.weight_version() == "default"


async def test_a_pause_in_mode_abort_returns_when_everything_has_ended() -> None:
    async with controlled() as (server, engine):
        tasks = [asyncio.create_task(engine.generate(request(rid))) for rid in "ab"]
        await server.until(lambda: len(server.running) == 2)
        await server.step(3)
        await engine.pause(PauseMode.ABORT)
        assert not server.running
        for task in tasks:
            generation = await task
            assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, [3, 4, 5])


async def test_a_pause_that_somebody_left_behind_does_not_lock_the_server_up() -> None:
    """The server would wait for what it has stopped itself."""
    async with controlled() as (server, engine):
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        server.is_paused = server.stands_still = True
        await engine.pause(PauseMode.ABORT)
        assert (await task).finish_reason is FinishReason.ABORT
        assert names(server) == ["continue_generation", "pause_generation"]


@pytest.mark.parametrize("mode", STILL)
async def test_silence_during_a_pause_is_no_fault_and_after_it_is(mode: PauseMode) -> None:
    async with controlled() as (server, engine):
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        await server.step(3)
        await engine.pause(mode)
        # Three times as long as silence may last otherwise. Real time, because it is the loop's own limit.
        _, pending = await asyncio.wait([task], timeout=3 * SETTINGS.idle_read_timeout_seconds)
        assert pending == {task}
        late = asyncio.create_task(engine.generate(request("late")))
        await engine.resume()
        await server.until(lambda: len(server.running) == 2)
        await server.step(7)
        assert [len((await task).token_ids)] == [10]
        with pytest.raises(EngineUnavailableError):
            await late


@pytest.mark.parametrize(("mode", "flushes"), [(PauseMode.RETRACT, True), (PauseMode.IN_PLACE, False)])
async def test_the_cache_is_flushed_where_that_can_be_done(mode: PauseMode, flushes: bool) -> None:
    async with controlled() as (server, engine):
        await engine.pause(mode)
        await engine.update_weights(V1)
        body = server.calls[-1][1]
        assert body == {"model_path": "/weights/1", "weight_version": "v1", "flush_cache": flushes, "keep_pause": True}
        assert "abort_all_requests" not in body
        assert (await engine.weight_version(), (await engine.model_info()).weight_version) == ("v1", "v1")
        assert server.is_paused


async def test_in_place_an_update_goes_beside_what_stands_still() -> None:
    async with controlled() as (server, engine):
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        await server.step(4)
        await engine.pause(PauseMode.IN_PLACE)
        await engine.update_weights(V1)
        await engine.resume()
        await server.step(6)
        spans = (await task).weight_spans
        assert [(span.version, span.start, span.end) for span in spans] == [("default", 0, 4), ("v1", 4, 10)]


async def test_an_unpaused_server_finishes_first() -> None:
    async with controlled() as (server, engine):
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        updating = asyncio.create_task(engine.update_weights(V1))
        await server.until(lambda: bool(server.calls))
        assert server.calls[-1][1]["keep_pause"] is False
        await server.step(10)
        await updating
        assert [span.version for span in (await task).weight_spans] == ["default"]


async def test_weights_that_are_not_there_are_a_refusal_without_addresses() -> None:
    async with controlled() as (_, engine):
        with pytest.raises(EngineRejectedError) as caught:
            await engine.update_weights(WeightUpdate(model_path="/nowhere", weight_version="v1"))
        assert str(caught.value) == "SGLang refused update_weights_from_disk: Failed to find any weights"
        assert await engine.weight_version() == "default"


async def test_a_call_whose_connection_breaks_is_sent_again() -> None:
    async with controlled() as (server, engine):
        server.breaks_connections = 1
        await engine.pause(PauseMode.RETRACT)
        server.breaks_connections = 2
        await engine.update_weights(V1)
        server.breaks_connections = 3
        with pytest.raises(EngineUnavailableError):
            await engine.resume()
        assert names(server) == [
            *["pause_generation"] * 2,
            *["update_weights_from_disk"] * 3,
            *["continue_generation"] * 3,
        ]


async def test_a_pause_that_is_not_answered_in_time_fails_once() -> None:
    settings = SglangSettings(pause_timeout_seconds=0.1, idle_read_timeout_seconds=60.0)
    async with controlled(settings) as (server, engine):
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        await engine.pause(PauseMode.IN_PLACE)
        with pytest.raises(EngineUnavailableError, match=r"no answer within 0\.1 s"):
            await engine.pause(PauseMode.ABORT)
        assert names(server) == ["pause_generation", "pause_generation"]
        task.cancel()
        await asyncio.wait([task])


async def test_a_pause_that_fails_is_undone_where_it_was_obeyed() -> None:
    """Its answer is lost each time, and the server stands still."""
    async with controlled(msgspec.structs.replace(SETTINGS, idle_read_timeout_seconds=60.0)) as (server, engine):
        server.breaks_connections = SETTINGS.retry.attempts
        with pytest.raises(EngineUnavailableError):
            await engine.pause(PauseMode.RETRACT)
        assert not server.is_paused
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        await server.step(10)
        assert len((await task).token_ids) == 10


async def test_a_pause_whose_caller_gives_up_lasts_until_the_resume() -> None:
    """Whether the server obeyed nobody has heard, so its silence is no fault."""
    async with controlled(msgspec.structs.replace(SETTINGS, idle_read_timeout_seconds=60.0)) as (server, engine):
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        server.may_answer.clear()
        pausing = asyncio.create_task(engine.pause(PauseMode.IN_PLACE))
        await server.until(lambda: server.stands_still)
        pausing.cancel()
        await asyncio.wait([pausing])
        server.may_answer.set()
        flight = engine._flights.get("r")
        assert flight is not None
        while_held = flight.stands_still
        await engine.update_weights(V1)
        assert server.calls[-1][1]["keep_pause"]
        await engine.resume()
        assert (while_held, flight.stands_still) == (True, False), "no limit counts before the resume"
        await server.step(10)
        assert len((await task).token_ids) == 10
