"""Token ids in, token ids out, with the log-probs that transformers computes of the same model."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.domain.generation import ChatMessage, FinishReason, Generation, LogProbKind, WeightSpan
from py_scheduler.errors import ContextOverflowError
from tests.sglang.asking import FIRST_PLAIN_TOKEN, PROMPT, USABLE_CONTEXT, VOCAB_SIZE, request
from tests.sglang.conftest import both_ways

if TYPE_CHECKING:
    from tests.sglang.asking import RealSglang, Reference

pytestmark = both_ways
TOLERANCE = 1e-4
PROMPTS = [PROMPT, (200,), tuple(range(FIRST_PLAIN_TOKEN, VOCAB_SIZE)), (9,) * 300]


def own_log_probs(
    reference: Reference, prompt: tuple[int, ...], generation: Generation, temperature: float
) -> list[float]:
    """What transformers says of the generated tokens, each after all that stands before it."""
    scores = reference.log_probs([*prompt, *generation.token_ids], temperature=temperature)
    return scores[len(prompt) - 1 :]


async def test_what_the_server_is(real: RealSglang) -> None:
    async with real.engine() as engine:
        info = await engine.model_info()
        await engine.generate(request())
        assert await engine.model_info() is info, "its streams are as it says"
    assert info.streaming == ("increments" if real.streams_increments else "cumulative")
    assert (info.vocab_size, info.context_length) == (VOCAB_SIZE, USABLE_CONTEXT)
    assert (info.weight_version, info.log_prob_kind) == ("default", LogProbKind.SAMPLED)


@pytest.mark.parametrize("stream_interval", [1, 16])
@pytest.mark.parametrize("prompt", PROMPTS, ids=["short", "one token", "every token", "long"])
async def test_greedy_equals_transformers(
    real: RealSglang, reference: Reference, prompt: tuple[int, ...], stream_interval: int
) -> None:
    async with real.engine(stream_interval=stream_interval) as engine:
        generation = await engine.generate(request(prompt=prompt, max_new_tokens=48, temperature=0.0, ignore_eos=False))
    assert generation.token_ids == reference.continuation(prompt, 48)
    assert generation.log_probs == pytest.approx(own_log_probs(reference, prompt, generation, 1.0), abs=TOLERANCE)
    assert generation.prompt_tokens == len(prompt)
    assert generation.weight_spans == (WeightSpan("default", 0, len(generation.token_ids)),)


@pytest.mark.parametrize(
    ("temperature", "said"),
    [(1.0, {}), (0.6, {}), (1.7, {}), (0.8, {"top_p": 0.7}), (0.8, {"top_k": 5}), (0.8, {"min_p": 0.1})],
    ids=["neutral", "cold", "hot", "top_p", "top_k", "min_p"],
)
async def test_log_probs_of_sampled_tokens_are_those_of_the_model_at_that_temperature(
    real: RealSglang, reference: Reference, temperature: float, said: dict[str, Any]
) -> None:
    async with real.engine() as engine:
        generation = await engine.generate(request(max_new_tokens=64, temperature=temperature, **said))
    assert len(generation.token_ids) == len(generation.log_probs) == 64
    expected = own_log_probs(reference, PROMPT, generation, temperature)
    assert generation.log_probs == pytest.approx(expected, abs=TOLERANCE)


async def test_the_text_is_the_same_however_it_comes(real: RealSglang) -> None:
    """What this model says ends inside a character at nearly every token."""
    async with real.engine(streaming="plain") as engine:
        plain = await engine.generate(request(max_new_tokens=200, temperature=0.0))
    for interval in (1, 3, 16):
        async with real.engine(stream_interval=interval) as engine:
            generation = await engine.generate(request(max_new_tokens=200, temperature=0.0))
        assert (generation.text, generation.token_ids) == (plain.text, plain.token_ids)
        assert generation.log_probs == pytest.approx(plain.log_probs, abs=TOLERANCE)


async def test_many_at_once_are_as_exact_as_one(real: RealSglang, reference: Reference) -> None:
    prompts = [(*PROMPT, number) for number in range(FIRST_PLAIN_TOKEN, FIRST_PLAIN_TOKEN + 24)]
    async with real.engine() as engine:
        generations = await asyncio.gather(
            *(engine.generate(request(f"r{p[-1]}", prompt=p, max_new_tokens=24)) for p in prompts)
        )
    assert len({tuple(generation.token_ids) for generation in generations}) == len(prompts)
    for prompt, generation in zip(prompts, generations, strict=True):
        expected = own_log_probs(reference, prompt, generation, 1.0)
        assert generation.log_probs == pytest.approx(expected, abs=TOLERANCE)


async def test_a_seed_that_the_server_ignores_is_told_once(real: RealSglang, caplog: pytest.LogCaptureFixture) -> None:
    """It draws by it only when it is started with --enable-deterministic-inference, which no CPU backend has."""
    async with real.engine() as engine:
        drawn = [await engine.generate(request(f"r{n}", max_new_tokens=32, sampling_seed=5)) for n in range(2)]
    assert drawn[0].token_ids != drawn[1].token_ids
    assert [record.message for record in caplog.records if "ignores sampling_seed" in record.message] == [
        f"{real.base_url} ignores sampling_seed: start it with --enable-deterministic-inference"
    ]


async def test_a_stop_token_is_part_of_the_output(real: RealSglang, reference: Reference) -> None:
    greedy = reference.continuation(PROMPT, 24)
    stop = greedy[7]
    expected = greedy[: greedy.index(stop) + 1]
    async with real.engine() as engine:
        generation = await engine.generate(
            request(max_new_tokens=24, temperature=0.0, ignore_eos=False, stop_token_ids=(stop,))
        )
    assert generation.finish_reason is FinishReason.STOP
    assert generation.token_ids == expected
    assert len(generation.log_probs) == len(expected)


async def test_a_stop_string_ends_the_text_but_its_ids_stay(real: RealSglang) -> None:
    async with real.engine() as engine:
        whole = await engine.generate(request("whole", max_new_tokens=40, temperature=0.0, ignore_eos=False))
        stop = next(word for word in whole.text[3:] if word.isascii() and word.isalpha())
        generation = await engine.generate(
            request("cut", max_new_tokens=40, temperature=0.0, ignore_eos=False, stop=(stop,))
        )
    assert generation.finish_reason is FinishReason.STOP
    assert generation.text == whole.text[: whole.text.index(stop)]
    assert generation.token_ids == whole.token_ids[: len(generation.token_ids)]
    assert stop not in generation.text
    assert len(generation.log_probs) == len(generation.token_ids)


async def test_the_whole_context_can_be_used_and_not_a_token_more(real: RealSglang) -> None:
    prompt = (9,) * (USABLE_CONTEXT - 8)
    async with real.engine() as engine:
        generation = await engine.generate(request(prompt=prompt, max_new_tokens=8))
        assert generation.finish_reason is FinishReason.LENGTH
        assert len(generation.token_ids) == len(generation.log_probs) == 8
        # The server would take this one, and make 8 of the 9.
        with pytest.raises(ContextOverflowError):
            await engine.generate(request(prompt=prompt, max_new_tokens=9))


async def test_text_and_conversations_are_encoded_as_transformers_does(real: RealSglang, reference: Reference) -> None:
    messages = [{"role": "system", "content": "Count."}, {"role": "user", "content": "How many ö in Köln?\n"}]
    async with real.engine() as engine:
        for text in ("the answer is 12", "", " spaces  and\nlines ", "Größe 🙂", "</turn> as text"):
            assert await engine.encode(text) == reference.encode(text), text
        encoded = await engine.encode_chat([ChatMessage(**message) for message in messages])
    assert encoded == reference.encode_chat(messages)


async def test_what_the_model_says_does_not_survive_text(real: RealSglang) -> None:
    """Why ids are never made from text again."""
    async with real.engine() as engine:
        generation = await engine.generate(request(max_new_tokens=64))
        assert await engine.encode(generation.text) != generation.token_ids
