"""What the room holds for an entry without taking what a waiting head could use."""

from __future__ import annotations

import pytest

from py_scheduler.domain.leases import PlacementDemand
from py_scheduler.domain.quotas import Quota
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.placement import Lease, PlacementPool
from py_scheduler.scheduler.queue.entries import ReadyLease
from py_scheduler.scheduler.queue.quotas import Quotas
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from py_scheduler.scheduler.queue.rivalry import Rivalry
from py_scheduler.scheduler.queue.room import Room


def make_pool() -> PlacementPool:
    """Node a, the freest, is in zone a; b and c, of 2 GPUs each, in no zone; d drains."""
    pool = PlacementPool(
        [
            NodeResource(node_ip="a", gpus=list(range(8)), cpu=64, memory_gb=64, labels={"zone": "a"}),
            *(NodeResource(node_ip=name, gpus=[0, 1], cpu=64, memory_gb=64) for name in ("b", "c", "d")),
        ]
    )
    pool.drain_node("d")
    return pool


def entry_of(per_sample: Resource, tokens: int) -> ReadyLease:
    return ReadyLease(
        flow=("default", False),
        order=(0.0, 0, 0, 0),
        shape=(per_sample, tokens),
        per_sample=per_sample,
        tokens=tokens,
        cost=tokens,
        queued_at=0.0,
        budget=Resource(gpu=100, cpu=100, memory_gb=100, concurrency=100),
        grant=lambda lease: None,
    )


def nodes_of(lease: Lease | None) -> list[str]:
    assert lease is not None
    return [token.node_ip for token in lease.tokens]


IN_ZONE = Resource(gpu=8, required_labels={"zone": "a"})


def test_an_entry_is_placed_on_nodes_that_no_head_could_use() -> None:
    pool = make_pool()
    room, head, entry = Room(pool), entry_of(IN_ZONE, 1), entry_of(Resource(gpu=1), 3)
    held = pool.try_acquire_apart(Resource(gpu=1), 1, [])
    assert held is not None
    assert not Rivalry(room).has_to_take_from(entry, [head])
    lease = room.take(entry, 0.0)
    assert nodes_of(lease) == ["b", "c", "b"], "the pool by itself would have taken a, which has 7 GPUs left"
    held.release()
    assert pool.free_tokens_for(IN_ZONE) == 1


def test_what_fits_nowhere_else_is_not_let_in() -> None:
    pool = make_pool()
    rivalry, head = Rivalry(Room(pool)), entry_of(IN_ZONE, 1)
    held = pool.try_acquire_apart(Resource(gpu=1), 1, [])
    assert held is not None
    assert rivalry.has_to_take_from(entry_of(Resource(gpu=1), 5), [head]), "4 fit on b and c, and d drains"
    assert rivalry.has_to_take_from(entry_of(Resource(gpu=1), 1), [head, entry_of(Resource(gpu=1), 12)]), (
        "it could use all"
    )
    assert pool.free_tokens_for(Resource(gpu=1)) == 11, "nothing is held"


def test_what_does_not_fit_is_refused_and_not_held_back() -> None:
    pool = make_pool()
    for room in (Room(pool), Room(pool, quotas=Quotas({"default": Quota(max_running_samples=16)}))):
        rivalry, head = Rivalry(room), entry_of(Resource(gpu=1), 16)
        assert rivalry.has_to_take_from(entry_of(Resource(gpu=2), 6), [head]), "it fits, and leaves too little"
        assert not rivalry.has_to_take_from(entry_of(Resource(gpu=2), 7), [head]), "12 GPUs are free"
        assert pool.free_tokens_for(Resource(gpu=1)) == 12, "nothing is held"


def queue_behind_a_head(*wants: tuple[Resource, int]) -> tuple[ReadyQueue, Lease]:
    """Of 12 GPUs one is out, and a head wants all of them; behind it wait these, in a namespace of their own."""
    pool = make_pool()
    queue = ReadyQueue(Rivalry(Room(pool)), max_bypass=0)
    held = pool.try_acquire_apart(Resource(gpu=1), 1, [])
    assert held is not None
    for per_sample, tokens in ((Resource(gpu=1), 12), *wants):
        demand = PlacementDemand(per_sample=per_sample, max_tokens=tokens)
        queue.push_lease((0.0, 0), demand, tokens, lambda _: None, 0.0, "default")
    while (entry := queue.offer(0.0)) is not None:
        assert queue.admit(entry, 0.0) is None
        queue.refuse(entry)
    return queue, held


def test_what_was_refused_behind_a_head_is_not_asked_again_until_something_comes_back() -> None:
    queue, _held = queue_behind_a_head((Resource(gpu=2), 6), (Resource(gpu=2), 5))
    blocked = {(entry.per_sample.gpu, entry.tokens): queue.is_blocked(entry) for entry in queue.entries()}
    assert blocked == {(1, 12): True, (2, 6): True, (2, 5): False}, "5 pairs are free, and held back"


def test_what_is_known_of_a_demand_goes_with_its_last_request_though_nothing_came_back() -> None:
    queue, _held = queue_behind_a_head((Resource(gpu=1, cpu=1), 1))
    assert queue.rivalry.known_short
    for entry in list(queue.entries()):
        assert isinstance(entry, ReadyLease)
        queue.remove(entry, 0.0)
    assert not queue.rivalry.known_short


def test_a_head_that_loses_nothing_does_not_keep_its_nodes_too() -> None:
    """On node a, in a zone, GPUs are short; the licences of both nodes are taken, and CPUs are plenty."""
    nodes = [
        NodeResource(
            node_ip=name, gpus=list(range(4)), cpu=64, memory_gb=64, named={"licence": 1}, labels={"zone": name}
        )
        for name in ("a", "b")
    ]
    pool = PlacementPool(nodes)
    held = [
        pool.try_acquire_apart(Resource(gpu=1, required_labels={"zone": "a"}), 1, []),
        pool.try_acquire_apart(Resource(named={"licence": 1}), 2, []),
    ]
    assert None not in held
    in_zone = entry_of(Resource(gpu=4, required_labels={"zone": "a"}), 1)
    licensed = entry_of(Resource(cpu=1, named={"licence": 1}), 1)
    entry = entry_of(Resource(gpu=1, cpu=1), 3)
    for heads in ([in_zone, licensed], [licensed, in_zone]):
        room = Room(pool)
        assert not Rivalry(room).has_to_take_from(entry, heads)
        lease = room.take(entry, 0.0)
        assert nodes_of(lease) == ["b", "b", "b"]
        assert isinstance(lease, Lease)
        lease.release()


@pytest.mark.parametrize("others", [0, 31, 32, 100])
@pytest.mark.parametrize("what", ["capped", "of no node"])
def test_heads_that_are_in_nobody_s_way_leave_the_protected_places_to_others(what: str, others: int) -> None:
    pool = make_pool()
    room = Room(pool, quotas=Quotas({"capped": Quota(max_running_samples=200)}))
    queue = ReadyQueue(Rivalry(room), max_bypass=3)
    held = pool.try_acquire_apart(Resource(gpu=1), 1, [])
    assert held is not None

    def push(per_sample: Resource, tokens: int, step: float, namespace: str = "default") -> None:
        demand = PlacementDemand(per_sample=per_sample, max_tokens=tokens)
        queue.push_lease((step, 0), demand, tokens, lambda _: None, 0.0, namespace)

    if what == "capped":
        push(Resource(cpu=0.01), 200, 0, "capped")
        entry = queue.offer(0.0)
        assert entry is not None
        assert queue.admit(entry, 0.0) is not None
    for number in range(others):
        if what == "capped":
            push(Resource(cpu=1 + number / 1_000), 1, 1, "capped")
        else:
            push(Resource(gpu=1, cpu=65 + number), 1, 1)
    push(IN_ZONE, 1, 2)
    for _ in range(20):
        push(Resource(gpu=1, required_labels={"zone": "a"}), 1, 3)
    admitted = 0
    while (entry := queue.offer(0.0)) is not None:
        if queue.admit(entry, 0.0) is None:
            queue.refuse(entry)
        else:
            admitted += 1
    assert admitted == 3, "so many may overtake the head that wants all of zone a"
