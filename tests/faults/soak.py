"""A server under steady load for a while: its memory and its file descriptors stay flat, and nothing is left over.

    python -m tests.faults.soak --seconds 1200        (make soak SOAK_SECONDS=1200)

Lanes submit, watch, abort and acknowledge; a quarter of the handlers fails; visitors open watches and leave them;
others lease room. After a warm-up, in which what is capped fills up to its cap, the resident size may rise by
MIB_PER_MINUTE, and once by what one of the allocator's arenas takes; descriptors by a few. At the end every task has
one end, and all room is free.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import Counter
from contextlib import aclosing, suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.client import PlacementClient, SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.leases import LeaseState
from py_scheduler.domain.requests import EventKind
from py_scheduler.domain.resources import Resource
from py_scheduler.errors import LeaseError, SchedulerError
from tests.faults.chaos import CONFIG
from tests.faults.chaos_client import GPU_SHARE, LEASE_TTL_SECONDS, tasks_of
from tests.faults.entries import nodes_seen
from tests.support.servers.served_process import served_process

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB_PER_MINUTE = 1.0
ARENA_MIB = 8.0
MORE_DESCRIPTORS = 8
WARM_UP = 0.4
"""Of the whole time."""
_LANES, _VISITORS = 6, 4
_CAPS = "retained_events = 2000\nretained_submissions = 100\nretained_leases = 100\n[cluster.layout]"
"""Reached within seconds. The log's tail goes back and forth between one and two times the events, some 2.5 KiB each:
with 10 000 of them that was a saw tooth of 25 MiB every 15 to 25 s, and the slope told where the run had begun and
ended in it."""


class Sample(msgspec.Struct, frozen=True):
    """of the server: when, resident MiB, open file descriptors."""

    at: float
    mib: float
    descriptors: int


def slope(points: Sequence[tuple[float, float]]) -> float:
    """Of the straight line through them that fits best."""
    n = len(points)
    mean_x, mean_y = sum(x for x, _ in points) / n, sum(y for _, y in points) / n
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    return sum((x - mean_x) * (y - mean_y) for x, y in points) / spread


class Soak:
    """One run. What it counts is of tasks."""

    def __init__(self, address: str, pid: int, seconds: float, seed: int) -> None:
        self._address = address
        self._proc = Path(f"/proc/{pid}")
        self._chance = random.Random(seed)
        self._begun = time.monotonic()
        self._until = self._begun + seconds
        self.seconds = seconds
        self.samples: list[Sample] = []
        self.submitted = self.numbers = 0
        self.ended: Counter[str] = Counter()
        self.wrong: list[str] = []

    @property
    def _goes_on(self) -> bool:
        return time.monotonic() < self._until

    async def run(self) -> None:
        async with SchedulerClient(self._address) as client, PlacementClient(self._address) as placement:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._measure())
                tasks.create_task(self._lease(placement))
                for _ in range(_LANES):
                    tasks.create_task(self._lane(client))
                for _ in range(_VISITORS):
                    tasks.create_task(self._visit(client))
            # What was leased and not given back expires.
            await asyncio.sleep(2 * LEASE_TTL_SECONDS)
            amounts = nodes_seen((await client.server_info()).nodes).amounts
        self.wrong += [
            f"{name}: {free} of {supply} is free at the end" for name, free, supply in amounts if free != supply
        ]
        if self.ended.total() != self.submitted:
            self.wrong.append(f"{self.submitted} tasks were submitted, {self.ended.total()} ended")
        self._judge()

    async def _measure(self) -> None:
        while self._goes_on:
            status = (self._proc / "status").read_text()
            kib = next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS"))
            descriptors = sum(1 for _ in (self._proc / "fd").iterdir())
            self.samples.append(Sample(time.monotonic() - self._begun, kib / 1024, descriptors))
            await asyncio.sleep(1.0)

    async def _lane(self, client: SchedulerClient) -> None:
        while self._goes_on:
            self.numbers += 1
            tasks = tasks_of(self._chance)
            submission = await client.submit(tasks, self.numbers)
            self.submitted += len(tasks)
            submission_id, left, cursor = submission.submission_id, set(submission.task_ids), submission.cursor
            if self._chance.random() < 0.2:
                await client.abort(submission_id=submission_id, reason="soak", wait=self._chance.random() < 0.5)
            async with aclosing(client.watch(submission_id=submission_id, cursor=cursor)) as frames:
                async for frame in frames:
                    cursor = frame.cursor
                    for event in (r.event for r in frame.records if isinstance(r.event, TaskDone)):
                        left.remove(event.task_id)
                        self.ended[event.state] += 1
                    if not left:
                        break
            view = await client.get_submission(submission_id=submission_id)
            done = view.succeeded_tasks + view.partial_tasks + view.failed_tasks + view.aborted_tasks
            if (done, view.open_tasks) != (len(tasks), 0):
                self.wrong.append(f"{submission_id}: {done} of {len(tasks)} tasks are accounted for")
            await client.ack(cursor, submission_id=submission_id)

    async def _visit(self, client: SchedulerClient) -> None:
        while self._goes_on:
            kinds = self._chance.choice(((), (EventKind.TASK_DONE,), (EventKind.ATTEMPT_STARTED,)))
            with suppress(TimeoutError, SchedulerError):
                async with asyncio.timeout(self._chance.random()), aclosing(client.watch(kinds=kinds)) as frames:
                    async for _ in frames:
                        await asyncio.sleep(0)

    async def _lease(self, placement: PlacementClient) -> None:
        while self._goes_on:
            lease = await placement.acquire(
                Resource(gpu=GPU_SHARE), self._chance.randint(1, 4), ttl_seconds=LEASE_TTL_SECONDS, timeout_seconds=10.0
            )
            await asyncio.sleep(self._chance.random() * 0.2)
            if lease.state is LeaseState.PENDING or self._chance.random() < 0.8:
                with suppress(LeaseError):
                    await placement.release(lease)

    def _judge(self) -> None:
        steady = [sample for sample in self.samples if sample.at >= WARM_UP * self.seconds]
        third = len(steady) // 3
        minutes = (steady[-1].at - steady[0].at) / 60
        self.mib_per_minute = slope([(sample.at / 60, sample.mib) for sample in steady])
        self.limit = MIB_PER_MINUTE + ARENA_MIB / minutes
        if self.mib_per_minute > self.limit:
            self.wrong.append(f"memory rises by {self.mib_per_minute:.2f} MiB/min, {self.limit:.2f} is the limit")
        first, last = (max(s.descriptors for s in part) for part in (steady[:third], steady[-third:]))
        self.descriptors = first, last
        if last > first + MORE_DESCRIPTORS:
            self.wrong.append(f"{first} file descriptors became {last}")


async def soak(seconds: float, seed: int) -> list[str]:
    """What is wrong."""
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        config = Path(name) / "scheduler.toml"
        content = CONFIG.format(folder=name, share=GPU_SHARE).replace("[cluster.layout]", _CAPS, 1)
        config.write_text(content)
        async with served_process(config) as served:
            run = Soak(f"unix:{name}/s.sock", served.process.pid, seconds, seed)
            await run.run()
            served.process.terminate()
            if (status := await served.process.wait()) != 0:
                run.wrong.append(f"the server ended with {status}")
    print(
        f"{run.numbers} submissions, {run.submitted} tasks in {seconds:g} s: "
        + ", ".join(f"{count} {state}" for state, count in sorted(run.ended.items()))
        + f"\nresident: {run.samples[-1].mib:.0f} MiB, {run.mib_per_minute:+.2f} MiB/min after the warm-up"
        f" (limit {run.limit:.2f}); file descriptors: at most {run.descriptors[0]}, then {run.descriptors[1]}"
    )
    return run.wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=1_200)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    wrong = asyncio.run(soak(options.seconds, options.seed))
    print(*wrong[:20], sep="\n")
    return min(1, len(wrong))


if __name__ == "__main__":
    sys.exit(main())
