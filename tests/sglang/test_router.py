"""sglang-router in front of two real servers: it forwards generations, and everything else goes to the servers."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import aiohttp
import pytest

from py_scheduler.domain.generation import FinishReason, OnWeightUpdate, PauseMode, SamplingParams
from py_scheduler.domain.results import Outcome
from tests.sglang.asking import (
    FIRST_VERSION,
    PROMPT,
    TRAINED_VERSION,
    VOCAB_SIZE,
    RealSglang,
    assert_exact,
    request,
)
from tests.sglang.conftest import TRAINED_MODEL
from tests.sglang.fleets import TalkingAgent
from tests.sglang.proxy import Connection, Proxy
from tests.sglang.routers import OUR_FLAGS, engine_behind, router_for
from tests.sglang.training import training

if TYPE_CHECKING:
    from collections.abc import AsyncIterator
    from pathlib import Path

    from tests.sglang.asking import Reference

SLOW_SECONDS = 0.05
SAMPLES, TOKENS = 4, 60
HEALTH_CHECKS_SECONDS = 6.0
"""In which the router finds a worker unhealthy that does not answer its checks."""
GENERATE, ABORT = "/generate", "/abort_request"


@pytest.fixture
async def router(pair: list[RealSglang], tmp_path: Path) -> AsyncIterator[str]:
    async with router_for(*(real.base_url for real in pair), log=tmp_path / "router.log") as base_url:
        yield base_url


async def test_generations_go_through_the_router_and_control_to_the_workers(
    pair: list[RealSglang], router: str, reference: Reference
) -> None:
    """One test for all of it, since a router takes seconds to start."""
    await generates_plain_and_streamed(pair, router, reference)
    await aborts_at_the_workers(pair, router)
    await pauses_and_updates_the_workers(pair, router, reference)


async def generates_plain_and_streamed(pair: list[RealSglang], router: str, reference: Reference) -> None:
    whole = reference.continuation(PROMPT, 24)
    body = {"input_ids": PROMPT, "sampling_params": {"temperature": 0.0, "max_new_tokens": 24}}
    async with aiohttp.ClientSession() as session, session.post(f"{router}{GENERATE}", json=body) as response:
        assert (await response.json())["output_ids"] == whole
    async with engine_behind(router, *(real.base_url for real in pair)) as engine:
        assert (await engine.model_info()).vocab_size == VOCAB_SIZE
        said = [request(f"r{n}", max_new_tokens=24, temperature=0.0, ignore_eos=False) for n in range(8)]
        assert [g.token_ids for g in await asyncio.gather(*map(engine.generate, said))] == [whole] * 8
        assert await engine.ask_requests() == 0


async def aborts_at_the_workers(pair: list[RealSglang], router: str) -> None:
    for real in pair:
        await real.slow_down(SLOW_SECONDS)
    async with engine_behind(router, *(real.base_url for real in pair)) as engine:
        tasks = [asyncio.create_task(engine.generate(request(f"r{n}", max_new_tokens=4000))) for n in range(8)]
        for real in pair:
            await real.until_running(4, tokens=len(PROMPT) + 4 * 4)
        await asyncio.gather(*(engine.abort(f"r{n}") for n in range(6)))
        for task in tasks[:6]:
            generation = await task
            assert generation.finish_reason is FinishReason.ABORT
            assert generation.token_ids
        for task in tasks[6:]:
            task.cancel()
        await asyncio.wait(tasks)
        for real in pair:
            await real.until_idle(2.0)


async def pauses_and_updates_the_workers(pair: list[RealSglang], router: str, reference: Reference) -> None:
    """For longer than the router needs to find a worker unhealthy that does not answer its checks."""
    agent, sampling = TalkingAgent(2, TOKENS), SamplingParams(ignore_eos=True)
    async with (
        engine_behind(router, *(real.base_url for real in pair)) as engine,
        training(engine, agent, sampling, OnWeightUpdate.RESUME) as here,
    ):
        rollout = asyncio.create_task(here.samples(2 * SAMPLES))
        for real in pair:
            await real.until_running(SAMPLES, tokens=len(PROMPT) + SAMPLES * 10)
        async with here.trainer.paused(PauseMode.RETRACT):
            await here.trainer.update_weights(str(TRAINED_MODEL), TRAINED_VERSION)
            assert [await real.weight_version() for real in pair] == [TRAINED_VERSION] * 2
            done, _ = await asyncio.wait([rollout], timeout=HEALTH_CHECKS_SECONDS)
            assert not done
        samples = await rollout
    for sample in samples:
        assert sample.outcome is Outcome.SOLVED, sample.error
        spans = [span.version for span in sample.trajectory.weight_spans]
        assert list(dict.fromkeys(spans)) == [FIRST_VERSION, TRAINED_VERSION]
        assert sample.trajectory.generated_tokens == 2 * TOKENS
        assert_exact(sample, reference, 1.0)


@pytest.mark.parametrize("flags", [OUR_FLAGS, OUR_FLAGS[1:]], ids=["as we ask for it", "with its own retries"])
async def test_a_worker_that_is_lost_before_it_answers_gives_no_token_twice(
    pair: list[RealSglang], tmp_path: Path, reference: Reference, flags: tuple[str, ...]
) -> None:
    """The worker hears nothing of the loss. Who tries again, router or client, gets one whole answer."""
    first, second = pair
    for real in pair:
        await real.slow_down(1.0)
    async with (
        Proxy(first.base_url) as one,
        Proxy(second.base_url) as two,
        router_for(one.base_url, two.base_url, log=tmp_path / "router.log", flags=flags) as router,
        engine_behind(router, one.base_url, two.base_url) as engine,
    ):
        proxies = (one, two)
        for proxy in proxies:
            proxy.requests.clear()
            proxy.on_request(GENERATE, Connection.stall)
        task = asyncio.create_task(engine.generate(request(max_new_tokens=24, temperature=0.0, ignore_eos=False)))
        lost = await first_to_get(proxies, GENERATE)
        for proxy in proxies:
            proxy.on_request(GENERATE, None)
        await lost.until(lambda: any(connection.is_broken for connection in lost.connections))
        for connection in lost.connections:
            if connection.is_broken:
                connection.cut()
        await asyncio.wait_for(first_to_get([p for p in proxies if p is not lost], GENERATE), 30)
        for real in pair:
            await real.slow_down(None)
        assert (await task).token_ids == reference.continuation(PROMPT, 24)
        if flags == OUR_FLAGS:
            # It was aborted where it had been lost, and only then tried again.
            assert lost.requests[:2] == [GENERATE, ABORT]


async def first_to_get(proxies: list[Proxy] | tuple[Proxy, ...], path: str) -> Proxy:
    waits = {asyncio.create_task(proxy.until(lambda proxy=proxy: path in proxy.requests)): proxy for proxy in proxies}  # type: ignore[misc]
    done, late = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in late:
        wait.cancel()
    return waits[done.pop()]
