"""The client of the handler beside it: its own tasks, eight sums with four samples each. It needs the running server:

py-scheduler serve --config examples/own_handler/scheduler.toml
"""

from __future__ import annotations

import asyncio

from py_scheduler import SampleDone, SchedulerClient, Task, TaskConfig


def make_tasks() -> list[Task]:
    config = TaskConfig(task_type="sums", repeat_times=4, dataset="small_sums")  # the evaluator_id of the server
    return [
        Task(config=config, prompt=f"What is {left} + {right}?", metadata={"answer": left + right})
        for left in (1, 3)
        for right in (2, 3, 4, 6)
    ]


async def main() -> None:
    samples: list[SampleDone] = []
    async with SchedulerClient("127.0.0.1:50051") as client:
        async for event in client.rollout(make_tasks(), batch_id=1):
            if isinstance(event, SampleDone):
                samples.append(event)
                print(event.task_id, event.sample_no, event.outcome, event.reward.details or event.error)
    print(f"{sum(sample.reward.score for sample in samples):g} of {len(samples)} samples are right")


if __name__ == "__main__":
    asyncio.run(main())
