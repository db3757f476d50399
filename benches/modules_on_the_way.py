"""How many modules somebody reads who wants to know what becomes of one no-op task.

    python -m benches.modules_on_the_way [--limit 40] [--functions]

Client and server run in this process, over a real channel and without a journal on disk. One task warms both up. Then a
few more go through, one at a time, and a profiler notes every module of py_scheduler of which a function runs between
the submit and the delivered TaskDone, in whatever thread. Generated code and imports do not count. Modules that ran for
each of the tasks are on the way; what ran for some of them only was something else's doing, a timer's for example.

Prints these modules in the order in which they first ran, and their number. Ends with 1 if there are more than --limit.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import py_scheduler
from py_scheduler.app import serve
from py_scheduler.client import SchedulerClient
from py_scheduler.config import load_config
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.task import Task, TaskConfig

if TYPE_CHECKING:
    from types import FrameType

HERE = Path(__file__).parent
PACKAGE = f"{Path(py_scheduler.__file__).parent}/"
LIMIT = 40
TASKS = 5


class Way:
    """The functions that ran, by module, in the order of their first calls."""

    def __init__(self) -> None:
        self.is_open = False
        self.functions: dict[str, dict[str, None]] = {}

    def profile(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if self.is_open and event == "call" and code.co_filename.startswith(PACKAGE):
            module = code.co_filename.removeprefix(PACKAGE)
            if not module.startswith("_generated/"):
                self.functions.setdefault(module, {})[code.co_qualname] = None


async def way_of_one_task(client: SchedulerClient, way: Way, batch_id: int) -> dict[str, dict[str, None]]:
    way.functions = {}
    way.is_open = True
    async for event in client.rollout([Task(config=TaskConfig(task_type="noop"))], batch_id=batch_id):
        if isinstance(event, TaskDone):
            way.is_open = False
            assert event.state == "succeeded", event
    assert not way.is_open, "the task was never delivered"
    return way.functions


async def measure(way: Way) -> dict[str, list[str]]:
    """The functions of each module that is on the way of every task."""
    stop = asyncio.Event()
    bound: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    serving = asyncio.create_task(serve(load_config(HERE / "noop.toml"), HERE, bound.set_result, stop))
    either: set[asyncio.Future[Any]] = {serving, bound}
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    try:
        if serving.done():
            await serving
        async with SchedulerClient(await bound) as client:
            await way_of_one_task(client, way, 0)
            first, *others = [await way_of_one_task(client, way, number + 1) for number in range(TASKS)]
    finally:
        stop.set()
        await serving
    return {module: list(functions) for module, functions in first.items() if all(module in other for other in others)}


def main() -> None:
    parser = argparse.ArgumentParser(description="Modules on the way of one no-op task, client and server together.")
    parser.add_argument("--limit", type=int, default=LIMIT, help="end with 1 above it; default: %(default)s")
    parser.add_argument("--functions", action="store_true", help="print what ran of each as well")
    options = parser.parse_args()
    way = Way()
    threading.setprofile(way.profile)
    sys.setprofile(way.profile)
    try:
        found = asyncio.run(measure(way))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    for number, (module, functions) in enumerate(found.items(), 1):
        print(f"{number:3} {module}" + (f": {', '.join(functions)}" if options.functions else ""))
    print(f"{len(found)} modules on the way of one no-op task (at most {options.limit})")
    sys.exit(len(found) > options.limit)


if __name__ == "__main__":
    main()
