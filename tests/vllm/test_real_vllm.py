"""What the adapter promises, of a real vLLM: token ids in and out, with the log-probs that transformers computes."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.vllm.backend import VllmBackend
from py_scheduler.domain.generation import ChatMessage, FinishReason, LogProbKind, PauseMode, WeightSpan, WeightUpdate
from py_scheduler.errors import ContextOverflowError, EngineRejectedError, EngineUnavailableError
from tests.sglang.asking import (
    CONTEXT_LENGTH,
    FIRST_PLAIN_TOKEN,
    FIRST_VERSION,
    PROMPT,
    TOLERANCE,
    TRAINED_VERSION,
    VOCAB_SIZE,
    request,
)
from tests.vllm.conftest import TRAINED_MODEL
from tests.vllm.serving import SETTINGS

if TYPE_CHECKING:
    from py_scheduler.domain.generation import Generation
    from tests.sglang.asking import Reference
    from tests.vllm.serving import VllmServer

PROMPTS = [PROMPT, (200,), tuple(range(FIRST_PLAIN_TOKEN, VOCAB_SIZE)), (9,) * 300]
LONG = 3_000
"""Tokens: more than a test waits for."""
TRAINED = WeightUpdate(model_path=str(TRAINED_MODEL.resolve()), weight_version=TRAINED_VERSION)


def own_log_probs(
    reference: Reference, prompt: tuple[int, ...], generation: Generation, temperature: float = 1.0
) -> list[float]:
    """What transformers says of the generated tokens, each after all before it, of the weights that its span names."""
    ids, scores = [*prompt, *generation.token_ids], list[float]()
    for span in generation.weight_spans:
        said = reference.log_probs(ids, temperature=temperature, version=span.version)[len(prompt) - 1 :]
        scores += said[span.start : span.end]
    return scores


async def until_tokens(engine: VllmBackend, rid: str, seconds: float = 1.0) -> None:
    """It is under way; how far, only its stream knows."""
    async with asyncio.timeout(20):
        while (flight := engine._flights.get(rid)) is None or not flight.backend_rid:  # noqa: ASYNC110 - once, at once
            await asyncio.sleep(0.02)
    await asyncio.sleep(seconds)


async def test_what_the_server_is(engine: VllmBackend) -> None:
    info = await engine.model_info()
    assert (info.name, info.vocab_size, info.context_length) == ("tiny", VOCAB_SIZE, CONTEXT_LENGTH)
    assert (info.weight_version, info.log_prob_kind) == (FIRST_VERSION, LogProbKind.SAMPLED)


@pytest.mark.parametrize("stream_interval", [1, 16])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "one token", "every token", "long"])
async def test_greedy_equals_transformers(
    server: VllmServer, engine: VllmBackend, reference: Reference, prompt: tuple[int, ...], stream_interval: int
) -> None:
    del engine  # It leaves the server as it was.
    here = VllmBackend(server.base_url, settings=SETTINGS.__class__(stream_interval=stream_interval))
    await here.start()
    generation = await here.generate(request(prompt=prompt, max_new_tokens=48, temperature=0.0, ignore_eos=False))
    await here.close()
    assert generation.token_ids == reference.continuation(prompt, 48)
    assert generation.log_probs == pytest.approx(own_log_probs(reference, prompt, generation), abs=TOLERANCE)
    assert generation.prompt_tokens == len(prompt)
    assert generation.weight_spans == (WeightSpan(FIRST_VERSION, 0, len(generation.token_ids)),)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
async def test_log_probs_of_sampled_tokens_are_those_at_that_temperature(
    engine: VllmBackend, reference: Reference, temperature: float
) -> None:
    generation = await engine.generate(request(max_new_tokens=64, temperature=temperature))
    assert generation.log_probs == pytest.approx(
        own_log_probs(reference, PROMPT, generation, temperature), abs=TOLERANCE
    )


@pytest.mark.parametrize("said", [{"top_p": 0.7}, {"top_k": 5}, {"min_p": 0.1}], ids=["top_p", "top_k", "min_p"])
async def test_what_is_left_out_counts_for_nothing(
    engine: VllmBackend, reference: Reference, said: dict[str, Any]
) -> None:
    """Each token is as likely as among what was left to draw from, so never less likely than among all."""
    generation = await engine.generate(request(max_new_tokens=64, temperature=0.8, **said))
    whole = own_log_probs(reference, PROMPT, generation, 0.8)
    assert all(left >= among_all - TOLERANCE for left, among_all in zip(generation.log_probs, whole, strict=True))
    assert sum(generation.log_probs) > sum(whole) + 1


async def test_a_seed_is_heeded(engine: VllmBackend) -> None:
    one, other = [await engine.generate(request(rid, sampling_seed=7)) for rid in ("one", "other")]
    assert one.token_ids == other.token_ids


async def test_a_stop_string_is_in_the_ids_and_not_in_the_text(engine: VllmBackend) -> None:
    whole = await engine.generate(request("whole", max_new_tokens=48, temperature=0.0))
    stop = whole.text[10:12]
    generation = await engine.generate(request("cut", max_new_tokens=48, temperature=0.0, stop=(stop,)))
    assert generation.finish_reason is FinishReason.STOP
    assert generation.text == whole.text[: whole.text.index(stop)]
    assert generation.token_ids == whole.token_ids[: len(generation.token_ids)]
    assert len(generation.log_probs) == len(generation.token_ids) < 48


async def test_text_and_conversations_are_encoded_as_transformers_does(
    engine: VllmBackend, reference: Reference
) -> None:
    assert await engine.encode("What is 2 plus 3?") == reference.encode("What is 2 plus 3?")
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    messages = [ChatMessage(each["role"], each["content"]) for each in said]
    assert await engine.encode_chat(messages) == reference.encode_chat(said)


@pytest.mark.parametrize("stream_interval", [1, 1_000])
async def test_an_abort_keeps_every_token_also_those_that_were_not_sent_yet(
    server: VllmServer, engine: VllmBackend, reference: Reference, stream_interval: int
) -> None:
    here = VllmBackend(server.base_url, settings=SETTINGS.__class__(stream_interval=stream_interval))
    await here.start()
    task = asyncio.create_task(here.generate(request(max_new_tokens=LONG)))
    await until_tokens(here, "r")
    await here.abort("r")
    generation = await task
    assert generation.finish_reason is FinishReason.ABORT
    assert 1 < len(generation.token_ids) < LONG
    assert generation.log_probs == pytest.approx(own_log_probs(reference, PROMPT, generation), abs=TOLERANCE)
    await server.until_idle(engine)
    await here.close()


async def test_who_is_cancelled_leaves_nothing_behind(server: VllmServer, engine: VllmBackend) -> None:
    tasks = [asyncio.create_task(engine.generate(request(f"r{n}", max_new_tokens=LONG))) for n in range(8)]
    await until_tokens(engine, "r7")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await server.until_idle(engine)


@pytest.mark.parametrize("mode", [PauseMode.RETRACT, PauseMode.IN_PLACE])
async def test_what_stands_still_goes_on_with_the_new_weights_and_says_from_where(
    engine: VllmBackend, reference: Reference, mode: PauseMode
) -> None:
    task = asyncio.create_task(engine.generate(request(max_new_tokens=400)))
    await until_tokens(engine, "r", 0.5)
    await engine.pause(mode)
    held = asyncio.create_task(engine.generate(request("held", max_new_tokens=8)))
    await engine.update_weights(TRAINED)
    assert not task.done()
    assert not held.done()
    await engine.resume()
    generation = await task
    assert [span.version for span in generation.weight_spans] == [FIRST_VERSION, TRAINED_VERSION]
    expected, there = own_log_probs(reference, PROMPT, generation), generation.weight_spans[0].end
    assert generation.log_probs[:there] == pytest.approx(expected[:there], abs=TOLERANCE)
    if mode is PauseMode.RETRACT:
        # In place the prefix stays as the old weights read it.
        assert generation.log_probs == pytest.approx(expected, abs=TOLERANCE)
    late = await held
    assert late.weight_spans == (WeightSpan(TRAINED_VERSION, 0, 8),)
    assert late.log_probs == pytest.approx(own_log_probs(reference, PROMPT, late), abs=TOLERANCE)


async def test_a_pause_in_mode_abort_ends_it_with_its_tokens_and_holds_what_comes(
    engine: VllmBackend, reference: Reference
) -> None:
    task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
    await until_tokens(engine, "r")
    await engine.pause(PauseMode.ABORT)
    generation = await task
    assert generation.finish_reason is FinishReason.ABORT
    assert generation.log_probs == pytest.approx(own_log_probs(reference, PROMPT, generation), abs=TOLERANCE)
    held = asyncio.create_task(engine.generate(request("held", max_new_tokens=8)))
    await engine.update_weights(TRAINED)
    assert not held.done()
    await engine.resume()
    assert (await held).log_probs == pytest.approx(own_log_probs(reference, PROMPT, await held), abs=TOLERANCE)


async def test_an_abort_in_a_pause_brings_all_tokens(engine: VllmBackend) -> None:
    task = asyncio.create_task(engine.generate(request(max_new_tokens=LONG)))
    await until_tokens(engine, "r")
    await engine.pause(PauseMode.IN_PLACE)
    await engine.abort("r")
    generation = await task
    assert generation.finish_reason is FinishReason.ABORT
    assert generation.weight_spans == (WeightSpan(FIRST_VERSION, 0, len(generation.token_ids)),)


async def test_a_server_that_is_not_paused_finishes_with_the_old_weights_first(engine: VllmBackend) -> None:
    task = asyncio.create_task(engine.generate(request(max_new_tokens=300)))
    await until_tokens(engine, "r", 0.3)
    await engine.update_weights(TRAINED)
    assert (await task).weight_spans == (WeightSpan(FIRST_VERSION, 0, 300),)
    assert await engine.weight_version() == TRAINED_VERSION


async def test_a_load_that_fails_is_told_by_the_server_itself(engine: VllmBackend) -> None:
    with pytest.raises(EngineUnavailableError, match="collective_rpc"):
        await engine.update_weights(WeightUpdate(model_path="/nowhere", weight_version="lost"))
    assert await engine.weight_version() == "loading lost"
    await engine.update_weights(TRAINED)
    assert (await engine.generate(request())).weight_spans == (WeightSpan(TRAINED_VERSION, 0, 16),)


async def test_what_the_server_would_refuse_is_classified(server: VllmServer, engine: VllmBackend) -> None:
    del engine
    blind = VllmBackend(server.base_url, settings=SETTINGS.__class__(vocab_size=10**6, context_length=10**6))
    await blind.start()
    with pytest.raises(ContextOverflowError):
        await blind.generate(request(prompt=(9,) * CONTEXT_LENGTH))
    with pytest.raises(EngineRejectedError, match="out of vocabulary"):
        await blind.generate(request(prompt=(VOCAB_SIZE,)))
    with pytest.raises(EngineRejectedError, match="temperature"):
        await blind.generate(request(temperature=-1.0))
    assert len((await blind.generate(request())).token_ids) == 16
    await blind.close()
