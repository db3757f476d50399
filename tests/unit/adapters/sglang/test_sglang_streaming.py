"""How tokens come from a server: in increments, in events that repeat the output, or in one plain answer."""

from __future__ import annotations

import asyncio
import logging

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.adapters.sglang.streaming import Streaming, silence_of, stream_interval
from py_scheduler.domain.generation import FinishReason, Generation, WeightSpan
from py_scheduler.errors import ContextOverflowError, EngineRejectedError, EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ScriptedSglang, ids
from tests.support.models.served_backends import QUICK, engine_on, request
from tests.support.models.sglang_events import assert_first, event

ONCE = RetrySettings(attempts=1, base_seconds=0.001, max_seconds=0.001)


# -- cut anywhere


@st.composite
def cut_streams(draw: st.DrawFn) -> tuple[list[bytes], int, int, bool]:
    """Pieces of a stream, how many tokens its whole events have, of how many, and whether it came to its end."""
    increments = draw(st.booleans())
    sizes = draw(st.lists(st.integers(0, 9), min_size=1, max_size=6).filter(lambda sizes: sizes[0] > 0))
    ends = [sum(sizes[: number + 1]) for number in range(len(sizes))]
    finish = {"type": "length", "length": ends[-1]}
    versions = sorted(draw(st.lists(st.sampled_from("12"), min_size=len(sizes), max_size=len(sizes))))
    events = [
        event(end - size if increments else 0, end, version=version, finish_reason=finish if end is ends[-1] else None)
        for size, end, version in zip(sizes, ends, versions, strict=True)
    ]
    framed = [b"data: " + each + b"\n\n" for each in [*events, b"[DONE]"]]
    stream = b"".join(framed)
    cut = draw(st.integers(1, len(stream)))
    borders = sorted(draw(st.lists(st.integers(1, cut), max_size=5)))
    pieces = [stream[start:end] for start, end in zip([0, *borders], [*borders, cut], strict=True) if start < end]
    whole = stream[:cut].count(b"\n\n")
    return pieces, ends[min(whole, len(ends)) - 1] if whole else 0, ends[-1], whole == len(framed)


def test_wherever_a_stream_is_cut_no_token_is_lost_had_twice_or_without_its_log_prob() -> None:
    async def begin() -> tuple[ScriptedSglang, SglangBackend]:
        server = await ScriptedSglang().__aenter__()
        engine = SglangBackend(server.base_url, settings=replace(QUICK, retry=ONCE))
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


# -- what an event can be

FAULTS = {
    "a gap": event(4, 6),
    "an overlap": event(2, 6),
    "fewer than before": event(0, 2),
    "no json": b"<html>",
    "other log-probs": event(3, 6).replace(b"104,null", b"999,null").replace(b"103,null", b"999,null"),
}


@pytest.mark.parametrize("name", FAULTS)
async def test_what_does_not_fit_is_the_servers_fault_and_keeps_what_came_before(name: str) -> None:
    async with engine_on() as (engine, server):
        events = [event(0, 1), event(1, 3), FAULTS[name], event(6, 8, finish_reason={"type": "length"})]
        server.scripts.append(Script(pieces=[b"data: " + each + b"\n\n" for each in [*events, b"[DONE]"]]))
        with pytest.raises(EngineUnavailableError, match=r"SGLang (gave|sent)") as caught:
            await engine.generate(request())
        assert isinstance(caught.value.partial, Generation)
        assert caught.value.partial.token_ids == ids(3)
        assert len(caught.value.partial.log_probs) == 3
        await server.until(lambda: server.aborts == server.rids)


# -- what is asked for


def test_the_number_of_cumulative_events_does_not_grow_with_the_output() -> None:
    settings = SglangSettings()
    for tokens, interval in ((1, 64), (64, 64), (512, 64), (1_024, 128), (32_768, 4_096), (32_769, 4_097)):
        assert stream_interval(Streaming.CUMULATIVE, tokens, settings) == interval
        assert stream_interval(Streaming.INCREMENTS, tokens, settings) == 64
    assert stream_interval(Streaming.INCREMENTS, 512, replace(settings, stream_interval=None)) is None
    assert stream_interval(Streaming.CUMULATIVE, 512, replace(settings, stream_interval=None)) == 64


def test_the_fewer_events_there_are_the_longer_may_a_server_be_silent() -> None:
    settings = SglangSettings()
    streamed = {"stream": True, "sampling_params": {"max_new_tokens": 32_768, "stream_interval": 4_096}}
    assert silence_of(streamed, settings) == (600.0, 120.0 + 409.6)
    last = {"stream": True, "sampling_params": {"max_new_tokens": 10, "stream_interval": 16}}
    assert silence_of(last, settings) == (600.0, 121.0)
    plain = {"stream": False, "sampling_params": {"max_new_tokens": 32_768}}
    assert silence_of(plain, settings).first_seconds == 600.0 + 3_276.8


@pytest.mark.parametrize(
    ("said", "increments", "asked"),
    [
        ("auto", True, "increments"),
        ("auto", False, "cumulative"),
        ("cumulative", True, "cumulative"),
        ("increments", False, "increments"),
        ("plain", True, "plain"),
    ],
)
async def test_the_adapter_chooses_unless_it_is_told_and_says_so(
    said: str, increments: bool, asked: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "py_scheduler.adapters.sglang")
    async with ScriptedSglang(streams_increments=increments) as server:
        engine = SglangBackend(server.base_url, settings=msgspec.convert({"streaming": said}, SglangSettings))
        await engine.start()
        assert (await engine.model_info()).streaming == asked
        generations = [await engine.generate(request(f"r{n}", max_new_tokens=600)) for n in range(2)]
        assert (await engine.model_info()).streaming == asked
        await engine.close()
    assert [each.token_ids for each in generations] == [ids(600)] * 2
    assert caplog.text.count("is asked for") == 1
    asked_for = [(body["stream"], body["sampling_params"].get("stream_interval")) for body in server.bodies]
    expected = {"increments": (True, 64), "cumulative": (True, 75), "plain": (False, None)}[asked]
    assert asked_for == [expected] * 2


@pytest.mark.parametrize("increments", [True, False])
async def test_a_server_that_comes_back_with_other_flags_is_followed(increments: bool) -> None:
    async with ScriptedSglang(streams_increments=increments) as server:
        engine = SglangBackend(server.base_url, settings=replace(QUICK, stream_interval=16))
        await engine.start()
        await engine.generate(request("before", max_new_tokens=600))
        server.streams_increments = not increments
        for rid in ("after", "then"):
            assert (await engine.generate(request(rid, max_new_tokens=600))).token_ids == ids(600)
        assert (await engine.model_info()).streaming == ("cumulative" if increments else "increments")
        await engine.close()
    intervals = [body["sampling_params"]["stream_interval"] for body in server.bodies]
    assert intervals == ([16, 16, 75] if increments else [75, 75, 16])


async def test_what_a_server_says_of_itself_loses_no_token_where_it_is_wrong() -> None:
    for increments in (True, False):
        async with ScriptedSglang(streams_increments=increments, tells_increments=False) as server:
            engine = SglangBackend(server.base_url, settings=QUICK)
            await engine.start()
            assert (await engine.generate(request())).token_ids == ids(8)
            await engine.close()


async def test_a_fleet_tells_of_all_its_ways() -> None:
    async with ScriptedSglang(streams_increments=True) as first, ScriptedSglang() as second:
        fleet = SglangFleet([first.base_url, second.base_url], settings=QUICK)
        await fleet.start()
        assert (await fleet.model_info()).streaming == "cumulative and increments"
        generations = await asyncio.gather(*(fleet.generate(request(f"r{n}")) for n in range(4)))
        assert [each.token_ids for each in generations] == [ids(8)] * 4
        assert first.bodies
        assert second.bodies
        await fleet.close()


async def test_an_abort_of_one_that_was_taken_back_keeps_all_its_tokens() -> None:
    for increments in (True, False):
        async with engine_on(abort_grace_seconds=20.0) as (engine, server):
            server.streams_increments = increments
            server.scripts.append(Script(stall_after=5, is_taken_back=True))
            task = asyncio.create_task(engine.generate(request()))
            await server.until(lambda: server.streamed == 5)
            await engine.abort("r")
            generation = await task
            assert (generation.token_ids, generation.text) == (ids(5), "t0t1t2t3t4")
            assert generation.log_probs == [-i / 128 for i in range(5)]


# -- plain


async def test_a_plain_generation_comes_back_whole() -> None:
    async with engine_on(streaming="plain") as (engine, server):
        for number in range(3):
            generation = await engine.generate(request(f"r{number}"))
            assert (generation.token_ids, generation.text) == (ids(8), "t0t1t2t3t4t5t6t7")
            assert generation.weight_spans == (WeightSpan("default", 0, 8),)
            assert generation.finish_reason is FinishReason.LENGTH
        assert len(server.connections) == 1
        assert not server.aborts


async def test_an_abort_of_a_plain_generation_keeps_what_the_server_had() -> None:
    async with engine_on(streaming="plain", abort_grace_seconds=20.0) as (engine, server):
        server.scripts.append(Script(stall_after=5))
        task = asyncio.create_task(engine.generate(request(max_new_tokens=500)))
        await server.until(lambda: server.streamed == 5)
        await engine.abort("r")
        generation = await task
        assert (generation.finish_reason, generation.token_ids) == (FinishReason.ABORT, ids(5))
        assert not server.disconnects


async def test_a_plain_generation_whose_abort_is_ignored_is_cut() -> None:
    async with engine_on(streaming="plain") as (engine, server):
        server.scripts.append(Script(stall_after=5, deaf=True))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: server.streamed == 5)
        await engine.abort("r")
        assert (await task).token_ids == []
        await server.until(lambda: server.disconnects == server.rids)


async def test_a_plain_generation_that_is_cancelled_stops_at_the_server() -> None:
    async with engine_on(streaming="plain") as (engine, server):
        server.scripts.append(Script(stall_after=2))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: server.streamed == 2)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await server.until(lambda: not server.running and server.aborts == server.rids)


@pytest.mark.parametrize("script", [Script(disconnect_after=4), Script(stall_after=4, deaf=True)], ids=["cut", "still"])
async def test_a_plain_generation_whose_connection_breaks_is_aborted_and_begun_anew(script: Script) -> None:
    quick = {"first_token_timeout_seconds": 0.1, "least_tokens_per_second": 1000.0}
    async with engine_on(streaming="plain", **quick) as (engine, server):
        server.scripts.append(script)
        assert (await engine.generate(request())).token_ids == ids(8)
        assert server.aborts == server.rids[:1]


async def test_what_refuses_a_plain_generation_is_what_refuses_a_streamed_one() -> None:
    async with engine_on(streaming="plain", context_length=2000) as (engine, server):
        with pytest.raises(ContextOverflowError):
            await engine.generate(request(prompt=400, max_new_tokens=700))
        server.scripts.append(Script(status=400, message="bad temperature"))
        with pytest.raises(EngineRejectedError, match="bad temperature"):
            await engine.generate(request())
        full = {"type": "abort", "message": "The request queue is full.", "status_code": 503}
        server.scripts.append(Script(finish=full))
        assert (await engine.generate(request())).token_ids == ids(8)
