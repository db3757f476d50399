"""A good placement pool in plain Python: what somebody would write who minds the cost of a scan.

One heap holds the nodes by the free amounts that they had when they were pushed. An entry counts only while its node
still has them; the others are dropped when they come up, or all at once when they are most of the heap. So a token
costs one sift. Nodes that do not fit are set aside until the acquire is over.

The placements are those of the core: integers, the node with the most free GPU (ties: CPU, memory, position), on it
the GPU with the least free share that fits. No draining, no adding of nodes: this is for comparing costs.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import NamedTuple

MICRO = 1_000_000
_CPU_BITS = _MEMORY_BITS = 32
_POSITION_BITS = 20
_POSITION = (1 << _POSITION_BITS) - 1


class Demand(NamedTuple):
    """What one token takes: micro-GPU, milli-cores, MiB."""

    gpu: int
    cpu: int
    memory: int


class _Node:
    """Free amounts; the free GPU in all stands in its key alone."""

    __slots__ = ("cpu", "memory", "slots")

    def __init__(self, gpus: int, cpu: int, memory: int) -> None:
        self.slots = [MICRO] * gpus
        self.cpu = cpu
        self.memory = memory

    def choose(self, demand: Demand) -> list[int] | None:
        """The GPUs that a token would get; None when it does not fit."""
        gpu, cpu, memory = demand
        if cpu > self.cpu or memory > self.memory:
            return None
        slots = self.slots
        if 0 < gpu < MICRO:
            fitting = [free for free in slots if free >= gpu]
            return [slots.index(min(fitting))] if fitting else None
        count = gpu // MICRO
        whole = [slot for slot, free in enumerate(slots) if free == MICRO][:count]
        return whole if len(whole) == count else None


Token = tuple[int, list[int]]
"""Room for one sample: the node's position and the ids of its GPUs."""


class HeapPool:
    """Nodes that are all alike: `gpus`, milli-cores and MiB of each."""

    def __init__(self, nodes: int, gpus: int, cpu: int, memory: int) -> None:
        self._nodes = [_Node(gpus, cpu, memory) for _ in range(nodes)]
        empty = _step(Demand(gpus * MICRO, cpu, memory))
        self._keys = [position - empty for position in range(nodes)]
        """What each node is sorted by: the freest first, then by position. One number, so that comparing is fast."""
        self._heap = list(self._keys)
        self._most = 4 * nodes + 64

    def acquire(self, demand: Demand, count: int) -> list[Token] | None:
        """That many tokens, or None and nothing changed."""
        heap, keys, nodes = self._heap, self._keys, self._nodes
        share, step = min(demand.gpu, MICRO), _step(demand)
        tokens: list[Token] = []
        aside: list[int] = []
        while heap and len(tokens) < count:
            key = heap[0]
            position = key & _POSITION
            if keys[position] != key:
                heappop(heap)
                continue
            node = nodes[position]
            gpu_ids = node.choose(demand)
            if gpu_ids is None:
                aside.append(heappop(heap))
                continue
            for slot in gpu_ids:
                node.slots[slot] -= share
            node.cpu -= demand.cpu
            node.memory -= demand.memory
            keys[position] = key + step
            heapreplace(heap, key + step)
            tokens.append((position, gpu_ids))
        for key in aside:
            heappush(heap, key)
        if len(tokens) == count:
            return tokens
        self.release(demand, tokens)
        return None

    def release(self, demand: Demand, tokens: list[Token]) -> None:
        """Gives back tokens that `acquire` gave out for this demand."""
        heap, keys, nodes = self._heap, self._keys, self._nodes
        share, step = min(demand.gpu, MICRO), _step(demand)
        for position, gpu_ids in tokens:
            node = nodes[position]
            for slot in gpu_ids:
                node.slots[slot] += share
            node.cpu += demand.cpu
            node.memory += demand.memory
            keys[position] -= step
        for position in {position for position, _ in tokens}:
            heappush(heap, keys[position])
        if len(heap) > self._most:
            heap[:] = keys
            heapify(heap)


def _step(demand: Demand) -> int:
    """How much a node's key rises with a token of this demand; positions keep the low bits."""
    gpu, cpu, memory = demand
    return ((((gpu << _CPU_BITS) + cpu) << _MEMORY_BITS) + memory) << _POSITION_BITS
