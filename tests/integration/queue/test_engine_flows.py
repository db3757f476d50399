"""Evals and training under one concurrency limit, on the real engine: neither starves the other."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import TaskState
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import GatedAgent, SteppingAgent, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.trainers.leases import acquire_of, gpu_pool, release_of


@pytest.mark.parametrize(("weight", "evals_of_80"), [(1.0, 40), (3.0, 60), (1 / 3, 20)])
@pytest.mark.parametrize("has_pool", [True, False])
async def test_both_progress_as_their_weights_are(weight: float, evals_of_80: int, has_pool: bool) -> None:
    agent = SteppingAgent()
    demands: dict[str, Any] = (
        {"resource": Resource(gpu=1, concurrency=1), "run_resource": Resource(gpu=1)} if has_pool else {}
    )
    limits = EngineSettings(eval_weight=weight, max_running_samples=4)
    async with running_engine(
        spec_of(agent, **demands), pool=gpu_pool(4) if has_pool else None, settings=limits
    ) as harness:
        training = await harness.submit([task_of(f"training {n}") for n in range(300)], 1)
        await harness.until_started(training, 4)
        evals = await harness.submit([task_of(f"eval {n}", is_eval=True) for n in range(300)], "1/gsm8k")
        await agent.end(80)
        counts = Counter(agent.order[4:84])
        assert abs(counts["eval"] - evals_of_80) <= 2
        assert agent.peak == 4
        waiting = (await harness.engine.explain_task(evals.task_ids[-1], "default")).waits[0]
        assert f"evals (weight {weight:g})" in waiting.reason
        assert "training (weight 1)" in waiting.reason


@pytest.mark.parametrize(("weight", "most_evals"), [(0.0, 0), (0.25, 7), (1.0, 20)])
async def test_small_evals_do_not_take_the_room_that_a_large_training_batch_is_owed(
    weight: float, most_evals: int
) -> None:
    agent = SteppingAgent()
    gpu = Resource(gpu=1)
    specs = [
        spec_of(agent, "training", resource=Resource(gpu=4, concurrency=4), run_resource=gpu, batch_size=4),
        spec_of(agent, "eval", resource=gpu, run_resource=gpu, batch_size=1),
    ]
    limits = EngineSettings(eval_weight=weight)
    async with running_engine(*specs, pool=gpu_pool(4), settings=limits) as harness:
        training = await harness.submit([task_of(f"training {n}", "training") for n in range(60)], 1)
        await harness.until_started(training, 4)
        evals = await harness.submit([task_of(f"eval {n}", "eval", is_eval=True) for n in range(60)], "1/eval")
        await agent.end(32)
        counts = Counter(agent.order)
        assert most_evals / 2 <= counts["eval"] <= most_evals
        assert counts["training"] >= 36 - most_evals - 4, "less what is gathered for the next"
        waiting = (await harness.engine.explain_task(evals.task_ids[-1], "default")).waits[0]
        assert "of training (weight 1)" in waiting.reason


async def test_evals_that_want_other_room_do_not_wait_for_a_training_batch() -> None:
    agent = SteppingAgent()
    gpu, cpu = Resource(gpu=1), Resource(cpu=1)
    specs = [
        spec_of(agent, "training", resource=Resource(gpu=4, concurrency=4), run_resource=gpu, batch_size=4),
        spec_of(agent, "eval", resource=cpu, run_resource=cpu, batch_size=1),
    ]
    async with running_engine(*specs, pool=gpu_pool(4), settings=EngineSettings(eval_weight=0.0)) as harness:
        training = await harness.submit([task_of(f"training {n}", "training") for n in range(8)], 1)
        await harness.until_started(training, 4)
        evals = await harness.submit([task_of(f"eval {n}", "eval", is_eval=True) for n in range(20)], "1/eval")
        await harness.until_started(evals, 20)
        assert agent.inside == 24


async def test_evals_of_every_step_finish_beside_a_backlog_that_never_ends() -> None:
    agent = SteppingAgent()
    async with running_engine(spec_of(agent), max_running_samples=2) as harness:
        await harness.submit([task_of(f"training {n}") for n in range(200)], 0)
        for step in range(3):
            evals = await harness.submit([task_of(f"eval {n}", is_eval=True) for n in range(8)], f"{step + 5}/eval")
            await agent.end(18)
            view = harness.engine.submission(harness.selector(evals))
            assert (view.open_tasks, view.succeeded_tasks) == (0, 8)
        assert Counter(agent.order)["training"] >= 25


async def test_strict_order_when_nothing_is_shared() -> None:
    agent = SteppingAgent()
    limits = EngineSettings(eval_weight="by_batch_id", max_running_samples=1)
    async with running_engine(spec_of(agent), settings=limits) as harness:
        await harness.submit([task_of("training") for _ in range(4)], 1)
        await harness.submit([task_of("eval", is_eval=True) for _ in range(4)], "1/eval")
        await harness.submit([task_of("training") for _ in range(4)], 2)
        await agent.end(12)
    assert agent.order == ["training"] * 4 + ["eval"] * 4 + ["training"] * 4


async def test_evals_and_training_never_share_a_batch() -> None:
    agent = GatedAgent()
    spec = spec_of(agent, resource=Resource(concurrency=1), batch_size=None)
    async with running_engine(spec, max_running_samples=1) as harness:
        reply = await harness.submit([task_of(f"{n}", is_eval=n % 2 == 1) for n in range(8)])
        await settle()
        assert len(harness.engine.submission(harness.selector(reply)).waiting) == 1
        agent.gate.set()
        assert {done.state for done in (await harness.done(reply)).values()} == {TaskState.SUCCEEDED}
    assert agent.order in (["0", "2", "4", "6", "1", "3", "5", "7"], ["1", "3", "5", "7", "0", "2", "4", "6"])


async def test_what_waits_longer_than_max_wait_seconds_goes_first() -> None:
    clock, agent = FakeClock(), SteppingAgent()
    limits = EngineSettings(max_running_samples=1, max_wait_seconds=600.0)
    async with running_engine(spec_of(agent), clock=clock, settings=limits) as harness:
        await harness.submit([task_of("first")], 1)
        await harness.submit([task_of("labelled")], "whenever")
        for step in range(2, 5):
            await harness.submit([task_of("step")], step)
        await agent.end(1)
        await clock.advance(601)
        await harness.submit([task_of("step")], 5)
        await agent.end(2)
    assert agent.order[:3] == ["first", "step", "labelled"]


async def test_a_lease_request_keeps_its_place_beside_evals() -> None:
    agent = SteppingAgent()
    gpu = Resource(gpu=1)
    spec = spec_of(agent, resource=Resource(gpu=1, concurrency=1), run_resource=gpu)
    limits = EngineSettings(max_bypass=8)
    async with running_engine(spec, pool=gpu_pool(2), clock=FakeClock(), settings=limits) as harness:
        leases = harness.engine.leases
        await harness.submit([task_of("training") for _ in range(20)], 5)
        await harness.submit([task_of("eval", is_eval=True) for _ in range(20)], 5)
        await settle()
        pending = asyncio.create_task(leases.acquire(acquire_of("pair", 2, batch_id=1, wait=True)))
        await settle()
        assert not pending.done()
        await agent.end(24)
        assert pending.done(), "neither evals nor training may pass it for ever"
        granted = await pending
        assert agent.inside == 0
        leases.release(release_of(granted))
        await settle()
        assert agent.inside == 2
