"""The SGLang adapter against a real HTTP server on loopback that misbehaves as told."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.domain.generation import (
    FinishReason,
    Generation,
    SamplingParams,
    WeightSpan,
)
from py_scheduler.errors import ContextOverflowError, EngineRejectedError, EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ScriptedSglang, ids
from tests.support.models.served_backends import QUICK, engine_on, request

pytestmark = pytest.mark.usefixtures("either_way")


def partial_of(error: EngineUnavailableError) -> Generation:
    assert isinstance(error.partial, Generation)
    assert error.partial.finish_reason is FinishReason.ABORT
    return error.partial


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


# -- what is refused


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


# -- what is retried


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


async def test_events_longer_than_a_line_may_be_are_read() -> None:
    async with engine_on(context_length=40_000) as (engine, server):
        server.context_length = 40_000
        server.scripts.append(Script(finish={"type": "stop", "message": "m" * 300_000}))
        generation = await engine.generate(request(max_new_tokens=2))
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.STOP, ids(2))
