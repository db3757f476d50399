"""The SGLang adapter against a real HTTP server on loopback that misbehaves as told."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.domain.generation import (
    ChatMessage,
    FinishReason,
    Generation,
    LogProbKind,
    SamplingParams,
    WeightSpan,
)
from py_scheduler.errors import ContextOverflowError, EngineRejectedError, EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ScriptedSglang, ids
from tests.support.models.sglang_backends import QUICK, engine_on, request

pytestmark = pytest.mark.usefixtures("either_way")


def partial_of(error: EngineUnavailableError) -> Generation:
    assert isinstance(error.partial, Generation)
    assert error.partial.finish_reason is FinishReason.ABORT
    return error.partial


async def test_a_generation_comes_back_whole() -> None:
    async with engine_on() as (engine, server):
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
    async with engine_on() as (engine, _server):
        info = await engine.model_info()
        assert (info.name, info.vocab_size, info.context_length, info.weight_version) == ("tiny", 512, 1000, "default")
        assert await engine.model_info() is info


async def test_what_the_server_does_not_tell_can_be_set() -> None:
    async with ScriptedSglang(tells_vocabulary=False) as server:
        engine = SglangBackend(server.base_url, settings=QUICK)
        with pytest.raises(EngineUnavailableError, match="set vocab_size"):
            await engine.start()
        engine = SglangBackend(server.base_url, settings=replace(QUICK, vocab_size=77))
        await engine.start()
        assert (await engine.model_info()).vocab_size == 77
        await engine.close()


async def test_a_server_that_is_paused_when_it_is_met_is_started_with_and_holds_what_it_is_asked() -> None:
    async with ScriptedSglang(is_paused=True) as server:
        engine = SglangBackend(server.base_url, settings=replace(QUICK, control_timeout_seconds=0.2))
        await engine.start()
        info = await engine.model_info()
        assert (info.name, info.vocab_size, info.context_length) == ("tiny", 0, 1000)
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}"))) for n in range(4)]
        aborted, cancelled = (asyncio.create_task(engine.generate(request(rid))) for rid in ("aborted", "cancelled"))
        outside = asyncio.create_task(engine.generate(replace(request("outside"), token_ids=[1, 600])))
        await server.until(lambda: server.vocabulary_questions == 2)
        await engine.abort("aborted")
        assert (await aborted).finish_reason is FinishReason.ABORT
        tasks.pop(0).cancel()  # the one that asks: another takes over
        cancelled.cancel()
        await asyncio.wait([cancelled])
        server.go_on()
        assert [(await task).token_ids for task in tasks] == [ids(8)] * 3
        with pytest.raises(EngineRejectedError, match="outside the vocabulary"):
            await outside
        assert (await engine.model_info()).vocab_size == 512
        assert (server.vocabulary_questions, len(server.bodies)) == (3, 3)
        await engine.close()


async def test_what_a_paused_server_holds_does_not_wait_for_ever() -> None:
    async with ScriptedSglang(is_paused=True) as server:
        settings = replace(QUICK, control_timeout_seconds=0.1, first_token_timeout_seconds=0.1)
        engine = SglangBackend(server.base_url, settings=settings)
        await engine.start()
        with pytest.raises(EngineUnavailableError, match="failed 3 times in a row, last: no answer in time"):
            await engine.generate(request())
        held = asyncio.create_task(engine.generate(request("held")))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineUnavailableError, match="the engine was closed"):
            await held
        assert not server.bodies


@pytest.mark.parametrize("said", [[], {}, {"model_path": "/m", "max_req_input_len": "many"}, None])
async def test_what_is_no_sglang_server_is_refused(said: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(said)

    app = web.Application()
    app.router.add_get("/model_info", answer)
    app.router.add_get("/server_info", answer)
    async with TestServer(app) as server:
        with pytest.raises(EngineUnavailableError, match=r"does not tell its context|in no known way"):
            await SglangBackend(str(server.make_url("")), settings=QUICK).start()


async def test_every_sampling_field_is_sent_and_the_unsaid_is_not() -> None:
    said: dict[str, Any] = {
        "max_new_tokens": 2,
        "min_new_tokens": 1,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "stop": ["x"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "sampling_seed": 3,
    }
    assert set(said) == set(SamplingParams.__struct_fields__)
    async with engine_on(stream_interval=16) as (engine, server):
        await engine.generate(replace(request(), sampling=msgspec.convert(said, SamplingParams)))
        await engine.generate(replace(request("unsaid", max_new_tokens=None), session_id="episode"))
    intervals = (16, 16) if server.streams_increments else (16, 256 // 8)
    assert server.bodies[0]["sampling_params"] == said | {"stream_interval": intervals[0]}
    assert server.bodies[0]["return_logprob"] is True
    assert "session_id" not in server.bodies[0]
    assert server.bodies[1]["session_id"] == "episode"
    assert server.bodies[1]["sampling_params"] == {"max_new_tokens": 256, "stream_interval": intervals[1]}


@pytest.mark.parametrize("heeds_seeds", [False, True])
async def test_a_seed_that_the_server_ignores_is_told_once(heeds_seeds: bool, caplog: pytest.LogCaptureFixture) -> None:
    async with ScriptedSglang(heeds_seeds=heeds_seeds) as server:
        engine = SglangBackend(server.base_url, settings=QUICK)
        await engine.start()
        await engine.generate(request("unsaid"))
        assert "ignores sampling_seed" not in caplog.text
        for rid in ("first", "second"):
            await engine.generate(request(rid, sampling_seed=3))
        await engine.close()
    assert caplog.text.count("ignores sampling_seed") == (0 if heeds_seeds else 1)


async def test_text_and_conversations_are_encoded_by_the_server() -> None:
    async with engine_on() as (engine, _server):
        assert await engine.encode("ab") == [97, 98]
        assert await engine.encode_chat([ChatMessage("u", "b")]) == [ord(c) for c in "<u>b"]


async def test_weight_versions_become_spans() -> None:
    async with engine_on() as (engine, server):
        spans = [{"version": "1", "start": 0, "end": 3}, {"version": "2", "start": 3, "end": 8}]
        server.scripts.append(Script(weight_versions=spans, finish={"type": "stop", "matched": 107}))
        generation = await engine.generate(request())
        assert generation.weight_spans == (WeightSpan("1", 0, 3), WeightSpan("2", 3, 8))
        assert generation.finish_reason is FinishReason.STOP
        assert (await engine.model_info()).weight_version == "2"


# -- what is refused


@pytest.mark.parametrize("token_id", [-1, 512, 10**9])
async def test_ids_outside_the_vocabulary_are_never_sent(token_id: int) -> None:
    async with engine_on() as (engine, server):
        with pytest.raises(EngineRejectedError, match="outside the vocabulary"):
            await engine.generate(replace(request(), token_ids=[1, token_id]))
        assert not server.bodies


async def test_an_empty_prompt_and_no_tokens_asked_for_are_never_sent() -> None:
    async with engine_on() as (engine, server):
        with pytest.raises(EngineRejectedError, match="empty"):
            await engine.generate(request(prompt=0))
        with pytest.raises(EngineRejectedError, match="at least 1"):
            await engine.generate(request(max_new_tokens=0))
        assert not server.bodies


async def test_what_exceeds_the_context_is_never_sent() -> None:
    async with engine_on() as (engine, server):
        with pytest.raises(ContextOverflowError):
            await engine.generate(request(prompt=400, max_new_tokens=601))
        assert not server.bodies
        assert len((await engine.generate(request(prompt=400, max_new_tokens=600))).token_ids) == 600


TOO_LONG = (
    "Requested token count exceeds the model's maximum context length of 1000 tokens.",
    "The input (1001 tokens) is longer than the model's context length (1000 tokens).",
    "Input length (999 tokens) exceeds the maximum allowed length (994 tokens). Use a shorter input.",
)


@pytest.mark.parametrize("message", TOO_LONG)
@pytest.mark.parametrize("form", ["error", "object", "stream"])
async def test_a_context_overflow_that_the_server_reports_is_classified_and_not_retried(
    form: str, message: str
) -> None:
    async with engine_on() as (engine, server):
        server.scripts.append(Script(status=400, message=message, form=form))
        with pytest.raises(ContextOverflowError):
            await engine.generate(request())
        assert len(server.bodies) == 1
        assert len((await engine.generate(request("next"))).token_ids) == 8


async def test_a_context_overflow_that_arrives_as_an_abort_is_classified() -> None:
    async with engine_on() as (engine, server):
        server.scripts.append(Script(finish={"type": "abort", "message": TOO_LONG[2], "status_code": 400}))
        with pytest.raises(ContextOverflowError):
            await engine.generate(request(max_new_tokens=1))


@pytest.mark.parametrize("form", ["error", "object", "stream"])
async def test_any_other_400_is_rejected_and_not_retried(form: str) -> None:
    async with engine_on() as (engine, server):
        server.scripts.append(Script(status=400, message="bad temperature", form=form))
        with pytest.raises(EngineRejectedError, match="bad temperature") as caught:
            await engine.generate(request())
        assert not isinstance(caught.value, ContextOverflowError)
        assert len(server.bodies) == 1


async def test_a_rid_in_flight_is_refused() -> None:
    async with engine_on() as (engine, server):
        server.scripts.append(Script(stall_after=1))
        first = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: bool(server.running))
        with pytest.raises(EngineRejectedError, match="in flight"):
            await engine.generate(request())
        await engine.abort("r")
        await first


# -- what is retried


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_an_overloaded_server_is_asked_again(status: int) -> None:
    async with engine_on() as (engine, server):
        server.scripts.extend([Script(status=status), Script(status=status)])
        assert len((await engine.generate(request())).token_ids) == 8
        assert len(server.bodies) == 3


async def test_a_full_queue_reported_as_an_abort_is_asked_again() -> None:
    async with engine_on() as (engine, server):
        full = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
        closed = asyncio.Event()
        server.scripts.append(Script(finish=full, gate=closed))
        task = asyncio.create_task(engine.generate(request(max_new_tokens=1)))
        await server.until(lambda: bool(server.running))
        closed.set()
        with pytest.raises(EngineUnavailableError) as caught:
            await task
        # It came with a token, so it isn't repeated.
        assert partial_of(caught.value).token_ids == ids(1)


async def test_retries_are_bounded() -> None:
    async with engine_on() as (engine, server):
        server.scripts.extend([Script(status=503, message="busy")] * 9)
        with pytest.raises(EngineUnavailableError, match="busy"):
            await engine.generate(request())
        assert len(server.bodies) == 3


async def test_a_server_that_is_not_there() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        engine = SglangBackend(f"http://127.0.0.1:{unused.getsockname()[1]}", settings=QUICK)
        with pytest.raises(EngineUnavailableError):
            await engine.start()


async def test_a_disconnect_before_any_byte_is_retried_under_a_new_rid_after_an_abort() -> None:
    async with engine_on() as (engine, server):
        server.scripts.append(Script(disconnect_before=True))
        assert len((await engine.generate(request())).token_ids) == 8
        assert len(server.bodies) == 2
        assert server.aborts == [server.rids[0]]


async def test_a_keep_alive_reset_is_survived() -> None:
    async with engine_on() as (engine, server):
        await engine.generate(request("first"))
        server.scripts.append(Script(disconnect_before=True))
        await engine.generate(request("second"))
        assert len(server.bodies) == 3


async def test_connections_are_used_again() -> None:
    async with engine_on() as (engine, server):
        for number in range(5):
            await engine.generate(request(f"r{number}"))
        assert len(server.connections) == 1


@pytest.mark.parametrize("script", [Script(disconnect_after=4), Script(close_after=4)], ids=["cut", "closed"])
async def test_a_connection_lost_after_tokens_keeps_them_and_is_not_retried(script: Script) -> None:
    async with engine_on() as (engine, server):
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
    async with engine_on(idle_read_timeout_seconds=0.05) as (engine, server):
        server.scripts.append(Script(stall_after=3, deaf=True))
        with pytest.raises(EngineUnavailableError) as caught:
            await engine.generate(request())
        assert partial_of(caught.value).token_ids == ids(3)
        assert server.aborts == server.rids
        await server.until(lambda: not server.running)


async def test_silence_before_any_token_is_retried_after_an_abort() -> None:
    async with engine_on(first_token_timeout_seconds=0.1) as (engine, server):
        server.scripts.append(Script(gate=asyncio.Event()))
        assert len((await engine.generate(request())).token_ids) == 8
        assert server.aborts == [server.rids[0]]


@pytest.mark.parametrize("aligned", [0, 3])
async def test_log_probs_of_other_tokens_are_an_error_that_keeps_the_tokens_before_them(aligned: int) -> None:
    async with engine_on() as (engine, server):
        spans = [{"version": "1", "start": 0, "end": 2}, {"version": "2", "start": 2, "end": 8}]
        server.scripts.append(Script(misaligned_after=aligned, weight_versions=spans))
        with pytest.raises(EngineUnavailableError, match="do not match") as caught:
            await engine.generate(request())
        partial = partial_of(caught.value)
        assert (partial.token_ids, len(partial.log_probs)) == (ids(aligned), aligned)
        # Only the last event has the spans, and a fault in an increment is found before.
        told = (WeightSpan("1", 0, 2), WeightSpan("2", 2, 3))
        named = (WeightSpan("default", 0, 3),)
        assert partial.weight_spans == ((named if server.streams_increments else told) if aligned else ())


async def test_silence_keeps_the_tokens_before_log_probs_of_other_tokens() -> None:
    async with engine_on(idle_read_timeout_seconds=0.05) as (engine, server):
        server.scripts.append(Script(stall_after=5, misaligned_after=4, deaf=True))
        with pytest.raises(EngineUnavailableError) as caught:
            await engine.generate(request())
        assert partial_of(caught.value).token_ids == ids(4)


# -- many


async def test_three_hundred_generations_are_in_flight_at_once() -> None:
    async with engine_on() as (engine, server):
        gate = asyncio.Event()
        server.scripts.extend(Script(gate=gate) for _ in range(300))
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}", max_new_tokens=3))) for n in range(300)]
        await server.until(lambda: len(server.running) == 300)
        gate.set()
        generations = await asyncio.gather(*tasks)
        assert all(generation.token_ids == ids(3) for generation in generations)
        assert server.most_running == 300


async def test_events_longer_than_a_line_may_be_are_read() -> None:
    async with engine_on(context_length=40_000) as (engine, server):
        server.context_length = 40_000
        server.scripts.append(Script(finish={"type": "stop", "message": "m" * 300_000}))
        generation = await engine.generate(request(max_new_tokens=2))
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.STOP, ids(2))
