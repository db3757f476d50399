"""Faults between the adapter and a real server. The fixture looks after each: nothing decodes on for nobody."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.http_client import RetrySettings, error_message
from py_scheduler.adapters.sglang.requests import refusal
from py_scheduler.domain.generation import FinishReason, Generation, WeightSpan, WeightUpdate
from py_scheduler.errors import ContextOverflowError, EngineRejectedError, EngineUnavailableError
from tests.sglang.asking import (
    CONTEXT_LENGTH,
    MAX_QUEUED,
    MAX_RUNNING,
    PROMPT,
    TRAINED_VERSION,
    USABLE_CONTEXT,
    VOCAB_SIZE,
    request,
)
from tests.sglang.conftest import TRAINED_MODEL, both_ways
from tests.sglang.proxy import Connection, Proxy

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.sglang.asking import RealSglang, Reference

pytestmark = both_ways
LONG = 4000
"""Tokens; slowed down they take minutes."""
SLOW_SECONDS = 0.03
GENERATE, ABORT = "/generate", "/abort_request"


def assert_prefix(generation: Generation, reference: Reference) -> None:
    """Some tokens, not all, with their own log-probs, and marked as incomplete."""
    assert generation.finish_reason is FinishReason.ABORT
    assert 0 < len(generation.token_ids) == len(generation.log_probs) < LONG
    expected = reference.log_probs([*PROMPT, *generation.token_ids])[len(PROMPT) - 1 :]
    assert generation.log_probs == pytest.approx(expected, abs=1e-4)
    assert generation.weight_spans == (WeightSpan("default", 0, len(generation.token_ids)),)


def partial_of(error: EngineUnavailableError) -> Generation:
    assert isinstance(error.partial, Generation)
    return error.partial


# -- aborts


@pytest.mark.parametrize("stream_interval", [1, 16])
async def test_an_abort_keeps_what_was_generated(real: RealSglang, reference: Reference, stream_interval: int) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine(stream_interval=stream_interval, abort_grace_seconds=20.0) as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
        await real.until_running(1, tokens=len(PROMPT) + 20)
        await engine.abort("r")
        generation = await task
        assert len(generation.token_ids) >= 20
        assert_prefix(generation, reference)


async def test_an_abort_of_a_plain_generation_keeps_what_was_generated(real: RealSglang, reference: Reference) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine(streaming="plain", abort_grace_seconds=20.0) as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
        await real.until_running(1, tokens=len(PROMPT) + 20)
        await engine.abort("r")
        generation = await task
        assert len(generation.token_ids) >= 20
        assert_prefix(generation, reference)


@pytest.mark.parametrize(("streaming", "interval"), [("auto", 3), ("plain", 50)])
async def test_an_abort_of_what_a_pause_took_back_keeps_all_but_the_last_tokens(
    real: RealSglang, reference: Reference, streaming: str, interval: int
) -> None:
    """It waits to go on, and is told everything at once, whatever was sent before. What SGLang has put into no event
    yet, it forgets itself; a plain generation has one every 50 tokens, which only SGLang sees.
    """
    await real.slow_down(SLOW_SECONDS)
    async with real.engine(streaming=streaming, stream_interval=3, abort_grace_seconds=20.0) as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
        await real.until_running(1, tokens=len(PROMPT) + 60)
        await real.pause("retract")
        await engine.abort("r")
        generation = await task
        assert len(generation.token_ids) > 60 - interval
        assert_prefix(generation, reference)


async def test_an_abort_that_overtakes_its_request_is_not_lost(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine(abort_grace_seconds=20.0) as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
        await asyncio.sleep(0)
        await engine.abort("r")
        assert (await task).finish_reason is FinishReason.ABORT
        assert len((await engine.generate(request(max_new_tokens=3))).token_ids) == 3


async def test_an_abort_of_what_still_queues(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine(abort_grace_seconds=20.0) as engine:
        running = [
            asyncio.create_task(engine.generate(request(f"r{n}", max_new_tokens=500))) for n in range(MAX_RUNNING)
        ]
        await real.until_running(MAX_RUNNING)
        queued = [asyncio.create_task(engine.generate(request(f"q{n}"))) for n in range(8)]
        await real.until(lambda load: load["num_waiting_reqs"] == 8)
        await asyncio.gather(*(engine.abort(f"q{n}") for n in range(8)))
        outcomes = [(generation.finish_reason, generation.token_ids) for generation in await asyncio.gather(*queued)]
        assert outcomes == [(FinishReason.ABORT, [])] * 8
        await asyncio.gather(*(engine.abort(f"r{n}") for n in range(MAX_RUNNING)))
        assert all(generation.token_ids for generation in await asyncio.gather(*running))


async def test_an_abort_while_the_server_is_paused(real: RealSglang, reference: Reference) -> None:
    """It acts on it only afterwards, so the connection is closed and what had arrived is kept."""
    await real.slow_down(SLOW_SECONDS)
    async with real.engine(abort_grace_seconds=0.5) as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
        await real.until_running(1, tokens=len(PROMPT) + 5)
        await real.pause()
        await engine.abort("r")
        assert_prefix(await task, reference)


async def test_a_cancelled_generation_stops_at_the_server(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
        await real.until_running(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await real.until_idle()


async def test_a_plain_generation_that_is_cancelled_stops_at_the_server(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine(streaming="plain") as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
        await real.until_running(1)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await real.until_idle()


async def test_closing_the_engine_stops_everything_at_the_server(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}", max_new_tokens=LONG))) for n in range(6)]
        await real.until_running(6, tokens=100)
        await engine.close()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(outcome) for outcome in outcomes] == [EngineUnavailableError] * 6
        await real.until_idle()


# -- refusals


@pytest.mark.parametrize(
    "prompt", [CONTEXT_LENGTH + 1, CONTEXT_LENGTH - 3], ids=["the prompt alone", "with the output"]
)
async def test_a_context_that_the_server_finds_too_long(real: RealSglang, prompt: int) -> None:
    longer = 10 * CONTEXT_LENGTH
    async with Proxy(real.base_url) as proxy, real.engine(proxy.base_url, context_length=longer) as engine:
        proxy.requests.clear()
        with pytest.raises(ContextOverflowError):
            await engine.generate(request(prompt=(9,) * prompt, max_new_tokens=16))
        assert proxy.requests == [GENERATE]
        assert len((await engine.generate(request(max_new_tokens=3))).token_ids) == 3


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("prompt", [CONTEXT_LENGTH + 1, CONTEXT_LENGTH - 3])
async def test_how_the_server_says_that_a_context_is_too_long(real: RealSglang, prompt: int, stream: bool) -> None:
    """As a status of 400, or in a stream of status 200: read as the same."""
    body = {"input_ids": [9] * prompt, "sampling_params": {"max_new_tokens": 16}, "stream": stream}
    status, answer = await real.ask("/generate", body)
    assert status == (200 if stream else 400)
    message = error_message(answer.removeprefix(b"data: ").partition(b"\n\n")[0])
    assert isinstance(refusal(400, message, of_router=False), ContextOverflowError)


async def test_a_bad_parameter_is_rejected_and_not_repeated(real: RealSglang) -> None:
    async with Proxy(real.base_url) as proxy, real.engine(proxy.base_url) as engine:
        proxy.requests.clear()
        with pytest.raises(EngineRejectedError, match="top_p"):
            await engine.generate(request(top_p=2.0))
        assert proxy.requests == [GENERATE]


async def test_somebody_elses_rid_is_refused_and_his_request_left_alone(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as engine:
        taken = f"r~{engine._nonce}0"
        body = {"rid": taken, "input_ids": [7], "sampling_params": {"max_new_tokens": 40, "ignore_eos": True}}
        other = asyncio.create_task(real.post("/generate", body))
        await real.until_running(1)
        with pytest.raises(EngineRejectedError, match="Duplicate request ID"):
            await engine.generate(request())
        answer = await other
    assert answer["meta_info"]["finish_reason"]["type"] == "length"
    assert len(answer["output_ids"]) == 40


async def test_a_full_queue_is_asked_again(real: RealSglang) -> None:
    """The rest gets 503 for a while."""
    count = MAX_RUNNING + MAX_QUEUED + 72
    async with Proxy(real.base_url) as proxy:
        patient = RetrySettings(attempts=100, base_seconds=0.05, max_seconds=0.2)
        async with real.engine(proxy.base_url, retry=patient) as engine:
            generations = await asyncio.gather(
                *(engine.generate(request(f"r{n}", max_new_tokens=8)) for n in range(count))
            )
        assert proxy.requests.count(GENERATE) > count
    assert {len(generation.token_ids) for generation in generations} == {8}


# -- lost and silent connections


@pytest.mark.parametrize("fault", [Connection.stall, Connection.half_close, Connection.cut])
async def test_a_connection_that_breaks_in_mid_stream_keeps_its_tokens(
    real: RealSglang, reference: Reference, fault: Callable[[Connection], None]
) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with Proxy(real.base_url) as proxy, real.engine(proxy.base_url, idle_read_timeout_seconds=0.5) as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
        await proxy.until(lambda: proxy.events >= 10)
        proxy.requests.clear()
        fault(proxy.connections[-1])
        with pytest.raises(EngineUnavailableError) as caught:
            await task
        # The server still holds its end of the broken connection: it is the abort that stops the work.
        assert proxy.requests == [ABORT]
        await real.until_idle()
    assert_prefix(partial_of(caught.value), reference)


@pytest.mark.parametrize("fault", [Connection.stall, Connection.half_close, Connection.cut])
async def test_what_brought_no_token_is_aborted_and_then_tried_again(
    real: RealSglang, fault: Callable[[Connection], None]
) -> None:
    """The server hears nothing of the fault, so that only the abort can end what it runs."""
    async with Proxy(real.base_url) as proxy, real.engine(proxy.base_url, first_token_timeout_seconds=4.0) as engine:
        await real.slow_down(1.0)
        task = asyncio.create_task(engine.generate(request(max_new_tokens=8)))
        await proxy.until(lambda: GENERATE in proxy.requests[-1:])
        fault(proxy.connections[-1])
        await proxy.until(lambda: proxy.events > 0)
        # Whoever lost a connection asks first what the server serves by now.
        asked = [path for path in proxy.requests if path not in {"/model_info", "/server_info"}]
        assert asked[-3:] == [GENERATE, ABORT, GENERATE], proxy.requests
        # The second has begun, and the first, which had seven tokens to go, is not beside it.
        assert (await real.load())["num_running_reqs"] == 1
        await real.slow_down(None)
        assert len((await task).token_ids) == 8


async def test_a_silent_server_is_given_up_after_a_bounded_number_of_tries(real: RealSglang) -> None:
    async with Proxy(real.base_url) as proxy, real.engine(proxy.base_url, first_token_timeout_seconds=0.3) as engine:
        await real.pause()
        proxy.requests.clear()
        with pytest.raises(EngineUnavailableError, match="3 times"):
            await engine.generate(request(max_new_tokens=LONG))
        assert proxy.requests == [GENERATE, ABORT] * 3
        await real.resume()
        await real.until_idle()


async def test_a_connection_that_the_server_has_closed_meanwhile(real: RealSglang) -> None:
    """It closes idle ones after five seconds; here the client does not hear of it."""
    async with Proxy(real.base_url) as proxy, real.engine(proxy.base_url, keepalive_seconds=60.0) as engine:
        assert len((await engine.generate(request("first", max_new_tokens=3))).token_ids) == 3
        proxy.keeps_ends = True
        await proxy.until(lambda: proxy.server_ends == len(proxy.connections))
        assert len((await engine.generate(request("second", max_new_tokens=3))).token_ids) == 3


# -- pauses and weights


@pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
async def test_a_server_that_is_paused_when_it_is_met(real: RealSglang, mode: str) -> None:
    """It tells what it is but for its vocabulary, obeys, and holds what it is asked."""
    await real.pause(mode)
    async with Proxy(real.base_url) as proxy, real.engine(proxy.base_url, control_timeout_seconds=1.0) as engine:
        info = await engine.model_info()
        assert (info.vocab_size, info.context_length) == (0, USABLE_CONTEXT)
        task = asyncio.create_task(engine.generate(request(max_new_tokens=5)))
        await engine.update_weights(WeightUpdate(model_path=str(TRAINED_MODEL), weight_version=TRAINED_VERSION))
        assert not task.done()
        await engine.resume()
        generation = await task
        assert generation.weight_spans == (WeightSpan(TRAINED_VERSION, 0, 5),)
        info = await engine.model_info()
        assert (info.vocab_size, info.weight_version) == (VOCAB_SIZE, TRAINED_VERSION)
        with pytest.raises(EngineRejectedError, match="outside the vocabulary"):
            await engine.generate(request(prompt=(VOCAB_SIZE,)))


async def test_a_new_generation_waits_for_a_paused_server(real: RealSglang) -> None:
    async with Proxy(real.base_url) as proxy, real.engine(proxy.base_url) as engine:
        await real.pause("abort")
        task = asyncio.create_task(engine.generate(request(max_new_tokens=5)))
        await proxy.until(lambda: GENERATE in proxy.requests[-1:])
        assert not task.done()
        await real.resume()
        assert len((await task).token_ids) == 5
        assert proxy.requests.count(ABORT) == 0


async def test_a_generation_over_an_update_tells_which_weights_made_what(real: RealSglang) -> None:
    await real.slow_down(SLOW_SECONDS)
    async with real.engine() as engine:
        task = asyncio.create_task(engine.generate(request(max_new_tokens=60)))
        await real.until_running(1, tokens=len(PROMPT) + 10)
        await real.pause()
        await real.update_weights("renamed")
        await real.resume()
        generation = await task
        assert (await engine.model_info()).weight_version == "renamed"
    assert len(generation.token_ids) == 60
    before, after = generation.weight_spans
    assert (before.version, after.version) == ("default", "renamed")
    assert (before.start, before.end, after.end) == (0, after.start, 60)
    assert 10 <= before.end < 60
