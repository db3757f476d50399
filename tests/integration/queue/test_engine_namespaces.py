"""Several trainers on one service, on the real engine: weights, unlike demands, quotas and what is told of them."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from py_scheduler.domain.quotas import NamespaceSettings, Quota
from py_scheduler.domain.requests import SubmissionSelector
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.errors import ResourceExhaustedError, UnplaceableError
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock, settle
from tests.support.handlers import SteppingAgent, spec_of
from tests.support.harness import running_engine, task_of
from tests.support.trainers.leases import acquire_of, gpu_pool

WEIGHTED = {"a": NamespaceSettings(weight=3.0), "b": NamespaceSettings()}


@pytest.mark.parametrize("has_pool", [True, False])
async def test_three_to_one_in_samples_and_in_what_is_held(has_pool: bool) -> None:
    """Two trainers with endless backlogs; the first has three quarters of the room at any time."""
    agent, clock = SteppingAgent(), FakeClock()
    demands: dict[str, Any] = (
        {"resource": Resource(gpu=1, concurrency=1), "run_resource": Resource(gpu=1)} if has_pool else {}
    )
    limits = EngineSettings(max_running_samples=8)
    pool = gpu_pool(8) if has_pool else None
    async with running_engine(
        spec_of(agent, **demands), pool=pool, settings=limits, clock=clock, namespaces=WEIGHTED
    ) as harness:
        for namespace in ("b", "a"):
            await harness.submit([task_of(f"{namespace} {n}") for n in range(400)], 1, namespace=namespace)
        held: Counter[str] = Counter()
        for _ in range(160):
            await clock.advance(0.125)
            await agent.end(1)
            held.update(agent.inside_of)
        counts = Counter(agent.order)
    assert counts["a"] / counts.total() == pytest.approx(0.75, abs=0.05)
    assert held["a"] / held.total() == pytest.approx(0.75, abs=0.05)
    assert agent.peak == 8


async def test_a_trainer_that_comes_late_does_not_wait_for_the_backlog_of_another() -> None:
    agent, clock = SteppingAgent(), FakeClock()
    async with running_engine(spec_of(agent), max_running_samples=4, clock=clock) as harness:
        await harness.submit([task_of(f"old {n}") for n in range(500)], 0, namespace="old")
        await agent.end(40)
        late = await harness.submit([task_of(f"late {n}") for n in range(20)], 9, namespace="late")
        for _ in range(48):
            await clock.advance(0.25)
            await agent.end(1)
        selector = SubmissionSelector(submission_id=late.submission_id, namespace="late")
        view = harness.engine.submission(selector)
        assert view.open_tasks <= 2


async def test_unlike_demands_share_by_the_kind_that_each_wants_most_of() -> None:
    """One node of 8 GPUs and 64 cores. `a` wants GPUs; `b` cores, of which each sample takes as much of all there are
    as one of `a` does of the GPUs; both would fill the places to run in.
    """
    agent, clock = SteppingAgent(), FakeClock()
    gpus, cores = Resource(gpu=1, cpu=1), Resource(cpu=8)
    specs = [
        spec_of(agent, "gpus", resource=gpus, run_resource=gpus),
        spec_of(agent, "cores", resource=cores, run_resource=cores),
    ]
    pool = PlacementPool([NodeResource(node_ip="n", gpus=list(range(8)), cpu=64, memory_gb=64)])
    async with running_engine(*specs, pool=pool, settings=EngineSettings(), clock=clock) as harness:
        for namespace, task_type in (("a", "gpus"), ("b", "cores")):
            tasks = [task_of(f"{namespace} {n}", task_type) for n in range(200)]
            await harness.submit(tasks, 1, namespace=namespace)
        for _ in range(100):
            await clock.advance(0.1)
            await agent.end(1)
        counts = Counter(agent.order)
        assert counts["a"] == pytest.approx(counts["b"], abs=10)
        assert counts["b"] > 45


async def test_room_that_comes_later_counts_as_room() -> None:
    """A node of cores alone, to which one with GPUs is added: from then on GPUs are something that can be shared."""
    agent, clock = SteppingAgent(), FakeClock()
    gpus, cores = Resource(gpu=1, cpu=1), Resource(cpu=8)
    specs = [
        spec_of(agent, "gpus", resource=gpus, run_resource=gpus),
        spec_of(agent, "cores", resource=cores, run_resource=cores),
    ]
    pool = PlacementPool([NodeResource(node_ip="n", gpus=[], cpu=64, memory_gb=64)])
    settings = EngineSettings(has_fixed_nodes=False)
    async with running_engine(*specs, pool=pool, settings=settings, clock=clock) as harness:
        pool.add_node(NodeResource(node_ip="m", gpus=list(range(8)), cpu=64, memory_gb=64))
        harness.engine.nodes_have_changed()
        for namespace, task_type in (("a", "gpus"), ("b", "cores")):
            tasks = [task_of(f"{namespace} {n}", task_type) for n in range(200)]
            await harness.submit(tasks, 1, namespace=namespace)
        await settle()
        shares = harness.engine._admission.room.shares
        held = {name: account.held for name, account in shares._accounts.items()}
        assert held["a"] == pytest.approx(1.0), "all GPUs"
        assert held["b"] == pytest.approx(1.0, abs=0.13), "all cores but those that the others hold"
        pool.remove_node("m")
        harness.engine.nodes_have_changed()
        pool.remove_node("n")
        assert harness.engine.can_lease is False, "no node takes anything new"
        pool.resume_node("n")
        assert shares._accounts["b"].held == pytest.approx(held["b"] * 2, abs=0.01), "of half of the cores"


async def test_evals_are_weighed_inside_their_namespace() -> None:
    """Evals of one trainer take of its own training, and not of another trainer."""
    agent, clock = SteppingAgent(), FakeClock()
    limits = EngineSettings(max_running_samples=4, eval_weight=1.0)
    async with running_engine(spec_of(agent), settings=limits, clock=clock) as harness:
        await harness.submit([task_of(f"train-a {n}") for n in range(200)], 1, namespace="a")
        await harness.submit([task_of(f"eval-a {n}", is_eval=True) for n in range(200)], "1/e", namespace="a")
        await harness.submit([task_of(f"train-b {n}") for n in range(200)], 1, namespace="b")
        for _ in range(120):
            await clock.advance(0.25)
            await agent.end(1)
        counts = Counter(agent.order)
    assert counts["train-b"] == pytest.approx(60, abs=6)
    assert counts["train-a"] == pytest.approx(counts["eval-a"], abs=6)


async def test_a_quota_of_running_samples_holds_and_is_told_of() -> None:
    agent, clock = SteppingAgent(), FakeClock()
    limits, namespaces = EngineSettings(max_running_samples=8), {"a": NamespaceSettings(max_running_samples=2)}
    async with running_engine(spec_of(agent), settings=limits, clock=clock, namespaces=namespaces) as harness:
        first = await harness.submit([task_of(f"a {n}") for n in range(10)], 1, namespace="a")
        await harness.submit([task_of(f"b {n}") for n in range(30)], 1, namespace="b")
        await settle()
        assert Counter(agent.order) == {"a": 2, "b": 6}
        reason = (await harness.engine.explain_task(first.task_ids[-1], "a")).waits[0].reason
        assert "the quota of namespace 'a' is max_running_samples = 2, and 2 are running" in reason
        harness.engine.limit_namespaces({"*": Quota(max_running_samples=1)})
        await agent.end(8)
        assert agent.inside == 2, "the strictest that is said holds, for everybody"
        harness.engine.limit_namespaces({})
        await settle()
        assert agent.inside == 8


async def test_a_quota_of_open_tasks_refuses_with_the_time_to_come_back() -> None:
    agent = SteppingAgent()
    namespaces = {"a": NamespaceSettings(max_queued_tasks=3)}
    async with running_engine(spec_of(agent), namespaces=namespaces) as harness:
        await harness.submit([task_of("a") for _ in range(2)], 1, namespace="a")
        with pytest.raises(ResourceExhaustedError, match=r"namespace 'a'.*max_queued_tasks") as caught:
            await harness.submit([task_of("a") for _ in range(2)], 1, namespace="a")
        assert caught.value.retry_after_seconds
        await harness.submit([task_of("b") for _ in range(20)], 1, namespace="b")
        await agent.end(30)
        await harness.submit([task_of("a") for _ in range(3)], 2, namespace="a")
        await agent.end(3)


async def test_leases_count_against_the_quota_and_one_beyond_it_is_refused() -> None:
    namespaces = {"a": NamespaceSettings(max_running_samples=2)}
    agent = SteppingAgent()
    async with running_engine(spec_of(agent), pool=gpu_pool(8), namespaces=namespaces) as harness:
        with pytest.raises(UnplaceableError, match="quota of namespace 'a'"):
            await harness.engine.leases.acquire(acquire_of("large", 3, namespace="a"))
        held = await harness.engine.leases.acquire(acquire_of("all", 2, namespace="a"))
        assert len(held.tokens) == 2
        await harness.submit([task_of("a")], 1, namespace="a")
        await settle()
        assert not agent.order
