"""How generations at an HTTP server end before their time, against a real one that misbehaves as told."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.domain.generation import (
    FinishReason,
)
from py_scheduler.errors import EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ids
from tests.support.models.served_backends import backend_of, request, served_on, server_of

pytestmark = pytest.mark.usefixtures("any_server")


async def test_an_abort_keeps_what_was_generated() -> None:
    async with served_on(abort_grace_seconds=20.0) as (engine, server):
        server.scripts.append(Script(stall_after=5))
        task = asyncio.create_task(engine.generate(request(max_new_tokens=500)))
        await server.until(lambda: bool(server.running))
        await engine.abort("r")
        generation = await task
        assert generation.finish_reason is FinishReason.ABORT
        assert generation.token_ids == ids(5)
        assert generation.log_probs == [-i / 128 for i in range(5)]
        assert generation.text == "t0t1t2t3t4"
        assert not server.disconnects


async def test_an_abort_of_what_still_queues_gives_no_tokens() -> None:
    async with served_on(abort_grace_seconds=20.0) as (engine, server):
        server.scripts.append(Script(gate=asyncio.Event()))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        await engine.abort("r")
        generation = await task
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, [])


async def test_an_abort_that_overtakes_its_request_is_not_lost() -> None:
    async with served_on(abort_grace_seconds=20.0) as (engine, server):
        server.scripts.append(Script(stall_after=1))
        task = asyncio.create_task(engine.generate(request()))
        await asyncio.sleep(0)
        await engine.abort("r")
        assert (await task).finish_reason is FinishReason.ABORT


async def test_an_abort_between_two_attempts_ends_the_retries() -> None:
    async with served_on(retry=RetrySettings(attempts=9, base_seconds=600, max_seconds=600)) as (engine, server):
        server.scripts.append(Script(status=503))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.bodies))
        await engine.abort("r")
        generation = await task
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, [])
        assert len(server.bodies) == 1


async def test_an_abort_that_the_server_ignores_closes_the_connection() -> None:
    async with served_on() as (engine, server):
        server.scripts.append(Script(stall_after=2, deaf=True))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        await engine.abort("r")
        generation = await task
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, ids(2))
        await server.until(lambda: server.disconnects == server.rids)


async def test_an_abort_of_something_unknown_or_over_does_nothing() -> None:
    async with served_on() as (engine, server):
        await engine.generate(request())
        await engine.abort("r")
        await engine.abort("never heard of")
        assert not server.aborts


async def test_an_abort_by_somebody_else_is_not_complete_either() -> None:
    async with served_on() as (engine, server):
        server.scripts.append(Script(stall_after=2))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        server.running[server.rids[0]].set()
        generation = await task
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, ids(2))


async def test_cancelling_stops_the_work_at_the_server() -> None:
    async with served_on() as (engine, server):
        server.scripts.append(Script(stall_after=2, deaf=True))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await server.until(lambda: not server.running and server.aborts == server.rids)


async def test_closing_aborts_what_is_in_flight_and_leaves_no_task_behind() -> None:
    async with server_of() as server:
        engine = backend_of(server)
        await engine.start()
        server.scripts.extend([Script(stall_after=2, deaf=True)] * 5)
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}"))) for n in range(5)]
        await server.until(lambda: len(server.running) == 5)
        await engine.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, EngineUnavailableError) for outcome in outcomes)
        assert sorted(server.aborts) == sorted(server.rids)
        assert not engine._flights._clean_ups
        await server.until(lambda: not server.running)
