"""What every engine behind an HTTP server promises, against a real one on loopback that misbehaves as told."""

from __future__ import annotations

import asyncio
import socket

import pytest
from msgspec.structs import replace

from py_scheduler.domain.generation import (
    ChatMessage,
    FinishReason,
    Generation,
    LogProbKind,
    WeightSpan,
)
from py_scheduler.errors import ContextOverflowError, EngineRejectedError, EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ids
from tests.support.models.served_backends import backend_of, generate_path, request, served_on, server_of

pytestmark = pytest.mark.usefixtures("any_server")


def partial_of(error: EngineUnavailableError) -> Generation:
    assert isinstance(error.partial, Generation)
    assert error.partial.finish_reason is FinishReason.ABORT
    return error.partial


async def test_a_generation_comes_back_whole() -> None:
    async with served_on() as (engine, server):
        generation = await engine.generate(request())
    assert generation == Generation.of(
        token_ids=ids(8),
        log_probs=[-i / 128 for i in range(8)],
        text="t0t1t2t3t4t5t6t7",
        finish_reason=FinishReason.LENGTH,
        weight_spans=(WeightSpan("default", 0, 8),),
        log_prob_kind=LogProbKind.SAMPLED,
        prompt_tokens=3,
        cached_tokens=1,
    )
    assert not server.aborts


async def test_model_info_comes_from_the_server_once() -> None:
    async with served_on() as (engine, _server):
        info = await engine.model_info()
        assert (info.name, info.vocab_size, info.context_length, info.weight_version) == ("tiny", 512, 1000, "default")
        assert await engine.model_info() is info


async def test_what_the_server_does_not_tell_can_be_set() -> None:
    async with server_of(tells_vocabulary=False) as server:
        engine = backend_of(server)
        with pytest.raises(EngineUnavailableError, match="set vocab_size"):
            await engine.start()
        engine = backend_of(server, vocab_size=77)
        await engine.start()
        assert (await engine.model_info()).vocab_size == 77
        await engine.close()


async def test_what_a_paused_server_holds_does_not_wait_for_ever() -> None:
    async with server_of(is_paused=True) as server:
        engine = backend_of(server, control_timeout_seconds=0.1, first_token_timeout_seconds=0.1)
        await engine.start()
        with pytest.raises(EngineUnavailableError, match="failed 3 times in a row, last: no answer in time"):
            await engine.generate(request())
        held = asyncio.create_task(engine.generate(request("held")))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineUnavailableError, match="the engine was closed"):
            await held
        assert not server.bodies


async def test_text_and_conversations_are_encoded_by_the_server() -> None:
    async with served_on() as (engine, _server):
        assert await engine.encode("ab") == [97, 98]
        assert await engine.encode_chat([ChatMessage("u", "b")]) == [ord(c) for c in "<u>b"]


async def test_weight_versions_become_spans() -> None:
    async with served_on() as (engine, server):
        spans = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 8}]
        server.scripts.append(Script(weight_versions=spans, finish={"type": "stop", "matched": 107}))
        generation = await engine.generate(request())
        assert generation.weight_spans == (WeightSpan("1", 0, 3), WeightSpan("2", 3, 8))
        assert generation.finish_reason is FinishReason.STOP
        assert (await engine.model_info()).weight_version == "2"


@pytest.mark.parametrize("token_id", [-1, 512, 10**9])
async def test_ids_outside_the_vocabulary_are_never_sent(token_id: int) -> None:
    async with served_on() as (engine, server):
        with pytest.raises(EngineRejectedError, match="outside the vocabulary"):
            await engine.generate(replace(request(), token_ids=[1, token_id]))
        assert not server.bodies


async def test_an_empty_prompt_and_no_tokens_asked_for_are_never_sent() -> None:
    async with served_on() as (engine, server):
        with pytest.raises(EngineRejectedError, match="empty"):
            await engine.generate(request(prompt=0))
        with pytest.raises(EngineRejectedError, match="at least 1"):
            await engine.generate(request(max_new_tokens=0))
        assert not server.bodies


async def test_what_exceeds_the_context_is_never_sent() -> None:
    async with served_on() as (engine, server):
        with pytest.raises(ContextOverflowError):
            await engine.generate(request(prompt=400, max_new_tokens=601))
        assert not server.bodies
        assert len((await engine.generate(request(prompt=400, max_new_tokens=600))).token_ids) == 600


STRANGERS = {
    302: b"",
    400: b"<html>Bad Request</html>",
    401: b'{"error": {"message": "who are you?"}}',
    403: b"<html>Forbidden</html>",
    404: b'{"detail": "Not Found"}',
    413: b"<html>Request Entity Too Large</html>",
}
"""What a proxy answers that has lost its server, or lets nobody through."""


@pytest.mark.parametrize("status", STRANGERS)
async def test_what_is_not_the_servers_refusal_is_not_the_requests_fault(status: int) -> None:
    async with served_on() as (engine, server):
        server.nonsense[generate_path()] = status, STRANGERS[status]
        with pytest.raises(EngineUnavailableError, match=f"failed 3 times in a row, last: status {status}") as caught:
            await engine.generate(request())
        assert server.base_url in str(caught.value)
        assert not server.bodies


@pytest.mark.parametrize("form", ["error", "object", "stream"])
async def test_any_other_400_is_rejected_and_not_retried(form: str) -> None:
    async with served_on() as (engine, server):
        server.scripts.append(Script(status=400, message="bad temperature", form=form))
        with pytest.raises(EngineRejectedError, match="bad temperature") as caught:
            await engine.generate(request())
        assert not isinstance(caught.value, ContextOverflowError)
        assert len(server.bodies) == 1


async def test_a_rid_in_flight_is_refused() -> None:
    async with served_on() as (engine, server):
        server.scripts.append(Script(stall_after=1))
        first = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        with pytest.raises(EngineRejectedError, match="in flight"):
            await engine.generate(request())
        await engine.abort("r")
        await first


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_overloaded_server_is_asked_again(status: int) -> None:
    async with served_on() as (engine, server):
        server.scripts.extend([Script(status=status), Script(status=status)])
        assert len((await engine.generate(request())).token_ids) == 8
        assert len(server.bodies) == 3


async def test_retries_are_bounded() -> None:
    async with served_on() as (engine, server):
        server.scripts.extend([Script(status=503, message="busy")] * 9)
        with pytest.raises(EngineUnavailableError, match="busy"):
            await engine.generate(request())
        assert len(server.bodies) == 3


async def test_a_server_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        engine = backend_of(server_of(base_url=f"http://127.0.0.1:{unused.getsockname()[1]}"))
        with pytest.raises(EngineUnavailableError):
            await engine.start()


async def test_a_disconnect_before_any_byte_is_retried_under_a_new_rid_after_an_abort() -> None:
    async with served_on() as (engine, server):
        server.scripts.append(Script(disconnect_before=True))
        assert len((await engine.generate(request())).token_ids) == 8
        assert len(server.bodies) == 2
        assert server.aborts == [server.rids[0]]


async def test_a_keep_alive_reset_is_survived() -> None:
    async with served_on() as (engine, server):
        await engine.generate(request("first"))
        server.scripts.append(Script(disconnect_before=True))
        await engine.generate(request("second"))
        assert len(server.bodies) == 3


async def test_connections_are_used_again() -> None:
    async with served_on() as (engine, server):
        for number in range(5):
            await engine.generate(request(f"r{number}"))
        assert len(server.connections) == 1


@pytest.mark.parametrize("script", [Script(disconnect_after=4), Script(close_after=4)], ids=["cut", "closed"])
async def test_a_connection_lost_after_tokens_keeps_them_and_is_not_retried(script: Script) -> None:
    async with served_on() as (engine, server):
        server.scripts.append(script)
        with pytest.raises(EngineUnavailableError) as caught:
            await engine.generate(request())
        partial = partial_of(caught.value)
        assert partial.token_ids == ids(4)
        assert len(partial.log_probs) == 4
        assert partial.text == "t0t1t2t3"
        assert len(server.bodies) == 1
        assert server.aborts == server.rids


async def test_silence_after_tokens_is_aborted_at_the_server_and_keeps_them() -> None:
    async with served_on(idle_read_timeout_seconds=0.05) as (engine, server):
        server.scripts.append(Script(stall_after=3, deaf=True))
        with pytest.raises(EngineUnavailableError) as caught:
            await engine.generate(request())
        assert partial_of(caught.value).token_ids == ids(3)
        assert server.aborts == server.rids
        await server.until(lambda: not server.running)


async def test_silence_before_any_token_is_retried_after_an_abort() -> None:
    async with served_on(first_token_timeout_seconds=0.1) as (engine, server):
        server.scripts.append(Script(gate=asyncio.Event()))
        assert len((await engine.generate(request())).token_ids) == 8
        assert server.aborts == [server.rids[0]]


async def test_three_hundred_generations_are_in_flight_at_once() -> None:
    async with served_on() as (engine, server):
        gate = asyncio.Event()
        server.scripts.extend(Script(gate=gate) for _ in range(300))
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}", max_new_tokens=3))) for n in range(300)]
        await server.until(lambda: len(server.running) == 300)
        gate.set()
        generations = await asyncio.gather(*tasks)
        assert all(generation.token_ids == ids(3) for generation in generations)
        assert server.most_running == 300
