"""Clients of the scheduler service: `SchedulerClient` for asyncio, `BlockingSchedulerClient` for plain loops.

    async with SchedulerClient("127.0.0.1:50051") as client:
        async for event in client.rollout(tasks, batch_id=7):
            ...

Every error is one of the tree in `py_scheduler.errors`.
"""

from __future__ import annotations

from py_scheduler.client._aio import SchedulerClient, Submission
from py_scheduler.client._blocking import BlockingSchedulerClient
from py_scheduler.client._rollout import RolloutEvent

__all__ = ["BlockingSchedulerClient", "RolloutEvent", "SchedulerClient", "Submission"]
