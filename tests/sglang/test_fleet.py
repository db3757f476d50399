"""Two real servers behind one engine: one of them is killed and comes back, and many episodes at once."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import pytest

from examples.sglang.serve_cpu import CpuServer
from py_scheduler.adapters._fleet_settings import FleetSettings
from py_scheduler.adapters.sglang_fleet import SglangFleet
from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.generation import FinishReason, SamplingParams
from py_scheduler.domain.results import AgentResult, Outcome, Reward
from tests.sglang.asking import PROMPT, SETTINGS, RealSglang, request
from tests.sglang.conftest import PYTHON, TINY_MODEL
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine, task_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from py_scheduler.domain.evaluator import Episode

MAX_RUNNING = 16
"""At each server, without a limit of what queues there."""
LONG = 300
SLOW_SECONDS = 0.05
EPISODES, TURNS, TURN_TOKENS = 512, 2, 16
COME_BACK_SECONDS = 30.0
FLEET = FleetSettings(load_interval_seconds=0.2, set_aside_base_seconds=0.2, set_aside_max_seconds=1.0)


class TalkingAgent(BaseAgent):
    """Some turns of so many tokens each."""

    def __init__(self, turns: int, turn_tokens: int) -> None:
        self.turns = turns
        self.turn_tokens = turn_tokens

    async def run(self, episode: Episode) -> AgentResult:
        for turn in range(self.turns):
            episode.observe([*PROMPT, 5 + turn])
            await episode.generate(max_new_tokens=self.turn_tokens)
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[CpuServer]]:
    """Two of the tiny model, which start side by side."""
    folder = tmp_path_factory.mktemp("fleet")
    flags = ("--max-running-requests", str(MAX_RUNNING))
    pair = [CpuServer(PYTHON, TINY_MODEL, folder / f"sglang{n}.log", flags=flags) for n in range(2)]
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_until_ready()
        yield pair
    finally:
        for server in pair:
            server.stop()


@pytest.fixture
async def pair(servers: list[CpuServer]) -> AsyncIterator[list[RealSglang]]:
    async with RealSglang(servers[0].base_url) as first, RealSglang(servers[1].base_url) as second:
        yield [first, second]
        for real in (first, second):
            await real.undo()
            await real.until_idle()


@asynccontextmanager
async def fleet_on(pair: list[RealSglang]) -> AsyncIterator[SglangFleet]:
    fleet = SglangFleet([real.base_url for real in pair], settings=SETTINGS, fleet=FLEET)
    await fleet.start()
    try:
        yield fleet
    finally:
        await fleet.close()


@asynccontextmanager
async def rollout(fleet: SglangFleet, agent: BaseAgent) -> AsyncIterator[Harness]:
    spec = spec_of(agent, default_sampling=SamplingParams(ignore_eos=True))
    async with running_engine(spec, generation_engines={"student": fleet}) as harness:
        yield harness


def up(fleet: SglangFleet) -> list[bool]:
    return [endpoint.is_up for endpoint in fleet._endpoints]


async def both_run(pair: list[RealSglang], fleet: SglangFleet, count: int) -> None:
    """So many generations at once reach both servers, half and half."""
    for real in pair:
        await real.slow_down(SLOW_SECONDS)
    tasks = [asyncio.create_task(fleet.generate(request(f"both{n}", max_new_tokens=LONG))) for n in range(count)]
    for real in pair:
        await real.until_running(count // 2)
    for real in pair:
        await real.undo()
    assert [len((await task).token_ids) for task in tasks] == [LONG] * count


async def test_generations_are_aborted_where_they_run(pair: list[RealSglang]) -> None:
    for real in pair:
        await real.slow_down(SLOW_SECONDS)
    async with fleet_on(pair) as fleet:
        tasks = [asyncio.create_task(fleet.generate(request(f"r{n}", max_new_tokens=4000))) for n in range(8)]
        for real in pair:
            await real.until_running(4, tokens=4 * (len(PROMPT) + 4))
        await asyncio.gather(*(fleet.abort(f"r{n}") for n in range(8)))
        for real in pair:
            await real.until_idle(2.0)
        for task in tasks:
            generation = await task
            assert generation.finish_reason is FinishReason.ABORT
            assert generation.token_ids


async def test_paused_is_not_dead(pair: list[RealSglang]) -> None:
    """Its load is told all the same, and what it holds is neither moved nor failed."""
    async with fleet_on(pair) as fleet:
        await pair[0].pause()
        tasks = [asyncio.create_task(fleet.generate(request(f"r{n}"))) for n in range(8)]
        done, held = await asyncio.wait(tasks, timeout=25.0)
        assert 0 < len(done) < 8
        assert [(each.is_up, each.is_silent) for each in fleet._endpoints] == [(True, False)] * 2
        await pair[0].resume()
        assert [len((await task).token_ids) for task in (*done, *held)] == [16] * 8


async def test_512_episodes_at_once(pair: list[RealSglang]) -> None:
    """All of them are at the servers at the same time: nothing on this side holds any back."""
    for real in pair:
        await real.slow_down(1.0)
    async with fleet_on(pair) as fleet, rollout(fleet, TalkingAgent(TURNS, TURN_TOKENS)) as harness:
        reply = await harness.submit([task_of(repeat_times=8) for _ in range(EPISODES // 8)])
        for real in pair:
            half = EPISODES // 2
            await real.until(lambda load, half=half: load["num_running_reqs"] + load["num_waiting_reqs"] == half)  # type: ignore[misc]
        for real in pair:
            await real.undo()
        samples = await harness.samples(reply)
        assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * EPISODES
        assert {sample.trajectory.generated_tokens for sample in samples} == {TURNS * TURN_TOKENS}
        assert up(fleet) == [True, True]
        taken = [endpoint.taken for endpoint in fleet._endpoints]
        assert sum(taken) == EPISODES * TURNS
        assert min(taken) > EPISODES * TURNS // 4


async def test_a_server_that_is_killed_in_mid_run_and_comes_back(
    servers: list[CpuServer], pair: list[RealSglang]
) -> None:
    dying, living = pair
    async with fleet_on(pair) as fleet:
        async with rollout(fleet, TalkingAgent(1, LONG)) as harness:
            for real in pair:
                await real.slow_down(SLOW_SECONDS)
            reply = await harness.submit([task_of(repeat_times=3 * MAX_RUNNING)])
            for real in pair:
                await real.until(lambda load: load["num_waiting_reqs"] == MAX_RUNNING // 2)
            await dying.until_running(MAX_RUNNING, tokens=MAX_RUNNING * (len(PROMPT) + 10))
            servers[0].stop()
            dying.forget()
            await living.undo()
            samples = await harness.samples(reply)
        ended = [sample for sample in samples if sample.outcome is Outcome.INFRA_CONN]
        assert len(ended) == MAX_RUNNING
        for sample in ended:
            assert 0 < sample.trajectory.generated_tokens < LONG
            assert sample.trajectory.turns[-1].finish_reason == "abort"
            assert sample.reward.score == 0.0
        # Those that still queued there had nothing to lose, and moved.
        moved = [sample for sample in samples if sample.outcome is Outcome.SOLVED]
        assert len(moved) == 2 * MAX_RUNNING
        assert {sample.trajectory.generated_tokens for sample in moved} == {LONG}
        assert up(fleet) == [False, True]
        servers[0].start()
        await asyncio.to_thread(servers[0].wait_until_ready)
        async with asyncio.timeout(COME_BACK_SECONDS):
            while not all(up(fleet)):  # noqa: ASYNC110 - it is another process that has to answer
                await asyncio.sleep(0.05)
        await both_run(pair, fleet, 8)
