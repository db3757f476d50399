"""The pool, leases and tokens from Python: semantics at the edges, errors, nodes that come and go."""

from __future__ import annotations

import gc
import subprocess
import sys
from fractions import Fraction
from threading import Thread
from typing import Any, ClassVar

import pytest

from py_scheduler.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    LeaseError,
    NotFoundError,
    UnplaceableError,
)
from py_scheduler.placement import Lease, NodeResource, PlacementPool, Resource, check_deadlock, tokens_in_budget

AMPLE = Resource(gpu=10_000, cpu=1_000_000, memory_gb=1_000_000, concurrency=1_000_000)


def make_pool(nodes: int = 2, gpus: int = 8, cpu: float = 96, memory_gb: float = 384) -> PlacementPool:
    return PlacementPool(
        [
            NodeResource(node_ip=f"10.0.0.{node}", gpus=list(range(gpus)), cpu=cpu, memory_gb=memory_gb)
            for node in range(nodes)
        ]
    )


def acquire(pool: PlacementPool, per_sample: Resource, count: int) -> Lease:
    lease = pool.try_acquire_batch(AMPLE, per_sample, count)
    assert lease is not None
    assert len(lease) == count
    return lease


def test_eighty_samples_of_018_on_two_nodes() -> None:
    pool = make_pool()
    sample = Resource(gpu=0.18)
    with acquire(pool, sample, 80) as lease:
        assert len({(token.node_ip, *token.gpu_ids) for token in lease.tokens}) == 16
        assert pool.free_tokens_for(sample) == 0
        assert pool.try_acquire_batch(AMPLE, sample, 1) is None
    assert pool.free_tokens_for(sample) == 80


@pytest.mark.parametrize("share", [f"1/{n}" for n in range(1, 30)] + ["0.05", "0.18", "0.29", "0.33", "0.01", "0.001"])
def test_as_many_shares_as_there_should_be(share: str) -> None:
    pool = make_pool(nodes=1, gpus=1)
    exact = Fraction(share)
    sample = Resource(gpu=float(exact))
    assert pool.max_tokens_for(sample) == 1 // exact
    acquire(pool, sample, int(1 // exact)).release()


def test_all_or_nothing() -> None:
    pool = make_pool()
    sample = Resource(gpu=0.5)
    held = acquire(pool, sample, 20)
    before = [node.gpu_free for node in pool.nodes()]
    version = pool.release_version
    assert pool.try_acquire_batch(AMPLE, sample, 13) is None
    assert [node.gpu_free for node in pool.nodes()] == before
    assert pool.release_version == version
    held.release()
    assert pool.release_version > version


def test_the_freest_node_and_the_tightest_gpu() -> None:
    pool = make_pool(nodes=2, gpus=2)
    first, second, third = acquire(pool, Resource(gpu=0.4), 3).tokens
    assert [(token.node_ip, token.gpu_ids) for token in (first, second, third)] == [
        ("10.0.0.0", [0]),
        ("10.0.0.1", [0]),
        ("10.0.0.0", [0]),
    ]
    assert acquire(pool, Resource(gpu=1), 1).tokens[0].gpu_ids == [1]


def test_without_gpus_cpu_and_memory_decide() -> None:
    pool = make_pool(nodes=1, gpus=0, cpu=96, memory_gb=320)
    sample = Resource(gpu=0, cpu=4, memory_gb=16)
    assert pool.max_tokens_for(sample) == 20
    lease = acquire(pool, sample, 20)
    assert {token.node_ip for token in lease.tokens} == {"10.0.0.0"}
    assert lease.tokens[0].gpu_ids == []
    assert pool.try_acquire_batch(AMPLE, sample, 1) is None


def test_the_budget_bounds_by_each_field() -> None:
    sample = Resource(gpu=0.33, cpu=4, memory_gb=16)
    assert tokens_in_budget(Resource(gpu=0.99, cpu=96, memory_gb=320, concurrency=64), sample) == 3
    assert tokens_in_budget(Resource(gpu=8, cpu=9, memory_gb=320, concurrency=64), sample) == 2
    assert tokens_in_budget(Resource(gpu=8, cpu=96, memory_gb=320, concurrency=5), sample) == 5
    assert tokens_in_budget(Resource(gpu=0, cpu=96, memory_gb=320, concurrency=64), Resource(cpu=4)) == 24
    lease = make_pool().try_acquire_batch(Resource(gpu=0.99, cpu=96, memory_gb=320, concurrency=64), sample, 100)
    assert lease is not None
    assert len(lease) == 3


def test_a_budget_below_one_sample_is_an_error() -> None:
    with pytest.raises(UnplaceableError, match=r"its cpu is 2, one sample takes 4: raise the budget's cpu"):
        make_pool().try_acquire_batch(Resource(gpu=1, cpu=2, memory_gb=16), Resource(cpu=4, memory_gb=16), 1)


def test_a_sample_that_takes_nothing_is_always_placed() -> None:
    pool = make_pool()
    lease = acquire(pool, Resource(), 5)
    assert {token.node_ip for token in lease.tokens} == {"10.0.0.0"}
    assert pool.nodes()[0].tokens == 5
    lease.release()
    assert pool.nodes()[0].tokens == 0
    assert PlacementPool([]).try_acquire_batch(AMPLE, Resource(), 1) is None


def test_tokens_are_given_back_one_by_one() -> None:
    pool = make_pool()
    sample = Resource(gpu=0.5)
    lease = acquire(pool, sample, 3)
    tokens = lease.tokens
    assert tokens == lease.tokens
    assert len(set(tokens + lease.tokens)) == 3
    tokens[1].release()
    assert (lease.held, pool.free_tokens_for(sample), tokens[1].is_held) == (2, 30, False)
    with pytest.raises(LeaseError, match="token 1 was released already"):
        lease.tokens[1].release()
    lease.release()
    with pytest.raises(LeaseError, match="this lease was released already"):
        lease.release()
    with pytest.raises(LeaseError):
        tokens[0].release()
    assert tokens[0].node_ip == "10.0.0.0"
    assert tokens[0].gpu_ids == [0]
    assert pool.free_tokens_for(sample) == 32


def test_leaving_the_with_block_is_silent() -> None:
    pool = make_pool()
    with acquire(pool, Resource(gpu=1), 2) as lease:
        lease.tokens[0].release()
        lease.release()
    assert pool.free_tokens_for(Resource(gpu=1)) == 16


def test_a_dropped_lease_gives_back_when_its_tokens_are_gone_too() -> None:
    pool = make_pool()
    lease = acquire(pool, Resource(gpu=1), 2)
    token = lease.tokens[0]
    del lease
    gc.collect()
    assert pool.free_tokens_for(Resource(gpu=1)) == 14
    del token
    gc.collect()
    assert pool.free_tokens_for(Resource(gpu=1)) == 16


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"gpu": 1.5}, "gpu"),
        ({"gpu": -0.1}, "gpu"),
        ({"gpu": float("nan")}, "gpu"),
        ({"gpu": 1e-9}, "gpu"),
        ({"gpu": "1"}, "gpu"),
        ({"cpu": float("inf")}, "cpu"),
        ({"cpu": 10**400}, "cpu"),
        ({"memory_gb": 1e300}, "memory_gb"),
        ({"memory_gb": None}, "memory_gb"),
        ({"cpu": 1, "concurrency": -1}, "concurrency"),
        ({"cpu": 1, "concurrency": 0.5}, "concurrency"),
    ],
)
def test_bad_amounts_name_the_field(values: dict[str, Any], field: str) -> None:
    pool = make_pool()
    for call in (pool.max_tokens_for, pool.free_tokens_for, lambda bad: pool.try_acquire_batch(AMPLE, bad, 1)):
        with pytest.raises(InvalidArgumentError) as caught:
            call(Resource(**values))
        assert [violation.field for violation in caught.value.violations] == [f"per_sample.{field}"]


def test_a_budget_names_its_field_and_may_hold_fractions_above_one() -> None:
    pool = make_pool()
    lease = pool.try_acquire_batch(Resource(gpu=1.5, concurrency=9), Resource(gpu=0.5), 9)
    assert lease is not None
    assert len(lease) == 3
    with pytest.raises(InvalidArgumentError, match=r"budget.gpu: -1 must be 0 or more"):
        pool.try_acquire_batch(Resource(gpu=-1), Resource(gpu=0.5), 9)


@pytest.mark.parametrize("count", [0, -1, 1.5, "3", 2**70])
def test_bad_token_counts(count: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_tokens"):
        make_pool().try_acquire_batch(AMPLE, Resource(gpu=1), count)


def test_bad_nodes_are_all_named() -> None:
    nodes = [
        NodeResource(node_ip="a", gpus=[0, 0], cpu=-1, memory_gb=1),
        NodeResource(node_ip="a", gpus=["0"], cpu=1, memory_gb=None),  # type: ignore[list-item, arg-type]
    ]
    with pytest.raises(InvalidArgumentError) as caught:
        PlacementPool(nodes)
    fields = sorted(violation.field for violation in caught.value.violations)
    assert fields == ["nodes[0].cpu", "nodes[0].gpus", "nodes[1].gpus", "nodes[1].memory_gb", "nodes[1].node_ip"]


def test_a_value_that_can_change_is_converted_each_time() -> None:
    class Changing:
        gpu, cpu, memory_gb, concurrency = 0.5, 0.0, 0.0, 1
        named: ClassVar[dict[str, int]] = {}
        required_labels: ClassVar[dict[str, str]] = {}

    changing: Any = Changing()
    pool = make_pool(nodes=1, gpus=1)
    assert pool.max_tokens_for(changing) == 2
    changing.gpu = 0.25
    assert pool.max_tokens_for(changing) == 4
    changing.required_labels["zone"] = "a"
    assert pool.max_tokens_for(changing) == 0


def test_many_shapes_outgrow_the_caches() -> None:
    pool = make_pool(nodes=3)
    samples = [Resource(cpu=cpu) for cpu in range(1, 60)]
    leases = [acquire(pool, sample, 1) for sample in samples[:20]]
    for sample in samples:
        assert pool.free_tokens_for(sample) == sum(int(node.cpu_free // sample.cpu) for node in pool.nodes())
    del leases
    for sample in samples:
        assert pool.free_tokens_for(sample) == pool.max_tokens_for(sample) == 3 * (96 // int(sample.cpu))


def test_draining_resuming_and_removing() -> None:
    pool = make_pool(nodes=2, gpus=2)
    whole = Resource(gpu=1)
    lease = acquire(pool, whole, 2)
    layout = pool.layout_version
    pool.drain_node("10.0.0.0")
    assert (pool.max_tokens_for(whole), pool.free_tokens_for(whole)) == (2, 1)
    assert pool.layout_version > layout
    assert pool.remove_node("10.0.0.0") is False
    assert [node.phase for node in pool.nodes()] == ["leaving", "active"]
    version = pool.release_version
    pool.resume_node("10.0.0.0")
    assert pool.release_version > version
    assert pool.max_tokens_for(whole) == 4
    pool.remove_node("10.0.0.0")
    first, second = lease.tokens
    first.release()
    assert [node.node_ip for node in pool.nodes()] == ["10.0.0.1"]
    assert first.node_ip == "10.0.0.0"
    pool.add_node(NodeResource(node_ip="10.0.0.9", gpus=[4, 5], cpu=1, memory_gb=1))
    assert (first.node_ip, first.gpu_ids) == ("10.0.0.0", [0])
    assert [node.node_ip for node in pool.nodes()] == ["10.0.0.9", "10.0.0.1"]
    assert pool.remove_node("10.0.0.9") is True
    second.release()
    assert pool.free_tokens_for(whole) == pool.max_tokens_for(whole) == 2


def test_node_changes_that_cannot_be() -> None:
    pool = make_pool()
    with pytest.raises(AlreadyExistsError, match=r"10\.0\.0\.1"):
        pool.add_node(NodeResource(node_ip="10.0.0.1", gpus=[], cpu=1, memory_gb=1))
    for call in (pool.drain_node, pool.resume_node, pool.remove_node):
        with pytest.raises(NotFoundError, match="'elsewhere'"):
            call("elsewhere")
    with pytest.raises(InvalidArgumentError, match=r"node\.cpu"):
        pool.add_node(NodeResource(node_ip="new", gpus=[], cpu=-1, memory_gb=1))


def test_nodes_that_others_could_use_are_left_to_them() -> None:
    pool, sample = make_pool(nodes=3, gpus=2), Resource(gpu=1, cpu=2)
    pool.add_node(NodeResource(node_ip="east", gpus=[0, 1], cpu=16, memory_gb=64, labels={"zone": "east"}))
    pool.drain_node("10.0.0.0")
    other = Resource(gpu=1, required_labels={"zone": "east"})
    assert pool.could_hold(other, "east")
    assert not pool.could_hold(other, "10.0.0.1")
    assert pool.could_hold_everywhere(sample)
    assert not pool.could_hold_everywhere(other)
    assert pool.try_acquire_apart(sample, 5, [other]) is None
    lease = pool.try_acquire_apart(sample, 3, iter([other, other]))
    assert lease is not None
    placed = [(token.node_ip, token.gpu_ids) for token in lease.tokens]
    assert placed == [("10.0.0.1", [0]), ("10.0.0.2", [0]), ("10.0.0.1", [1])]
    assert (lease.resource, pool.free_tokens_for(sample)) == (sample, 3)
    assert pool.emptied().free_tokens_for(sample) == 6
    lease.release()
    assert pool.free_tokens_for(sample) == 6
    for count in (0, "3", 2**70):
        with pytest.raises(InvalidArgumentError, match=r"^count: "):
            pool.try_acquire_apart(sample, count, [other])  # type: ignore[arg-type]
    with pytest.raises(AttributeError):
        pool.try_acquire_apart(sample, 1, ["east"])  # type: ignore[list-item]


def test_adopting_what_was_held_before() -> None:
    pool, sample = make_pool(), Resource(gpu=0.5, cpu=1)
    before = acquire(pool, sample, 5)
    restarted = make_pool()
    restarted.drain_node("10.0.0.1")
    lease = restarted.adopt(sample, before.tokens)
    placed = [(token.node_ip, token.gpu_ids) for token in before.tokens]
    assert [(token.node_ip, token.gpu_ids) for token in lease.tokens] == placed
    assert [node.gpu_free for node in restarted.nodes()] == [node.gpu_free for node in pool.nodes()]
    with pytest.raises(FailedPreconditionError, match="placement 1 cannot be adopted: its room is taken"):
        restarted.adopt(sample, [before.tokens[4], before.tokens[0], before.tokens[0]])
    with pytest.raises(FailedPreconditionError, match="has 1 GPUs, its demand takes 0"):
        restarted.adopt(Resource(cpu=1), before.tokens)
    lease.release()
    assert restarted.nodes()[0].cpu_free == 96


def test_explain_names_what_is_short() -> None:
    pool = make_pool(nodes=3, gpus=2, cpu=10)
    held = [acquire(pool, Resource(gpu=0.6), 6), acquire(pool, Resource(cpu=9), 1)]
    pool.drain_node("10.0.0.2")
    explanation = pool.explain(Resource(gpu=0.5, cpu=2), 2)
    assert [(node.node_ip, node.free_tokens, node.max_tokens, node.short) for node in explanation.nodes] == [
        ("10.0.0.0", 0, 4, ["fragmentation", "cpu"]),
        ("10.0.0.1", 0, 4, ["fragmentation"]),
        ("10.0.0.2", 0, 0, ["draining"]),
    ]
    assert (explanation.fits_now, explanation.fits_ever) == (False, True)
    assert explanation.shortages == [("fragmentation", 2), ("cpu", 1), ("draining", 1)]
    assert str(explanation).startswith("2 tokens wanted, 0 fit now, 8 in the empty pool; short of fragmentation on 2")
    held.clear()
    assert pool.explain(Resource(gpu=0.5, cpu=2), 8).fits_now
    assert pool.explain(Resource(gpu=5_000), 1).nodes[0].short == ["gpu"]


def test_the_deadlock_guard() -> None:
    pool = make_pool(nodes=1, gpus=0, cpu=64, memory_gb=512)
    sample, budget = Resource(cpu=4, memory_gb=16), Resource(cpu=96, memory_gb=384, concurrency=64)

    def check(pool: PlacementPool | None, largest: int, budget: Resource = budget) -> int:
        return check_deadlock(pool, evaluator_id="swe", budget=budget, per_sample=sample, max_batch_samples=largest)

    assert check(pool, 16) == 16
    assert check(None, 1_000) == 24
    message = r"'swe' needs 24 tokens .* can give 16 .*: add nodes, lower cpu or memory_gb per sample"
    with pytest.raises(UnplaceableError, match=message):
        check(pool, 1_000)
    with pytest.raises(UnplaceableError, match=r"needs 17 tokens .* can give 16 "):
        check(pool, 17)
    with pytest.raises(UnplaceableError, match="'swe': the budget holds no sample"):
        check(None, 1, Resource(cpu=1))


WAITING_ERROR = """
import threading
import py_scheduler.errors as errors
from py_scheduler.placement import NodeResource, PlacementPool, Resource

pool = PlacementPool([NodeResource(node_ip="a", gpus=[0], cpu=1, memory_gb=1)])
lease = pool.try_acquire_batch(Resource(gpu=1), Resource(gpu=1), 1)
(token,) = lease.tokens
lease.release()
made, made_class = 0, errors.LeaseError


def make(message):
    global made
    other = threading.Thread(target=lambda: (lease.held, token.is_held))
    other.start()
    other.join()
    made += 1
    return made_class(message)


errors.LeaseError = make
for release in (lease.release, token.release):
    try:
        release()
    except made_class:
        pass
assert made == 2
"""


def test_no_lock_is_held_while_an_error_is_made() -> None:
    """In a process of its own: a thread that waits for a lock with the interpreter's own stops all others for ever."""
    subprocess.run([sys.executable, "-c", WAITING_ERROR], check=True, timeout=60)


@pytest.mark.timeout(30)
def test_sixteen_threads_never_overbook() -> None:
    pool, sample = make_pool(nodes=4), Resource(gpu=0.25)
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for round_no in range(300):
                lease = pool.try_acquire_batch(AMPLE, sample, 1 + (seed * 7 + round_no) % 13)
                if lease is not None:
                    tokens = lease.tokens
                    tokens[0].release()
                    lease.release()
        except BaseException as error:  # noqa: BLE001 - carried to the main thread
            failures.append(error)

    threads = [Thread(target=work, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert pool.free_tokens_for(sample) == pool.max_tokens_for(sample) == 128
