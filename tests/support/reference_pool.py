"""A placement pool that is obviously right: integers, whole scans, no index. The oracle of the property tests.

It follows the written rules word by word and shares no code with the core, the conversion of amounts included.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection

MICRO = 1_000_000


@dataclass(frozen=True)
class Demand:
    """What one token takes: micro-GPU, milli-cores, MiB, named amounts; and the labels that its node must have."""

    gpu: int
    cpu: int
    memory: int
    named: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        gpu: float,
        cpu: float,
        memory_gb: float,
        named: dict[str, int] | None = None,
        labels: dict[str, str] | None = None,
    ) -> Demand:
        return cls(_floor(gpu * 1e6), _floor(cpu * 1000), _floor(memory_gb * 1024), named or {}, labels or {})


def _floor(value: float) -> int:
    return math.floor(value + 1e-6)


@dataclass
class Node:
    """Free amounts of one node; `gpus` maps an id to its free micro-GPU."""

    name: str
    gpus: dict[int, int]
    cpu: int
    memory: int
    named: dict[str, int] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    takes_tokens: bool = True
    leaves_when_empty: bool = False
    tokens: int = 0
    supply: Node | None = None
    """The same node, empty."""

    def could_hold(self, demand: Demand) -> bool:
        """Whether it takes tokens and would hold one if it were empty."""
        return self.takes_tokens and self.supply is not None and self.supply.choose_gpus(demand) is not None

    def choose_gpus(self, demand: Demand) -> list[int] | None:
        """The GPUs that a token would get here; None when it does not fit."""
        if demand.cpu > self.cpu or demand.memory > self.memory:
            return None
        if any(amount > self.named.get(name, 0) for name, amount in demand.named.items()):
            return None
        if any(self.labels.get(key) != value for key, value in demand.labels.items()):
            return None
        if demand.gpu == 0:
            return []
        if demand.gpu < MICRO:
            fitting = [(free, gpu) for gpu, free in self.gpus.items() if free >= demand.gpu]
            return [min(fitting)[1]] if fitting else None
        entirely_free = sorted(gpu for gpu, free in self.gpus.items() if free == MICRO)
        count = demand.gpu // MICRO
        return entirely_free[:count] if len(entirely_free) >= count else None

    def change(self, demand: Demand, gpu_ids: list[int], sign: int) -> None:
        for gpu in gpu_ids:
            self.gpus[gpu] += sign * min(demand.gpu, MICRO)
        self.cpu += sign * demand.cpu
        self.memory += sign * demand.memory
        for name, amount in demand.named.items():
            self.named[name] += sign * amount
        self.tokens -= sign


@dataclass
class Token:
    node: Node
    gpu_ids: list[int]
    demand: Demand


@dataclass
class ReferencePool:
    """Positions of removed nodes stay as None and are taken by the next nodes added, the lowest first."""

    nodes: list[Node | None] = field(default_factory=list)

    def add(
        self,
        name: str,
        gpus: list[int],
        cpu: float,
        memory_gb: float,
        named: dict[str, int] | None = None,
        labels: dict[str, str] | None = None,
    ) -> None:
        free = dict(named or {})
        node = Node(
            name, dict.fromkeys(gpus, MICRO), _floor(cpu * 1000), _floor(memory_gb * 1024), free, dict(labels or {})
        )
        node.supply = copy.deepcopy(node)
        if None in self.nodes:
            self.nodes[self.nodes.index(None)] = node
        else:
            self.nodes.append(node)

    def find(self, name: str) -> Node:
        return next(node for node in self.present() if node.name == name)

    def present(self) -> list[Node]:
        return [node for node in self.nodes if node is not None]

    def drain(self, name: str) -> None:
        node = self.find(name)
        node.takes_tokens = node.leaves_when_empty = False

    def resume(self, name: str) -> None:
        node = self.find(name)
        node.takes_tokens, node.leaves_when_empty = True, False

    def remove(self, name: str) -> bool:
        node = self.find(name)
        node.takes_tokens, node.leaves_when_empty = False, True
        self._drop_the_left()
        return node not in self.nodes

    def acquire(self, demand: Demand, count: int) -> list[Token] | None:
        tokens: list[Token] = []
        for _ in range(count):
            token = self._place(demand)
            if token is None:
                for placed in tokens:
                    self.release(placed)
                return None
            tokens.append(token)
        return tokens

    def acquire_on(self, demand: Demand, count: int, names: Collection[str]) -> list[Token] | None:
        """As a pool would that has lost all the other nodes."""
        alone = ReferencePool([node if node is not None and node.name in names else None for node in self.nodes])
        return alone.acquire(demand, count)

    def release(self, token: Token) -> None:
        token.node.change(token.demand, token.gpu_ids, +1)
        self._drop_the_left()

    def free_tokens(self, demand: Demand) -> int:
        """How many can be placed one after another from the state now."""
        tokens: list[Token] = []
        while (token := self._place(demand)) is not None:
            tokens.append(token)
        for token in tokens:
            token.node.change(demand, token.gpu_ids, +1)
        return len(tokens)

    def _place(self, demand: Demand) -> Token | None:
        best: tuple[tuple[int, int, int], Node, list[int]] | None = None
        for node in self.present():
            gpu_ids = node.choose_gpus(demand) if node.takes_tokens else None
            if gpu_ids is None:
                continue
            rank = (sum(node.gpus.values()), node.cpu, node.memory)
            if best is None or rank > best[0]:
                best = (rank, node, gpu_ids)
        if best is None:
            return None
        _, node, gpu_ids = best
        node.change(demand, gpu_ids, -1)
        return Token(node, gpu_ids, demand)

    def _drop_the_left(self) -> None:
        for position, node in enumerate(self.nodes):
            if node is not None and node.leaves_when_empty and node.tokens == 0:
                self.nodes[position] = None
