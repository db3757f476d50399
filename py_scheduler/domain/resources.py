"""Supply and demand of placement: what a node has, what a sample or a batch holds.

Floats are what people write; the placement core turns them into integers in one place (micro-GPU, milli-cores, MiB).
Source: seed 1, section 3 (resource descriptors).
"""

from __future__ import annotations

from typing import Protocol

import msgspec


class Resource(msgspec.Struct, frozen=True, kw_only=True, gc=False, forbid_unknown_fields=True):
    """A demand of one sample, or the budget of one batch.

    gpu: GPUs; below 1 a share of one GPU, from 1 on a whole number of entirely free GPUs of one node.
    cpu: cores. memory_gb: GiB. concurrency: running samples; 1 for a demand, a ceiling in a budget.
    """

    gpu: float = 0.0
    cpu: float = 0.0
    memory_gb: float = 0.0
    concurrency: int = 1

    def field_max(self, other: Resource) -> Resource:
        """The least resource that covers both, field by field."""
        return Resource(
            gpu=max(self.gpu, other.gpu),
            cpu=max(self.cpu, other.cpu),
            memory_gb=max(self.memory_gb, other.memory_gb),
            concurrency=max(self.concurrency, other.concurrency),
        )


class NodeResource(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The supply of one node: its address, the ids of its GPUs, cores and GiB of memory."""

    node_ip: str
    gpus: list[int]
    cpu: float
    memory_gb: float


class PlacementToken(Protocol):
    """Room for one running sample on one node, held until released."""

    @property
    def node_ip(self) -> str: ...

    @property
    def gpu_ids(self) -> list[int]: ...

    def release(self) -> None:
        """Gives the room back. Raises LeaseError the second time."""
        ...
