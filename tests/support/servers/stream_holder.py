"""A process that opens many event streams on a server, says so, and holds or breaks them off.

python -m tests.support.servers.stream_holder ADDRESS COUNT hold|cancel|leave

A line "again" on its standard input has it do so once more, on the same connections, or on new ones after it has left
those of before; anything else ends it.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any

import grpc.aio

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2_grpc

_STREAMS_OF_A_CHANNEL = 1_000
_AT_ONCE = 100


async def main(address: str, count: int, what: str) -> None:
    channels: list[grpc.aio.Channel] = []
    stubs: list[Any] = []
    room = asyncio.Semaphore(_AT_ONCE)

    async def opened(number: int) -> Any:
        async with room:
            call = stubs[number // _STREAMS_OF_A_CHANNEL].WatchEvents(service.WatchEventsRequest())
            await call.read()
            if what != "hold":
                call.cancel()
                await call.code()
            return call

    while True:
        if not channels:
            channels = [
                grpc.aio.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)])
                for _ in range(-(-count // _STREAMS_OF_A_CHANNEL))
            ]
            stubs = [scheduler_service_pb2_grpc.SchedulerServiceStub(channel) for channel in channels]
        calls = await asyncio.gather(*[opened(number) for number in range(count)])
        if what == "leave":
            await asyncio.gather(*[channel.close() for channel in channels])
            channels = []
        print(len(calls), flush=True)
        if await asyncio.to_thread(sys.stdin.readline) != "again\n":
            break
    for channel in channels:
        await channel.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
