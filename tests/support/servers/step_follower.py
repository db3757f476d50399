"""A client in a process of its own: follows step 0, and says after each frame what it has seen and where it stands."""

from __future__ import annotations

import asyncio
import sys

import msgspec

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.requests import WatchedFrame
from py_scheduler.domain.training.steps import StepKind, StepRequest


async def main(address: str) -> None:
    request = StepRequest(kind=StepKind.ROLLOUT, rollout_id=0, request_id="a")
    async with SchedulerClient(address) as client:
        async for frame in client.step_frames(request):
            if isinstance(frame, WatchedFrame):
                told = {"sequences": [record.sequence for record in frame.records], "cursor": frame.cursor.hex()}
                print(msgspec.json.encode(told).decode(), flush=True)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
