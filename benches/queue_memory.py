"""What a task costs in memory while it waits: a million of them in a server's queue.

    python -m benches.queue_memory [--tasks 1000000] [--prompt-bytes 0]

A server process with its journal on runs one sample at a time, whose handler only waits, so that all other tasks stay
queued. What is told is its resident size over what it was before the first task; what a prompt takes comes on top.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path

from benches._server_process import server_process
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.task import Task, TaskConfig

SUBMIT_TASKS = 50_000
SETTLE_SECONDS = 5.0
CONFIG = """
[server]
listen = "127.0.0.1:0"
log_level = "warning"
drain_seconds = 0.0
[scheduler]
max_running_samples = 1
[[evaluator]]
evaluator_id = "waiting"
handler = "benches.noop_agent:StampingAgent"
handler_args = { wait_seconds = 3600.0 }
resource = { concurrency = 1 }
"""


async def measure(count: int, prompt_bytes: int) -> float:
    """Bytes a waiting task."""
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "scheduler.toml"
        config.write_text(CONFIG)
        serve = ["-m", "py_scheduler.cli", "serve", "--config", str(config), "--state-dir", f"{folder}/state"]
        async with server_process(serve) as server, SchedulerClient(server.address) as client:
            await client.submit(tasks_from(0, 1, prompt_bytes), "first")
            before = server.resident_bytes()
            for start in range(0, count, SUBMIT_TASKS):
                await client.submit(tasks_from(start, min(SUBMIT_TASKS, count - start), prompt_bytes), start)
            await asyncio.sleep(SETTLE_SECONDS)
            return (server.resident_bytes() - before) / count


def tasks_from(start: int, count: int, prompt_bytes: int) -> list[Task]:
    config = TaskConfig(task_type="waiting")
    return [
        Task(config=config, client_key=str(number), prompt="x" * prompt_bytes) for number in range(start, start + count)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="What a waiting task costs in memory.")
    parser.add_argument("--tasks", type=int, default=999_999, help="a server takes one more by default")
    parser.add_argument("--prompt-bytes", type=int, default=0)
    options = parser.parse_args()
    each = asyncio.run(measure(options.tasks, options.prompt_bytes))
    print(f"{options.tasks:,} tasks wait, with prompts of {options.prompt_bytes} bytes: {each / 1e3:.2f} KB each")


if __name__ == "__main__":
    main()
