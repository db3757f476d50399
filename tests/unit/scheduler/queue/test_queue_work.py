"""One turn of the loop does no more work for many nodes, or for many shapes, than it must. Counted in bytecodes, which
a busy machine does not change.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.leases import PlacementDemand
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from py_scheduler.scheduler.queue.rivalry import Rivalry
from py_scheduler.scheduler.queue.room import Room, StrandedToken
from tests.support.rooms import OneKindOfRoom

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

GPU = Resource(gpu=1)


def bytecodes(call: Callable[[], object]) -> int:
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def pool_of(nodes: int) -> PlacementPool:
    """Nodes of 8 GPUs, the first of them in a zone."""
    return PlacementPool(
        [
            NodeResource(
                node_ip=f"n{at}", gpus=list(range(8)), cpu=64, memory_gb=64, labels={} if at else {"zone": "a"}
            )
            for at in range(nodes)
        ]
    )


def push(queue: ReadyQueue, per_sample: Resource, queued_at: float = 0.0) -> None:
    demand = PlacementDemand(per_sample=per_sample, max_tokens=1)
    queue.push_lease((0.0, 0), demand, 1, lambda _: None, queued_at, "default")


def admit_all(queue: ReadyQueue, limit: int = 1 << 30) -> int:
    count = 0
    while count < limit and (entry := queue.offer(0.0)) is not None:
        if queue.admit(entry, 0.0) is None:
            queue.refuse(entry)
        else:
            count += 1
    return count


def work_behind_a_labelled_head(nodes: int) -> int:
    """Of 20 shapes that must leave a node to a head, and take each a GPU elsewhere."""
    pool = pool_of(nodes)
    queue = ReadyQueue(Rivalry(Room(pool)), max_bypass=0)
    in_use = pool.try_acquire_apart(GPU, 1, [])
    assert in_use is not None
    push(queue, Resource(gpu=8, required_labels={"zone": "a"}))
    for shape in range(20):
        push(queue, Resource(gpu=1, cpu=1 + shape / 100))
    taken = 0

    def admit() -> None:
        nonlocal taken
        taken = admit_all(queue)

    work = bytecodes(admit)
    assert taken == 20
    return work


def test_leaving_nodes_to_a_head_takes_no_more_work_on_many_nodes() -> None:
    assert work_behind_a_labelled_head(400) <= 1.05 * work_behind_a_labelled_head(10)


def line_of(shapes: int) -> tuple[ReadyQueue, Callable[[], object]]:
    """All of them are overdue. The second one lines them up."""
    queue = ReadyQueue(OneKindOfRoom(), max_bypass=8, max_wait_seconds=1.0)
    for shape in range(shapes):
        push(queue, Resource(cpu=1 + shape), queued_at=shape / 1_000)
    return queue, lambda: list(queue.namespaces["default"].line_up(10.0))


def test_many_shapes_that_are_overdue_are_neither_sorted_nor_compared_with_one_another() -> None:
    (few, line_up_few), (many, line_up_many) = line_of(50), line_of(400)
    assert bytecodes(lambda: many.offer(10.0)) <= bytecodes(lambda: few.offer(10.0)) + 50, "it is the first of them"
    assert bytecodes(line_up_many) <= 8.5 * bytecodes(line_up_few)
    assert line_up_many() == [entry for _, entry in sorted((entry.queued_at, entry) for entry in many.entries())]


class CountingPool:
    """A pool that counts how often another one was made of it."""

    def __init__(self, pool: PlacementPool) -> None:
        self.pool = pool
        self.emptied_times = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pool, name)

    def emptied(self) -> PlacementPool:
        self.emptied_times += 1
        return self.pool.emptied()


def stranded(count: int) -> list[StrandedToken]:
    return [StrandedToken("default", GPU, "n1", (gpu,)) for gpu in range(count)]


def work_of_a_stranding(nodes: int) -> int:
    pool = CountingPool(pool_of(nodes))
    room = Room(pool)  # type: ignore[arg-type]
    queue = ReadyQueue(Rivalry(room), max_bypass=0)
    push(queue, Resource(gpu=8))
    (entry,) = queue.entries()
    entry.tokens = nodes

    def fits_beside(count: int) -> bool:
        room.strand(stranded(count))
        return room.fits_ever(entry)

    assert not fits_beside(1)
    work = bytecodes(lambda: fits_beside(2))
    assert [fits_beside(count) for count in (8, 3, 0, 1)] == [False, False, True, False]
    assert pool.emptied_times == 1
    pool.drain_node("n0")
    entry.tokens = nodes - 2
    assert fits_beside(1)
    assert pool.emptied_times == 2, "there are other nodes"
    return work


def test_a_stranding_takes_as_much_work_as_there_is_stranded_and_not_as_there_are_nodes() -> None:
    assert work_of_a_stranding(400) == work_of_a_stranding(10)


def test_tokens_that_look_the_same_strand_and_come_back_one_by_one() -> None:
    room = Room(pool_of(2))
    queue = ReadyQueue(Rivalry(room), max_bypass=0)
    push(queue, Resource(gpu=1))
    (entry,) = queue.entries()
    share = StrandedToken("default", Resource(gpu=0.5), "n1", (0,))
    entry.tokens = 16
    for tokens, fits in (([share, share], False), ([share], False), ([], True), ([share] * 2, False)):
        room.strand(tokens)
        assert room.fits_ever(entry) == fits
    entry.tokens, entry.per_sample = 31, Resource(gpu=0.5)
    assert not room.fits_ever(entry)
    room.strand([share])
    assert room.fits_ever(entry)
