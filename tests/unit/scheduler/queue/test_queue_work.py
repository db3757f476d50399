"""One turn of the loop does no more work for many nodes, or for many shapes, than it must. Counted in bytecodes and in
calls of the pool, which a busy machine does not change.
"""

from __future__ import annotations

import sys
from collections import Counter
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
ASKED_OF_EVERY_NODE = {"nodes", "explain", "emptied"}
"""What the pool does node by node. It does it in Rust, where no bytecode is counted."""


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


class CountingPool:
    """A pool that counts how often each thing was asked of it."""

    def __init__(self, pool: PlacementPool) -> None:
        self.pool = pool
        self.asked: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        self.asked[name] += 1
        return getattr(self.pool, name)


def room_of(nodes: int) -> tuple[Room, CountingPool]:
    pool = CountingPool(pool_of(nodes))
    room = Room(pool)  # type: ignore[arg-type]
    pool.asked.clear()
    return room, pool


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


def work_behind_a_labelled_head(nodes: int) -> tuple[int, Counter[str]]:
    """Of 20 shapes that must leave a node to a head, and take each a GPU elsewhere."""
    room, pool = room_of(nodes)
    queue = ReadyQueue(Rivalry(room), max_bypass=0)
    in_use = pool.pool.try_acquire_apart(GPU, 1, [])
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
    return work, pool.asked


def test_leaving_nodes_to_a_head_takes_no_more_work_on_many_nodes() -> None:
    (few, asked), (many, asked_of_many) = work_behind_a_labelled_head(10), work_behind_a_labelled_head(400)
    assert many <= 1.05 * few
    assert asked_of_many == asked
    assert asked.keys().isdisjoint(ASKED_OF_EVERY_NODE)


class HeldBack:
    """A head that waits for a whole node, of which one GPU is out, keeps it from leases of as many demands. Behind them
    waits what needs a CPU alone, if it is told to.
    """

    def __init__(self, leases: int) -> None:
        self.room, self.pool = room_of(1)
        self.queue = ReadyQueue(Rivalry(self.room), max_bypass=0)
        self.in_use = self.pool.pool.try_acquire_apart(GPU, 1, [])
        push(self.queue, Resource(gpu=8))
        for lease in range(leases):
            push(self.queue, Resource(gpu=1, cpu=1 + lease / 1_000))
        self.let_nobody_in()
        self.queue.unblock()

    def let_nobody_in(self) -> None:
        assert admit_all(self.queue) == 0

    def work(self) -> tuple[int, int]:
        """Of an offer, in bytecodes and calls of the pool, when everything may be tried again."""
        self.pool.asked.clear()
        bytes_run = bytecodes(self.let_nobody_in)
        self.queue.unblock()
        assert self.pool.asked.keys().isdisjoint(ASKED_OF_EVERY_NODE)
        return bytes_run, self.pool.asked.total()


def test_whoever_is_held_back_is_compared_with_one_head_that_keeps_the_room_and_not_with_all() -> None:
    few, asked_of_few = HeldBack(100).work()
    many, asked_of_many = HeldBack(300).work()
    assert (many - few) / 200 <= 800
    assert (asked_of_many - asked_of_few) / 200 <= 5


def work_of_looking_again(leases: int) -> int:
    held_back = HeldBack(leases)
    queue = held_back.queue
    queue.look_again()

    def look_and_let_nobody_in() -> None:
        looked_at = 0
        while (entry := queue.offer(0.0)) is not None:
            if entry.looked_at != queue.generation:
                queue.was_looked_at(entry)
                looked_at += 1
            else:
                assert queue.admit(entry, 0.0) is None
                queue.refuse(entry)
        assert looked_at == leases + 1

    return bytecodes(look_and_let_nobody_in)


def test_to_look_at_every_head_again_takes_as_much_work_as_there_are_heads() -> None:
    assert work_of_looking_again(200) <= 2.2 * work_of_looking_again(100)


def test_an_offer_looks_at_so_many_heads_and_the_next_one_goes_on_behind_them() -> None:
    held_back = HeldBack(200)
    queue = held_back.queue
    refused = queue.offer(0.0, 10)
    assert refused is not None
    assert queue.admit(refused, 0.0) is None
    queue.refuse(refused)
    push(queue, Resource(cpu=1))
    offers = 0
    while (entry := queue.offer(0.0, 10)) is None:
        assert queue.is_half_way
        offers += 1
    assert entry.per_sample == Resource(cpu=1)
    assert offers == 201 // 10
    assert queue.admit(entry, 0.0) is not None
    while queue.offer(0.0, 10) is None and queue.is_half_way:
        pass
    assert not queue.is_half_way, "that is all"


def test_what_stands_at_the_end_is_tried_however_often_the_line_begins_anew() -> None:
    held_back = HeldBack(200)
    queue = held_back.queue
    refused = queue.offer(0.0)
    assert refused is not None
    assert queue.admit(refused, 0.0) is None
    queue.refuse(refused)
    push(queue, Resource(cpu=1))
    offers = 0
    while (entry := queue.offer(0.0, 10)) is None:
        offers += 1
        assert offers <= 6, "10 + 20 + 40 + 80 + 160 + 320"
        push(queue, Resource(gpu=1, cpu=2 + offers / 1_000))
    assert entry.per_sample == Resource(cpu=1)


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


def stranded(count: int) -> list[StrandedToken]:
    return [StrandedToken("default", GPU, "n1", (gpu,)) for gpu in range(count)]


def work_of_a_stranding(nodes: int) -> int:
    room, pool = room_of(nodes)
    queue = ReadyQueue(Rivalry(room), max_bypass=0)
    push(queue, Resource(gpu=8))
    (entry,) = queue.entries()
    entry.tokens = nodes

    def fits_beside(count: int) -> bool:
        room.strand(stranded(count))
        return room.fits_ever(entry)

    assert not fits_beside(1)
    assert pool.asked["emptied"] == 1
    work = bytecodes(lambda: fits_beside(2))
    assert [fits_beside(count) for count in (8, 3, 0, 1)] == [False, False, True, False]
    assert pool.asked["emptied"] == 1
    pool.drain_node("n0")
    entry.tokens = nodes - 2
    assert fits_beside(1)
    assert pool.asked["emptied"] == 2, "there are other nodes"
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
