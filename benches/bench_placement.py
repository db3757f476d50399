"""Placement from Python, for pytest-benchmark: the core, a good pool in plain Python, and the straightforward one.

    make bench, or: pytest benches/bench_placement.py --benchmark-only

One iteration acquires a batch of shares of 0.33 on an empty pool of nodes with eight GPUs, and releases it. Before
anything is timed the placements are compared with what the rules say (`expected`).
"""

from __future__ import annotations

import os
from statistics import median
from timeit import timeit
from typing import TYPE_CHECKING

import pytest

from benches.heap_pool import Demand, HeapPool
from py_scheduler.placement import NodeResource, PlacementPool, Resource
from tests.support import reference_pool

if TYPE_CHECKING:
    from collections.abc import Callable

    from pytest_benchmark.fixture import BenchmarkFixture

GPUS, CPU, MEMORY_GB = 8, 96, 384
SHARE, SAMPLE_CPU, SAMPLE_MEMORY_GB = 0.33, 1.0, 4.0
SHARES_OF_A_GPU = 3
MANY = 1_000_000.0
NODES = [16, 64, 256, 1_024, 4_096, 10_000]
BATCHES = [1, 64]
# The straightforward pool needs seconds for one batch on thousands of nodes.
PLAIN_NODES = [int(size) for size in os.environ.get("BENCH_PLAIN_NODES", "16 64 256 1024 10000").split()]

_TURNS = 201
_TURN_SECONDS = 0.002

Placement = tuple[int, int]
"""A node's position and the GPU."""


def expected(nodes: int, batch: int) -> list[Placement]:
    """Equal nodes take turns, and each fills a GPU before it begins another."""
    assert batch <= nodes * GPUS * SHARES_OF_A_GPU
    return [(number % nodes, number // nodes // SHARES_OF_A_GPU) for number in range(batch)]


def core(nodes: int, batch: int) -> Callable[[], None]:
    """Through the lease handle; no token object is made."""
    pool = PlacementPool(
        [
            NodeResource(node_ip=str(number), gpus=list(range(GPUS)), cpu=CPU, memory_gb=MEMORY_GB)
            for number in range(nodes)
        ]
    )
    sample = Resource(gpu=SHARE, cpu=SAMPLE_CPU, memory_gb=SAMPLE_MEMORY_GB)
    budget = Resource(gpu=MANY, cpu=MANY, memory_gb=MANY, concurrency=batch)
    lease = pool.try_acquire_batch(budget, sample, batch)
    assert lease is not None
    assert [(int(token.node_ip), token.gpu_ids[0]) for token in lease.tokens] == expected(nodes, batch)
    lease.release()
    assert pool.free_tokens_for(sample) == nodes * GPUS * SHARES_OF_A_GPU

    def once() -> None:
        pool.try_acquire_batch(budget, sample, batch).release()  # type: ignore[union-attr]

    return once


def heap(nodes: int, batch: int) -> Callable[[], None]:
    pool = HeapPool(nodes, GPUS, CPU * 1_000, MEMORY_GB * 1_024)
    demand = Demand(int(SHARE * 1e6), int(SAMPLE_CPU * 1_000), int(SAMPLE_MEMORY_GB * 1_024))
    for _ in range(3):
        tokens = pool.acquire(demand, batch)
        assert tokens is not None
        assert [(node, gpu_ids[0]) for node, gpu_ids in tokens] == expected(nodes, batch)
        pool.release(demand, tokens)

    def once() -> None:
        pool.release(demand, pool.acquire(demand, batch))  # type: ignore[arg-type]

    return once


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("nodes", NODES)
def test_core(benchmark: BenchmarkFixture, nodes: int, batch: int) -> None:
    _say(benchmark, "core", nodes, batch)
    benchmark(core(nodes, batch))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("nodes", NODES)
def test_heap(benchmark: BenchmarkFixture, nodes: int, batch: int) -> None:
    _say(benchmark, "heap", nodes, batch)
    benchmark(heap(nodes, batch))


@pytest.mark.parametrize("batch", BATCHES)
def test_heap_over_core(benchmark: BenchmarkFixture, batch: int) -> None:
    """Judged as a ratio, so both take turns: what slows the machine for a while meets them alike."""
    contenders = [core(256, batch), heap(256, batch)]
    calls = [_TURN_SECONDS / timeit(once, number=50) * 50 for once in contenders]
    turns = [(once, max(1, round(number))) for once, number in zip(contenders, calls, strict=True)]
    rounds = [[timeit(once, number=number) / number for once, number in turns] for _ in range(_TURNS)]
    _say(benchmark, "heap over core", 256, batch)
    benchmark.extra_info["ratio"] = median(of_heap / of_core for of_core, of_heap in rounds)
    benchmark.pedantic(contenders[0], rounds=1)  # type: ignore[no-untyped-call]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("nodes", PLAIN_NODES)
def test_plain(benchmark: BenchmarkFixture, nodes: int, batch: int) -> None:
    pool = reference_pool.ReferencePool()
    # Not `add`, which looks for a free position each time.
    pool.nodes.extend(
        reference_pool.Node(
            str(number), dict.fromkeys(range(GPUS), reference_pool.MICRO), CPU * 1_000, MEMORY_GB * 1_024
        )
        for number in range(nodes)
    )
    demand = reference_pool.Demand.of(SHARE, SAMPLE_CPU, SAMPLE_MEMORY_GB)
    tokens = pool.acquire(demand, batch)
    assert tokens is not None
    assert [(int(token.node.name), token.gpu_ids[0]) for token in tokens] == expected(nodes, batch)
    for token in tokens:
        pool.release(token)

    def once() -> None:
        for token in pool.acquire(demand, batch) or ():
            pool.release(token)

    _say(benchmark, "plain", nodes, batch)
    benchmark.pedantic(once, rounds=2 if nodes * batch > 20_000 else 5)  # type: ignore[no-untyped-call]


def _say(benchmark: BenchmarkFixture, what: str, nodes: int, batch: int) -> None:
    benchmark.extra_info.update(what=what, nodes=nodes, batch=batch)
