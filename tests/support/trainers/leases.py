"""Short ways to ask for leases."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.leases import (
    AcquireRequest,
    LeaseTerms,
    LeaseView,
    PlacementDemand,
    ReleaseRequest,
    RenewRequest,
)
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.task import BatchId
from py_scheduler.placement import PlacementPool
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.fake_clock import FakeClock
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import running_engine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.scheduler.leases.manager import LeaseManager

GPU = Resource(gpu=1)
TTL = 30.0


def gpu_pool(*gpus_of_nodes: int) -> PlacementPool:
    """Nodes of that many GPUs, with room for anything else."""
    return PlacementPool(
        [
            NodeResource(node_ip=f"10.0.0.{number}", gpus=list(range(gpus)), cpu=1_000, memory_gb=1_000)
            for number, gpus in enumerate(gpus_of_nodes)
        ]
    )


def acquire_of(
    request_id: str,
    tokens: int = 1,
    *,
    batch_id: BatchId = 0,
    per_sample: Resource = GPU,
    budget: Resource | None = None,
    ttl_seconds: float = TTL,
    **how: Any,
) -> AcquireRequest:
    demand = PlacementDemand(per_sample=per_sample, max_tokens=tokens, budget=budget)
    return AcquireRequest(
        request_id=request_id, terms=LeaseTerms(batch_id=batch_id, demand=demand, ttl_seconds=ttl_seconds), **how
    )


def release_of(lease: LeaseView, *token_nos: int, request_id: str = "release") -> ReleaseRequest:
    return ReleaseRequest(
        request_id=request_id, lease_id=lease.lease_id, fencing_token=lease.fencing_token, token_nos=token_nos
    )


def renew_of(lease: LeaseView, fencing_token: int | None = None) -> RenewRequest:
    return RenewRequest(
        lease_id=lease.lease_id, fencing_token=lease.fencing_token if fencing_token is None else fencing_token
    )


class ManagedPool(msgspec.Struct):
    """The lease manager of an engine on a clock that stands still, and what is around it."""

    leases: LeaseManager
    pool: PlacementPool
    clock: FakeClock
    engine: Any

    @property
    def free(self) -> int:
        return self.pool.free_tokens_for(GPU)


@asynccontextmanager
async def manager_of(*gpus: int, **settings: Any) -> AsyncIterator[ManagedPool]:
    pool, clock = gpu_pool(*gpus), FakeClock()
    async with running_engine(
        spec_of(SolvingAgent()), pool=pool, clock=clock, settings=EngineSettings(**settings)
    ) as harness:
        yield ManagedPool(harness.engine.leases, pool, clock, harness.engine)
    assert clock.live_timers == 0
