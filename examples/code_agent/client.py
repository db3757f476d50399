"""The client of the code agent: the tasks beside it, two samples each. It needs the running server:

py-scheduler serve --config examples/code_agent/scheduler.toml
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec

from py_scheduler import SampleDone, SchedulerClient, Task, TaskConfig

TASKS = Path(__file__).with_name("tasks.jsonl")


def make_tasks(repeat_times: int = 2) -> list[Task]:
    config = TaskConfig(task_type="code", repeat_times=repeat_times, dataset="small_functions")
    rows = [msgspec.json.decode(line, type=dict[str, Any]) for line in TASKS.read_bytes().splitlines()]
    return [Task(config=config, prompt=row["prompt"], metadata={"code": row["code"]}) for row in rows]


async def main() -> None:
    tasks = make_tasks()
    samples: list[SampleDone] = []
    async with SchedulerClient("127.0.0.1:50051") as client:
        async for event in client.rollout(tasks, batch_id=1):
            if isinstance(event, SampleDone):
                samples.append(event)
                done = " ".join(turn["action"] for turn in event.reward.details.get("turns", []))
                print(event.task_id, event.sample_no, event.outcome, f"{event.reward.score:.2f}", done, event.error)
    outcomes = Counter(str(sample.outcome) for sample in samples)
    print(", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common()))
    print(f"mean score {sum(sample.reward.score for sample in samples) / len(samples):.2f}")


if __name__ == "__main__":
    asyncio.run(main())
