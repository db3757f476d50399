"""What is made of a vLLM stream's events: every token once, with its log-prob and its weights, or a fault."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.vllm.backend import VllmBackend
from py_scheduler.adapters.vllm.output import VllmOutput
from py_scheduler.domain.generation import FinishReason, Generation, LogProbKind, WeightSpan
from py_scheduler.errors import EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ids
from tests.support.models.scripted_vllm import ScriptedVllm, said, usage
from tests.support.models.served_backends import QUICK_VLLM, request, vllm_on

ONCE = RetrySettings(attempts=1, base_seconds=0.001, max_seconds=0.001)


def spans(*told: tuple[int, int]) -> list[dict[str, Any]]:
    return [{"version": f"v{number}", "start": start, "end": end} for number, (start, end) in enumerate(told)]


def read(*events: dict[str, Any]) -> VllmOutput:
    output = VllmOutput(LogProbKind.SAMPLED)
    for event in events:
        output.add(msgspec.json.encode(event))
    return output


def assert_first(generation: Generation, count: int) -> None:
    assert generation.token_ids == ids(count)
    assert generation.log_probs == [-i / 128 for i in range(count)]
    assert generation.text == "".join(f"t{i}" for i in range(count))
    covered = [place for span in generation.weight_spans for place in range(span.start, span.end)]
    assert not covered or covered == list(range(count)), "weights that nobody told are the backend's to name"


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[list[bytes], int, int, bool]:
    """Pieces of a stream, how many tokens its whole events have, of how many, and whether it came to its end."""
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda sizes: sizes[0] > 0))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    border = draw(st.integers(0, ends[-1]))
    told = spans((0, border), (border, ends[-1]))
    events = [said(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    events[-1]["choices"][0] |= {"finish_reason": "length", "weight_versions": told}
    encoded = [msgspec.json.encode(event) for event in (*events, usage(ends[-1]))]
    framed = [b"data: " + each + b"\n\n" for each in [*encoded, b"[DONE]"]]
    stream = b"".join(framed)
    cut = draw(st.integers(1, len(stream)))
    borders = sorted(draw(st.lists(st.integers(1, cut), max_size=5)))
    pieces = [stream[start:end] for start, end in zip([0, *borders], [*borders, cut], strict=True) if start < end]
    whole = stream[:cut].count(b"\n\n")
    return pieces, ends[min(whole, len(ends)) - 1] if whole else 0, ends[-1], whole == len(framed)


def test_wherever_a_vllm_stream_is_cut_no_token_is_lost_had_twice_or_without_its_log_prob() -> None:
    async def begin() -> tuple[ScriptedVllm, VllmBackend]:
        server = await ScriptedVllm().__aenter__()
        engine = VllmBackend(server.base_url, settings=replace(QUICK_VLLM, retry=ONCE))
        await engine.start()
        return server, engine

    with asyncio.Runner() as runner:
        server, engine = runner.run(begin())

        @given(cut_streams())
        def check(case: tuple[list[bytes], int, int, bool]) -> None:
            pieces, there, wanted, is_whole = case
            server.scripts.append(Script(pieces=pieces))
            if is_whole:
                generation = runner.run(engine.generate(request()))
                assert generation.finish_reason is FinishReason.LENGTH
                assert_first(generation, wanted)
                return
            with pytest.raises(EngineUnavailableError) as caught:
                runner.run(engine.generate(request()))
            partial = caught.value.partial
            if not there:
                assert partial is None
                return
            assert isinstance(partial, Generation)
            assert partial.finish_reason is FinishReason.ABORT
            assert_first(partial, there)

        check()
        runner.run(engine.close())
        runner.run(server.__aexit__())


def test_the_end_tells_the_weights_of_all_tokens() -> None:
    output = read(said(0, 2), said(2, 5, "length", spans((0, 3), (3, 5))), usage(5))
    assert output.whole().weight_spans == (WeightSpan("v0", 0, 3), WeightSpan("v1", 3, 5))
    assert (output.whole().prompt_tokens, output.whole().cached_tokens) == (3, 1)


@pytest.mark.parametrize(
    ("reason", "meant"),
    [("stop", FinishReason.STOP), ("repetition", FinishReason.STOP), ("abort", FinishReason.ABORT)],
)
def test_each_reason_is_known(reason: str, meant: FinishReason) -> None:
    assert read(said(0, 2, reason), usage(2)).whole().finish_reason is meant


def test_an_end_that_tells_no_weights_has_no_spans() -> None:
    assert read(said(0, 2, "length"), usage(2)).whole().weight_spans == ()


def changed(event: dict[str, Any], **choice: Any) -> dict[str, Any]:
    event["choices"][0] |= choice
    return event


FAULTS: dict[str, list[dict[str, Any]]] = {
    "fewer log-probs": [changed(said(3, 6), logprobs={"content": said(3, 5)["choices"][0]["logprobs"]["content"]})],
    "no log-probs": [changed(said(3, 6), logprobs=None)],
    "a log-prob that is none": [changed(said(3, 4), logprobs={"content": [{"token": "t", "logprob": -9999.0}]})],
    "a logit": [changed(said(3, 4), logprobs={"content": [{"token": "t", "logprob": 3.5}]})],
    "two choices": [{"choices": [said(3, 4)["choices"][0]] * 2}],
    "an unknown reason": [said(3, 4, "tired")],
    "nothing": [{}],
    "a negative id": [changed(said(3, 4), token_ids=[-1])],
    "no end": [usage(3)],
    "fewer tokens than were made": [said(3, 3, "length"), usage(4)],
    "no count": [said(3, 3, "length")],
    "spans of more": [said(3, 3, "length", spans((0, 4))), usage(3)],
    "spans of fewer": [said(3, 3, "length", spans((0, 2))), usage(3)],
    "spans with a hole": [said(3, 3, "length", spans((0, 1), (2, 3))), usage(3)],
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_keeps_the_tokens_before_it(name: str) -> None:
    with pytest.raises(EngineUnavailableError, match=r"vLLM (gave|sent|ended)") as caught:
        read(said(0, 1), said(1, 3), *FAULTS[name]).whole()
    assert isinstance(caught.value.partial, Generation)
    assert caught.value.partial.finish_reason is FinishReason.ABORT
    assert_first(caught.value.partial, 3)


def test_tokens_after_the_end_are_a_fault() -> None:
    with pytest.raises(EngineUnavailableError, match="after the end") as caught:
        read(said(0, 3, "stop", spans((0, 3))), said(3, 4))
    assert isinstance(caught.value.partial, Generation)
    assert_first(caught.value.partial, 3)


@pytest.mark.parametrize(
    "event", [b"<html>", b"[" * 100_000, b"5", b'{"error": "text"}', b'{"choices": [{"text": 5}]}']
)
async def test_an_event_that_cannot_be_read_is_the_servers_fault(event: bytes) -> None:
    async with vllm_on() as (engine, server):
        server.scripts.append(Script(event=event))
        with pytest.raises(EngineUnavailableError, match="vLLM sent"):
            await engine.generate(request())
        assert len((await engine.generate(request())).token_ids) == 8, "the engine is as well as before"
