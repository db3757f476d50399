"""Memory of a run depends on what can run at once, not on how many tasks there are."""

from __future__ import annotations

import gc
import subprocess
import sys
import tracemalloc
from pathlib import Path

import msgspec
import pytest

from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.domain.evaluator import BaseAgent, Episode
from py_scheduler.domain.resources import NodeResource, Resource
from py_scheduler.domain.results import AgentResult, Reward
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.interfaces.task_scheduler import TaskScheduler
from py_scheduler.placement import PlacementPool
from tests.support.handlers import spec_of
from tests.support.steps.task_schedulers import engine_of

pytestmark = [pytest.mark.slow]

ROOT = Path(__file__).parents[3]
NODES = 64
RETAINED_EVENTS = 2_048
PER_SAMPLE = Resource(gpu=1.0, cpu=1.0)


class NoOp(BaseAgent):
    async def run(self, episode: Episode) -> AgentResult:
        return AgentResult()

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        return Reward(score=1.0)


async def run(samples: int) -> dict[str, int]:
    """Peak bytes, as the interpreter and as the operating system count them, over a run of so many samples."""
    nodes = [NodeResource(node_ip=f"10.0.0.{n}", gpus=list(range(8)), cpu=64, memory_gb=256) for n in range(NODES)]
    budget = Resource(gpu=8.0, cpu=8.0, concurrency=8)
    spec = spec_of(NoOp(), resource=budget, run_resource=PER_SAMPLE, eval_resource=PER_SAMPLE)
    journal = MemoryJournal(retained_events=RETAINED_EVENTS)
    engine = engine_of(spec, pool=PlacementPool(nodes), journal=journal, retained_events=RETAINED_EVENTS)
    config = TaskConfig(task_type="agent", repeat_times=4)
    tasks = (Task(config=config, prompt=str(number)) for number in range(samples // 4))
    finished = 0
    gc.collect()
    tracemalloc.start()
    async with TaskScheduler(engine) as scheduler:
        assert engine.max_running_samples == NODES * 8
        async for group in scheduler.run_each(tasks, batch_id=1):
            finished += len(group.samples)
        assert finished == samples
        peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    status = Path("/proc/self/status").read_text()  # noqa: ASYNC240 -- no file, and the run is over
    resident = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
    return {"traced": peak, "resident": 1024 * resident}


def peaks_of(samples: int) -> dict[str, int]:
    """In a process of its own: what a test before left behind would count."""
    code = (
        "import asyncio, sys, msgspec\n"
        "from tests.integration.engine.test_bounded_memory import run\n"
        "print(msgspec.json.encode(asyncio.run(run(int(sys.argv[1])))).decode())\n"
    )
    command = [sys.executable, "-c", code, str(samples)]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return msgspec.json.decode(output, type=dict[str, int])


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux's own count")
def test_ten_thousand_samples_over_64_nodes_take_hardly_more_than_two_thousand() -> None:
    few, many = peaks_of(2_000), peaks_of(10_000)
    print(few, many)
    # Keeping the tasks and what came of them takes over 9 MiB more; what is kept is an id of each, for whoever sends
    # the same request again.
    assert many["traced"] - few["traced"] < 1 << 20
    assert many["resident"] - few["resident"] < 4 << 20
