"""Kills a server again and again while clients work with it, then proves that nothing was lost.

    python -m tests.faults.chaos --kills 1000 --seed 1        (make chaos CHAOS_KILLS=1000 CHAOS_SEED=1)

Kills come in rounds of at most `--round`, each on a store of its own, with a seed of its own: the first round's is
--seed, the second's --seed + 1. What is wrong is printed with the round's seed and the command that repeats it, and
the round's folder is kept. A seed fixes what is asked of the server, when and where it is killed; not how the
operating system interleaves it.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.client import SchedulerClient
from py_scheduler.domain.task import Task, TaskConfig
from tests.faults import entries
from tests.faults.chaos_client import GPU_SHARE, LEASE_TTL_SECONDS, Role
from tests.faults.entries import REFERENCE, Recorder
from tests.faults.failpoints import EXIT_STATUS, IN_COMMIT, VARIABLE, Order
from tests.faults.forker import warm_forker
from tests.faults.history import History, check

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tests.faults.forker import Child, Forker

CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
drain_seconds = 0.5
[journal]
state_dir = "state"
checkpoint_bytes = 65536
ballast_bytes = 65536
[scheduler]
stop_grace_seconds = 1.0
max_running_samples = 24
[cluster.layout]
"10.0.0.1" = {{ gpus = [0, 1, 2, 3], cpu = 64, memory_gb = 64 }}
"10.0.0.2" = {{ gpus = [0, 1, 2, 3], cpu = 64, memory_gb = 64 }}
[[evaluator]]
evaluator_id = "plain"
handler = "tests.faults.handlers:Chaotic"
resource = {{ gpu = 2.0, cpu = 8.0, concurrency = 4 }}
run_resource = {{ gpu = {share}, cpu = 1.0 }}
batch_size = 2
[[evaluator]]
evaluator_id = "group"
handler = "tests.faults.handlers:ChaoticGroup"
resource = {{ gpu = 2.0, cpu = 8.0, concurrency = 4 }}
run_resource = {{ gpu = {share}, cpu = 1.0 }}
"""
TRAINERS = 3
_UP_SECONDS = 30.0
_END_SECONDS = 90.0

REACHED_WITHIN = {
    **dict.fromkeys(("before_commit", IN_COMMIT, "after_commit", "before_mark", "after_mark"), 30),
    **dict.fromkeys(("before_ack", "after_ack", "before_publish", "after_publish"), 30),
    **dict.fromkeys(("before_begin", "after_begin", "before_launch", "after_launch"), 40),
    **dict.fromkeys(("before_submit", "after_submit", "before_grant", "after_grant"), 6),
    **dict.fromkeys(("before_restart", "after_restart"), 1),
    **dict.fromkeys(("before_snapshot", "after_snapshot", "before_checkpoint", "after_checkpoint"), 2),
    **dict.fromkeys(("before_discard", "after_discard", "before_wal", "after_wal"), 2),
}
"""Each with how often it is reached at most before the process ends there."""


class Death(msgspec.Struct, frozen=True, kw_only=True):
    """How one server ends: at a point, or `after_seconds`, counted from when it is up or (early) from its fork.

    by: "kill"; "term", which it may obey; "stop", a SIGSTOP for as long again and then the kill. disk_error: beside it.
    """

    after_seconds: float
    by: str = "kill"
    early: bool = False
    point: Order | None = None
    disk_error: Order | None = None
    client: int | None = None
    """Who is killed with it."""

    @property
    def failpoints(self) -> str:
        return ", ".join(str(order) for order in (self.point, self.disk_error) if order is not None)


def death_of(chance: random.Random) -> Death:
    """The next one of a seed."""
    kind = chance.choices(("point", "time", "early", "stop", "term"), (50, 30, 8, 6, 6))[0]
    client = chance.randrange(TRAINERS) if chance.random() < 0.2 else None
    error = Order("before_commit", "raise", "", chance.randint(2, 20)) if chance.random() < 0.1 else None
    if kind == "point":
        point = chance.choice(sorted(REACHED_WITHIN))
        order = Order(point, chance.choice(("kill", "exit")), "", chance.randint(1, REACHED_WITHIN[point]))
        return Death(after_seconds=1.0, point=order, client=client, disk_error=error)
    if kind == "early":
        return Death(after_seconds=chance.uniform(0.0, 0.15), early=True, client=client)
    by = {"time": "kill"}.get(kind, kind)
    return Death(after_seconds=chance.uniform(0.0, 0.6), by=by, client=client, disk_error=error)


class Round:
    """One store, its servers one after the other, and the clients of all of them."""

    def __init__(self, folder: Path, seed: int, forker: Forker, config: str = CONFIG) -> None:
        self._folder = folder
        self._forker = forker
        self._chance = random.Random(seed)
        self._clients: list[Child] = []
        self.ends: Counter[str] = Counter()
        (folder / "scheduler.toml").write_text(config.format(folder=folder, share=GPU_SHARE))
        acknowledges = self._chance.random() < 0.7
        self._roles = [
            Role(self._address, str(folder / f"client-{n}"), f"c{n}", acknowledges=acknowledges)
            for n in range(TRAINERS)
        ]
        self._roles.append(Role(self._address, str(folder / "auditor"), "auditor", auditor=True))

    @property
    def _address(self) -> str:
        return f"unix:{self._folder}/s.sock"

    def deaths(self, count: int) -> list[Death]:
        return [death_of(self._chance) for _ in range(count)]

    async def run(self, deaths: Iterable[Death]) -> list[str]:
        """One server after the other dies, and the last one ends in order; what is wrong with what the clients saw."""
        self._clients = [await self._client(role) for role in self._roles]
        for death in deaths:
            await self._one_life(death)
        server = await self._server("")
        await asyncio.wait_for(self._forker.is_up.wait(), _UP_SECONDS)
        recorder = Recorder(self._folder / "driver")
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._end_clients(recorder)
                await self._read_reference(recorder)
        except TimeoutError:
            recorder.note(
                entries.Unexpected(f"after {_END_SECONDS:g} s clients had not finished, or room was not free")
            )
        finally:
            await self._end_what_runs()
        server.signal(signal.SIGTERM)
        status = await asyncio.wait_for(server.ended(), _UP_SECONDS)
        if status != 0:
            recorder.note(entries.Unexpected(f"the last server ended with {status} upon SIGTERM"))
        recorder.close()
        files = ["driver", *(Path(role.file).name for role in self._roles)]
        seen = [entry for file in files for entry in entries.read(self._folder / file)]
        return await asyncio.to_thread(check, History(seen, GPU_SHARE))

    async def _server(self, failpoints: str) -> Child:
        self._forker.is_up.clear()
        arguments = ["serve", "--config", str(self._folder / "scheduler.toml")]
        variables = {VARIABLE: failpoints}
        return await self._forker.fork("tests.faults.served", arguments, self._folder / "server.log", variables)

    async def _client(self, role: Role) -> Child:
        log = self._folder / f"{role.name}.log"
        return await self._forker.fork("tests.faults.chaos_client", [msgspec.json.encode(role).decode()], log, {})

    async def _one_life(self, death: Death) -> None:
        server = await self._server(death.failpoints)
        ended = asyncio.create_task(server.ended())
        if not death.early:
            up = asyncio.create_task(self._forker.is_up.wait())
            await asyncio.wait([up, ended], timeout=_UP_SECONDS, return_when=asyncio.FIRST_COMPLETED)
            up.cancel()
        await asyncio.wait([ended], timeout=death.after_seconds)
        if death.client is not None:
            await self._replace_client(death.client)
        if not ended.done():
            if death.by == "term":
                server.signal(signal.SIGTERM)
                await asyncio.wait([ended], timeout=5.0)
            elif death.by == "stop":
                server.signal(signal.SIGSTOP)
                await asyncio.wait([ended], timeout=death.after_seconds)
            if not ended.done():
                server.signal(signal.SIGKILL)
        self.ends[_name_of_end(death, await ended)] += 1

    async def _replace_client(self, number: int) -> None:
        self._clients[number].signal(signal.SIGKILL)
        await self._clients[number].ended()
        self._clients[number] = await self._client(self._roles[number])

    async def _end_clients(self, recorder: Recorder) -> None:
        """The auditor last."""
        for trainer in self._clients[:-1]:
            trainer.signal(signal.SIGTERM)
        for role in self._roles:
            if role.auditor:
                self._clients[0].signal(signal.SIGTERM)
            if (status := await self._clients[0].ended()) != 0:
                recorder.note(entries.Unexpected(f"client {role.name} ended with {status}: see {role.name}.log"))
            del self._clients[0]

    async def _read_reference(self, recorder: Recorder) -> None:
        """By one watch, up to the end of a task of its own; then nothing may hold room any more."""
        async with SchedulerClient(self._address) as client:
            tasks = [Task(config=TaskConfig(task_type="plain"), prompt="well 0")]
            last = await client.submit(tasks, "last", request_id="last")
            recorder.note(entries.SubmitAnswered("last", last.submission_id, last.task_ids))
            async with aclosing(client.watch()) as frames:
                async for frame in frames:
                    read = entries.frame_read(REFERENCE, "", frame)
                    recorder.note(read)
                    if any(event.kind == "TaskDone" and event.task_ids == last.task_ids for event in read.events):
                        break
            view = await client.get_submission(submission_id=last.submission_id)
            recorder.note(entries.viewed(view, 1, is_last=True))
            # What was leased and never given back expires, and nobody is told.
            while not _all_free(  # noqa: ASYNC110
                nodes := entries.nodes_seen((await client.server_info()).nodes, is_last=True)
            ):
                await asyncio.sleep(LEASE_TTL_SECONDS / 10)
            recorder.note(nodes)

    async def _end_what_runs(self) -> None:
        clients, self._clients = self._clients, []
        for client in clients:
            client.signal(signal.SIGKILL)
            await client.ended()


def _all_free(nodes: entries.NodesSeen) -> bool:
    return all(free == supply for _, free, supply in nodes.amounts)


def _name_of_end(death: Death, status: int) -> str:
    if status == EXIT_STATUS or (
        death.point is not None and status == -signal.SIGKILL and death.point.action == "kill"
    ):
        return f"at {death.point.point}" if death.point else "at a point"
    return f"{death.by}{' while it starts' if death.early else ''}: {status}"


async def chaos(kills: int, seed: int, round_kills: int) -> int:
    """Runs the rounds; the number of seeds that failed."""
    begun, left, failed, ends = time.monotonic(), kills, 0, Counter[str]()
    async with warm_forker() as forker:
        while left > 0:
            folder = Path(tempfile.mkdtemp(prefix="chaos-"))
            these = min(left, round_kills)
            chaos_round = Round(folder, seed, forker)
            wrong = await chaos_round.run(chaos_round.deaths(these))
            ends += chaos_round.ends
            left -= these
            print(
                f"seed {seed}: {these} kills, {len(wrong)} faults, {time.monotonic() - begun:.0f} s so far", flush=True
            )
            if wrong:
                failed += 1
                print(f"  to repeat: make chaos CHAOS_SEED={seed} CHAOS_KILLS={these}; left in {folder}", flush=True)
                print(*[f"  {fault}" for fault in wrong[:20]], sep="\n", flush=True)
            else:
                shutil.rmtree(folder)
            seed += 1
    for end, count in sorted(ends.items()):
        print(f"  {count:4d}  {end}")
    print(f"{kills} kills in {time.monotonic() - begun:.0f} s: {failed} of the seeds failed")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--round", type=int, default=25)
    options = parser.parse_args()
    return min(1, asyncio.run(chaos(options.kills, options.seed, options.round)))


if __name__ == "__main__":
    sys.exit(main())
