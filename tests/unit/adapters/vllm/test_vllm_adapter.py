"""What is vLLM's own, against a scripted server; what it shares with other servers is tested in http_server/."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from py_scheduler.adapters.vllm.backend import VllmBackend
from py_scheduler.domain.generation import FinishReason, Generation, LogProbKind, SamplingParams, WeightSpan
from py_scheduler.errors import ContextOverflowError, EngineRejectedError, EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ids
from tests.support.models.scripted_vllm import ScriptedVllm
from tests.support.models.served_backends import QUICK_VLLM, request, vllm_on


async def test_every_sampling_field_is_sent_under_its_name_there_and_the_unsaid_is_not() -> None:
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
    async with vllm_on(stream_interval=16) as (engine, server):
        await engine.generate(replace(request(), sampling=msgspec.convert(said, SamplingParams)))
        await engine.generate(request("unsaid", max_new_tokens=None))
    theirs = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
    expected = {theirs.get(name, name): value for name, value in said.items()}
    assert server.asked[0]["sampling_params"] == expected | {"stream_interval": 16, "logprobs": 0}
    assert server.asked[1]["sampling_params"] == {"max_tokens": 256, "stream_interval": 16, "logprobs": 0}


@pytest.mark.parametrize(("told", "kind"), [(0.0, LogProbKind.SAMPLED), (-1.5, LogProbKind.MODEL)])
async def test_what_log_probs_are_of_is_found_out(told: float, kind: LogProbKind) -> None:
    async with ScriptedVllm(log_prob_of_the_allowed=told) as server:
        engine = VllmBackend(server.base_url, settings=QUICK_VLLM)
        await engine.start()
        assert (await engine.model_info()).log_prob_kind is kind
        assert (await engine.generate(request())).log_prob_kind is kind
        await engine.close()


@pytest.mark.parametrize(
    ("server", "said"),
    [
        (ScriptedVllm(log_prob_of_the_allowed=12.5), "start it with --logprobs-mode processed_logprobs"),
        (ScriptedVllm(takes_token_ids=False), "start it with --enable-scale-out"),
        (ScriptedVllm(nonsense={"/weight_info": (404, b"{}")}), "answered 404.*VLLM_SERVER_DEV_MODE=1"),
        (ScriptedVllm(nonsense={"/inference/v1/generate": (404, b"{}")}), "answered 404.*vLLM.*--enable-scale-out"),
        (ScriptedVllm(nonsense={"/v1/models": (404, b"{}")}), "answered 404.*without a path such as /v1"),
    ],
    ids=["logits", "text only", "not for training", "another server", "a path too many"],
)
async def test_a_server_that_was_started_otherwise_is_refused_with_the_way_out(server: ScriptedVllm, said: str) -> None:
    async with server:
        with pytest.raises(EngineUnavailableError, match=said):
            await VllmBackend(server.base_url, settings=QUICK_VLLM).start()


@pytest.mark.parametrize("said", [[], {}, {"data": []}, {"data": [{"id": 5}]}, None])
async def test_what_is_no_vllm_server_is_refused(said: Any) -> None:
    async def answer(_: web.Request) -> web.Response:
        return web.json_response(said)

    app = web.Application()
    app.router.add_get("/v1/models", answer)
    async with TestServer(app) as server:
        with pytest.raises(EngineUnavailableError, match="cannot be read"):
            await VllmBackend(str(server.make_url("")), settings=QUICK_VLLM).start()


async def test_a_server_that_is_paused_when_it_is_met_is_started_with_and_holds_what_it_is_asked() -> None:
    async with ScriptedVllm(is_paused=True, log_prob_of_the_allowed=-1.0) as server:
        engine = VllmBackend(server.base_url, settings=replace(QUICK_VLLM, control_timeout_seconds=0.2))
        await engine.start()
        assert (await engine.model_info()).vocab_size == 512
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}"))) for n in range(3)]
        await asyncio.sleep(0)
        assert not server.bodies, "nobody knows what its log-probs would be"
        server.go_on()
        assert [(await task).log_prob_kind for task in tasks] == [LogProbKind.MODEL] * 3
        await engine.close()


TOO_LONG = (
    "The decoder prompt (length 4097) is longer than the maximum model length of 4096. Make sure that `max_model_len`",
    "The decoder prompt (length 4096) plus the requested tokens is longer than the maximum model length of 4096.",
)


@pytest.mark.parametrize("message", TOO_LONG)
@pytest.mark.parametrize("form", ["error", "stream"])
async def test_a_context_overflow_that_the_server_reports_is_classified(form: str, message: str) -> None:
    async with vllm_on() as (engine, server):
        server.scripts.append(Script(status=400, message=message, form=form))
        with pytest.raises(ContextOverflowError):
            await engine.generate(request())


async def test_tokens_that_were_cut_off_are_of_the_weights_at_their_beginning_if_the_server_still_has_them() -> None:
    """Only the end of a stream says which weights made them. A server that was started anew in between has others."""
    async with vllm_on() as (engine, server):
        server.scripts.append(Script(disconnect_after=4))
        with pytest.raises(EngineUnavailableError) as caught:
            await engine.generate(request())
        assert isinstance(caught.value.partial, Generation)
        assert caught.value.partial.weight_spans == (WeightSpan("default", 0, 4),)


async def test_of_tokens_that_were_cut_off_nobody_knows_the_weights_if_the_server_has_others_now() -> None:
    async with vllm_on() as (engine, server):
        server.weight_version = "newer than anybody was told"
        server.scripts.append(Script(disconnect_after=4))
        with pytest.raises(EngineUnavailableError) as caught:
            await engine.generate(request())
        partial = caught.value.partial
        assert isinstance(partial, Generation)
        assert (partial.token_ids, partial.weight_spans) == (ids(4), (WeightSpan("", 0, 4),))
        assert (await engine.generate(request("next"))).weight_spans == (WeightSpan(server.weight_version, 0, 8),)
        assert (await engine.model_info()).weight_version == server.weight_version


async def test_a_server_that_came_back_with_other_log_probs_is_found_out() -> None:
    async with vllm_on() as (engine, server):
        assert (await engine.model_info()).log_prob_kind is LogProbKind.SAMPLED
        server.log_prob_of_the_allowed = -1.5
        server.scripts.append(Script(disconnect_before=True))
        assert (await engine.generate(request())).log_prob_kind is LogProbKind.MODEL


async def test_an_abort_tells_the_weights() -> None:
    async with vllm_on(abort_grace_seconds=20.0) as (engine, server):
        server.weight_version = "v1"
        server.scripts.append(Script(stall_after=5))
        task = asyncio.create_task(engine.generate(request(max_new_tokens=500)))
        await server.until(lambda: server.streamed == 5)
        await engine.abort("r")
        generation = await task
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, ids(5))
        assert generation.weight_spans == (WeightSpan("v1", 0, 5),)


async def test_an_internal_error_after_tokens_keeps_them() -> None:
    async with vllm_on() as (engine, server):
        server.scripts.append(Script(event=b'{"error": {"message": "Internal server error", "code": 500}}'))
        server.scripts.append(Script(event=b'{"error": {"message": "no such parameter", "code": 400}}'))
        with pytest.raises(EngineRejectedError, match="no such parameter"):
            await engine.generate(request())
        assert len(server.bodies) == 2, "an error of the server's own is tried again while there is no token"
