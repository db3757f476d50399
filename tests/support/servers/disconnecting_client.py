"""A client of its own process, to be killed: it submits, watches, says so and reads on.

python -m tests.support.servers.disconnecting_client ADDRESS

Its submission "guarded" is watched with cancel_on_disconnect, "free" without. Once attempts of both run it writes the
two submissions' ids in a line.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import aclosing

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import AttemptStarted
from py_scheduler.domain.task import Task, TaskConfig


async def main(address: str) -> None:
    async with SchedulerClient(address) as client, asyncio.TaskGroup() as watches:
        begun = []

        async def watch(submission_id: str, *, is_guarded: bool) -> None:
            frames = client.watch(submission_id=submission_id, cancel_on_disconnect=is_guarded)
            async with aclosing(frames):
                async for frame in frames:
                    if any(isinstance(record.event, AttemptStarted) for record in frame.records):
                        begun.append(submission_id)
                        if len(begun) == len(ids):
                            print(*ids, flush=True)

        task = Task(config=TaskConfig(task_type="agent"))
        ids = [(await client.submit([task], name)).submission_id for name in ("guarded", "free")]
        for submission_id in ids:
            watches.create_task(watch(submission_id, is_guarded=submission_id == ids[0]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
