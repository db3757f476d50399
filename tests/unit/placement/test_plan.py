"""What fits a cluster: hand-made cases, and every number against the pool that a server would have."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.errors import InvalidArgumentError
from py_scheduler.placement import NodeResource, PlacementPool, Resource
from py_scheduler.planning import BatchNeed, plan_spec, sample_packing

HUGE = 1_000_000.0


def node(name: str, gpus: int = 2, cpu: float = 64, memory_gb: float = 64) -> NodeResource:
    return NodeResource(node_ip=name, gpus=list(range(gpus)), cpu=cpu, memory_gb=memory_gb)


def need(budget: dict[str, Any], max_batch_samples: int | None = None, **per_sample: Any) -> BatchNeed:
    return BatchNeed(
        evaluator_id="math",
        budget=Resource(**{"gpu": HUGE, "cpu": HUGE, "memory_gb": HUGE, **budget}),
        per_sample=Resource(**per_sample),
        max_batch_samples=max_batch_samples,
    )


def test_the_numbers_of_a_third_of_a_gpu() -> None:
    # Two nodes of two GPUs hold 12 thirds; a batch of 5 fits twice; another node brings 6 more, and so a third batch.
    plan = plan_spec([node("a"), node("b")], need({"concurrency": 5}, gpu=0.33, cpu=1))
    assert (plan.tokens_needed, plan.tokens_possible, plan.batches_at_once) == (5, 12, 2)
    assert (plan.bounds_batch, plan.limits, plan.problem) == (("budget concurrency",), (("gpu", 2),), "")
    assert plan.one_more_node is not None
    assert (plan.one_more_node.like, plan.one_more_node.tokens, plan.one_more_node.batches) == ("a", 6, 1)


@pytest.mark.parametrize(
    ("nodes", "per_sample", "possible", "limits"),
    [
        # 40 % stay free on each of four GPUs, which is 1.6 GPUs in all.
        ([node("a", gpus=4)], {"gpu": 0.6}, 4, [("fragmentation", 1)]),
        ([node("a", gpus=8, cpu=3)], {"gpu": 0.5, "cpu": 1.0}, 3, [("cpu", 1)]),
        ([node("a", gpus=8, memory_gb=10)], {"gpu": 0.5, "memory_gb": 4.0}, 2, [("memory", 1)]),
        ([node("a", gpus=3), node("b", gpus=1)], {"gpu": 2.0}, 1, [("gpu", 2)]),
        ([node("a", cpu=2), node("b", cpu=64)], {"gpu": 0.5, "cpu": 1.0}, 6, [("gpu", 1), ("cpu", 1)]),
        ([node("a", gpus=0, cpu=7)], {"cpu": 2.0}, 3, [("cpu", 1)]),
    ],
)
def test_what_limits_the_cluster(
    nodes: list[NodeResource], per_sample: dict[str, float], possible: int, limits: list[tuple[str, int]]
) -> None:
    plan = plan_spec(nodes, need({}, 1, **per_sample))
    assert (plan.tokens_possible, plan.batches_at_once) == (possible, possible)
    assert list(plan.limits) == limits


@pytest.mark.parametrize(
    ("budget", "max_batch_samples", "needed", "bounds"),
    [
        ({"concurrency": 3}, None, 3, ("budget concurrency",)),
        ({"concurrency": 9, "gpu": 1.0}, None, 2, ("budget gpu",)),
        ({"concurrency": 9, "cpu": 4.0, "memory_gb": 8.0}, None, 4, ("budget cpu", "budget memory_gb")),
        ({"concurrency": 9}, 2, 2, ("batch size",)),
    ],
)
def test_what_bounds_the_largest_batch(
    budget: dict[str, Any], max_batch_samples: int | None, needed: int, bounds: tuple[str, ...]
) -> None:
    plan = plan_spec([node("a", gpus=8)], need(budget, max_batch_samples, gpu=0.5, cpu=1, memory_gb=2))
    assert (plan.tokens_needed, plan.bounds_batch) == (needed, bounds)


def test_a_batch_that_never_fits_says_how_many_nodes_would_do() -> None:
    nodes = [node("a"), node("b", gpus=1)]
    demand = need({"concurrency": 20}, gpu=0.5, cpu=1)
    plan = plan_spec(nodes, demand)
    assert (plan.tokens_needed, plan.tokens_possible, plan.batches_at_once) == (20, 6, 0)
    assert "'math' needs 20 tokens" in plan.problem
    assert plan.problem.endswith("4 more nodes like a would do")
    # Those four do, and three don't.
    assert plan_spec([*nodes, *(node(f"n{n}") for n in range(4))], demand).problem == ""
    assert plan_spec([*nodes, *(node(f"n{n}") for n in range(3))], demand).problem


def test_a_sample_that_no_node_takes() -> None:
    plan = plan_spec([node("a"), node("b")], need({"concurrency": 2}, gpu=3.0))
    assert (plan.tokens_possible, plan.limits) == (0, (("gpu", 2),))
    assert "lower what a sample holds" in plan.problem
    assert "would do" not in plan.problem


def test_a_budget_that_holds_no_sample() -> None:
    plan = plan_spec([node("a")], need({"gpu": 0.1}, gpu=0.5))
    assert (plan.tokens_needed, plan.limits, plan.one_more_node) == (None, (("budget", 0),), None)
    assert "its gpu is 0.1" in plan.problem


def test_the_servers_limit_over_all_batches() -> None:
    plan = plan_spec([node("a", gpus=8)], need({"concurrency": 4}, gpu=0.25), max_running_samples=10)
    assert (plan.batches_at_once, plan.limits) == (2, (("max_running_samples", 0),))
    assert plan.one_more_node is not None
    assert (plan.one_more_node.tokens, plan.one_more_node.batches) == (32, 0)
    packing = sample_packing([node("a", gpus=8)], need({"concurrency": 4}, gpu=0.25), max_running_samples=10)
    assert [usage.tokens for usage in packing] == [8]
    nothing = plan_spec([node("a")], need({"concurrency": 4}))
    assert (nothing.tokens_possible, nothing.batches_at_once, nothing.limits) == (None, None, ())


def test_a_faulty_layout_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="given twice"):
        plan_spec([node("a"), node("a")], need({}, 1, gpu=1))


NODES = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 12), st.integers(0, 40)), min_size=1, max_size=4)
GPU = st.sampled_from([0.0, 0.05, 0.18, 0.25, 1 / 3, 0.5, 0.6, 1.0, 2.0])


@given(NODES, GPU, st.integers(0, 5), st.integers(0, 9), st.integers(1, 30))
@settings(max_examples=150, deadline=None)
def test_the_pool_agrees(
    nodes: list[tuple[int, int, int]], gpu: float, cpu: int, memory: int, concurrency: int
) -> None:
    """Batches are really acquired, until one more is refused; and the packing is what the pool then shows."""
    if not (gpu or cpu or memory):
        return
    supply = [node(f"n{number}", *amounts) for number, amounts in enumerate(nodes)]
    demand = need({"concurrency": concurrency}, gpu=gpu, cpu=cpu, memory_gb=memory)
    plan = plan_spec(supply, demand)
    pool = PlacementPool(supply)
    leases = []
    while (lease := pool.try_acquire_batch(demand.budget, demand.per_sample, concurrency)) is not None:
        leases.append(lease)
    assert plan.tokens_needed == concurrency
    assert plan.batches_at_once == len(leases)
    assert bool(plan.problem) == (not leases)
    left = pool.free_tokens_for(demand.per_sample)
    assert plan.tokens_possible == len(leases) * concurrency + left
    shown = [(usage.node_ip, usage.gpu_free, usage.cpu_free, usage.tokens) for usage in pool.nodes()]
    packing = sample_packing(supply, demand)
    assert [(usage.node_ip, usage.gpu_free, usage.cpu_free, usage.tokens) for usage in packing] == shown
