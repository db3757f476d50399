"""A client in few lines. It needs a running server:

py-scheduler serve --config examples/demo.toml --listen 127.0.0.1:50051
"""

import asyncio

from py_scheduler import SampleDone, SchedulerClient
from py_scheduler.integrations.reasoning_gym import reasoning_gym_mixture


async def main() -> None:
    tasks = reasoning_gym_mixture({"count_bits": {"max_n": 8}, "products": {"max_digits": 1}}, count=4, repeat_times=4)
    async with SchedulerClient("127.0.0.1:50051") as client:
        async for event in client.rollout(tasks, batch_id=1):
            if isinstance(event, SampleDone):
                tokens = event.trajectory.token_ids  # numpy, int32; beside it log_probs and loss_mask
                print(event.task_id, event.sample_no, event.outcome, f"{event.reward.score:.2f}", len(tokens), "tokens")
            else:
                print(event.task_id, event.state)


asyncio.run(main())
