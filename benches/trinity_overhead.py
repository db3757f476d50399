"""What the Scheduler of seed 2 adds to the work of its runners: tasks whose runs only sleep, in this process.

    python benches/trinity_overhead.py [--tasks 1000] [--runners 4] [--run-seconds 0.015]

Each task has 8 repeats, split by 2. Ideal is what as many sleeps take on this machine, as many side by side as runners
are there, with nobody in between. The goal is at most GOAL times that.
"""

from __future__ import annotations

import argparse
import asyncio
import time

from py_scheduler.interfaces.trinity import Config, Experience, ExplorerConfig, Scheduler, Task, Workflow

GOAL = 1.2
REPEATS = 8
MEASURED_ROUNDS = 100


class Sleep(Workflow):
    is_async = True

    async def run_async(self) -> list[Experience]:
        await asyncio.sleep(self.task.workflow_args["seconds"])
        return [Experience()]


async def seconds_of_a_run(run_seconds: float, runners: int) -> float:
    """What a sleep of so long really takes, so many of them side by side."""
    began_at = time.monotonic()
    for _ in range(MEASURED_ROUNDS):
        await asyncio.gather(*[asyncio.sleep(run_seconds) for _ in range(runners)])
    return (time.monotonic() - began_at) / MEASURED_ROUNDS


async def measure(tasks: int, runners: int, run_seconds: float) -> None:
    scheduler = Scheduler(Config(explorer=ExplorerConfig(runner_per_model=runners, max_repeat_times_per_runner=2)))
    await scheduler.start()
    began_at = time.monotonic()
    scheduler.schedule([Task(Sleep, REPEATS, workflow_args={"seconds": run_seconds}) for _ in range(tasks)], 0)
    statuses = await scheduler.get_statuses(0)
    seconds = time.monotonic() - began_at
    await scheduler.close()
    assert len(statuses) == tasks
    ideal = tasks * REPEATS * await seconds_of_a_run(run_seconds, runners) / runners
    print(f"{seconds:.2f} s for {tasks} tasks: {seconds / ideal:.3f} times the ideal (goal: at most {GOAL})")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--tasks", type=int, default=1_000)
    parser.add_argument("--runners", type=int, default=4)
    parser.add_argument("--run-seconds", type=float, default=0.015)
    options = parser.parse_args()
    asyncio.run(measure(options.tasks, options.runners, options.run_seconds))


if __name__ == "__main__":
    main()
