"""Clients of the scheduler service: `SchedulerClient` for asyncio, `BlockingSchedulerClient` for plain loops.

    async with SchedulerClient("127.0.0.1:50051") as client:
        async for event in client.rollout(tasks, batch_id=7):
            ...

Schedulers that live elsewhere lease room of the same pool with `PlacementClient` or `BlockingPlacementClient`:

    async with PlacementClient("127.0.0.1:50051") as client, client.lease(Resource(gpu=0.5), 8) as lease:
        ...

Trainers change the weights between steps with `GenerationClient` or `BlockingGenerationClient`:

    async with GenerationClient("127.0.0.1:50051") as client, client.paused():
        await client.update_weights("/checkpoints/7", "step-7")

Every error is one of the tree under `py_scheduler.SchedulerError`.
"""

from __future__ import annotations

from py_scheduler.client.blocking import (
    BlockingGenerationClient,
    BlockingHeldLease,
    BlockingPlacementClient,
    BlockingSchedulerClient,
)
from py_scheduler.client.channel import ClientTls
from py_scheduler.client.generation import GenerationClient
from py_scheduler.client.held_lease import HeldLease
from py_scheduler.client.placement import PlacementClient
from py_scheduler.client.scheduler import SchedulerClient
from py_scheduler.client.steps import StepEvent
from py_scheduler.client.submissions import RolloutEvent, Submission

__all__ = [
    "BlockingGenerationClient",
    "BlockingHeldLease",
    "BlockingPlacementClient",
    "BlockingSchedulerClient",
    "ClientTls",
    "GenerationClient",
    "HeldLease",
    "PlacementClient",
    "RolloutEvent",
    "SchedulerClient",
    "StepEvent",
    "Submission",
]
