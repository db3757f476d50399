"""How long a server takes to be where it was: 100 000 tasks restored from the journal.

    python benches/restore.py [--tasks 100000] [--json out.json]

Three stores of the same tasks: all of them waiting; all of them done, event by event; all of them waiting, behind a
checkpoint. Each is opened and proven whole, applied to a ledger and batched into the ready queue, as at every start.
Beside it stands how long SQLite alone takes to hand over the same rows. The result is asserted before it is timed.
"""

from __future__ import annotations

import argparse
import asyncio
import sqlite3
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from benches.noop_agent import NoOpAgent
from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.domain.events import AttemptRef, EventRecord, approximate_size
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.results import AttemptState, Outcome, Reward, SampleDone, Timings
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.scheduler.engine import Engine
from py_scheduler.scheduler.ledger.commands import AcceptTasks, EndAttempt, StartAttempt
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.snapshots import snapshot_of
from py_scheduler.scheduler.restore import fold
from py_scheduler.scheduler.settings import EngineSettings

if TYPE_CHECKING:
    from py_scheduler.scheduler.ledger.commands import Command

TASKS_A_CALL = 1_000
RUNS = 3
GOAL_SECONDS = 2.0


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """The best of RUNS each, in seconds. restore: from a closed store to a full ready queue, of which `open` proves it
    whole, `fold` applies it, and the rest batches. sqlite: reading the same rows, and nothing else.
    """

    store: str
    tasks: int
    store_mib: float
    restore_seconds: float
    restore_cpu_seconds: float
    open_seconds: float
    fold_seconds: float
    sqlite_seconds: float


class Writer:
    """Plays a ledger into a journal, a call of tasks to a commit."""

    def __init__(self, folder: Path) -> None:
        self.ledger = Ledger()
        self.journal = SqliteJournal(folder)
        self.journal.open()
        self._committed = asyncio.Event()
        self.journal.start(lambda _: self._committed.set(), self._failed)

    def _failed(self, error: Exception) -> None:
        raise AssertionError("the disk is full") from error

    async def write(self, *commands: Command) -> None:
        records = []
        for command in commands:
            for event in self.ledger.decide(command):
                self.ledger.apply(event)
                records.append(EventRecord(self.ledger.state.last_sequence, "default", event, approximate_size(event)))  # type: ignore[arg-type]
        self._committed.clear()
        self.journal.append(records)
        await self._committed.wait()


async def make_store(folder: Path, count: int, *, finished: bool, checkpoint: bool) -> None:
    writer = Writer(folder)
    for call in range(count // TASKS_A_CALL):
        config = TaskConfig(task_type="noop", dataset="bench")
        tasks = tuple(
            Task(config=config, prompt=f"prompt of task {number}: {'x' * 100}", client_key=str(number))
            for number in range(call * TASKS_A_CALL, (call + 1) * TASKS_A_CALL)
        )
        submission_id = f"s{call // 10:016x}"
        accept = AcceptTasks(f"r{call}", bytes(16), SubmissionKey(call // 10), tasks, submission_id, 1e9)
        await writer.write(accept)
        if finished:
            ids = [
                f"{submission_id}-{number}"
                for number in range(call % 10 * TASKS_A_CALL, (call % 10 + 1) * TASKS_A_CALL)
            ]
            await writer.write(*[command for task_id in ids for command in _played(task_id)])
    if checkpoint:
        state = writer.ledger.state
        writer.journal.put_snapshots([snapshot_of(each, state) for each in state.submissions()])
        writer.journal.checkpoint(state.last_sequence, [])
    await writer.journal.close()


def _played(task_id: str) -> list[Command]:
    ref = AttemptRef(task_id, 0, 1)
    sample = SampleDone(
        task_id=task_id,
        sample_no=0,
        attempt_no=1,
        outcome=Outcome.SOLVED,
        reward=Reward(score=1.0),
        termination_reason="answered",
        node_ip="10.0.0.1",
        gpu_ids=(3,),
        timings=Timings(wait_seconds=0.1, run_seconds=0.2, eval_seconds=0.1),
        started_unix_seconds=1e9,
    )
    return [
        StartAttempt(ref, "10.0.0.1", (3,), 1e9),
        EndAttempt(ref, AttemptState.SUCCEEDED, (sample,), "", 1e9),
    ]


def sqlite_seconds(folder: Path) -> float:
    """Every row of every table, with the SQLite of the interpreter."""
    started = time.perf_counter()
    with sqlite3.connect(folder / "journal.db") as database:
        for table in ("frame", "payload", "snapshot"):
            for row in database.execute(f"SELECT * FROM {table}"):
                assert row
    database.close()
    return time.perf_counter() - started


async def restore(folder: Path, count: int, *, finished: bool) -> tuple[float, float, float, float]:
    """Seconds of all of it, of processor time that it takes, of `open` and of the fold."""
    journal = SqliteJournal(folder)
    started = time.perf_counter()
    journal.open()
    opened = time.perf_counter()
    ledger = Ledger()
    fold(journal, ledger)
    folded = time.perf_counter()
    assert ledger.state.open_tasks == (0 if finished else count)
    journal.abandon()
    spec = EvaluatorSpec(
        evaluator_id="noop",
        handler=NoOpAgent(),
        resource=Resource(concurrency=4),
        run_resource=Resource(),
        eval_resource=Resource(),
        batch_size=1,
    )
    # Without a worker nothing begins to run, which would be another's time.
    engine = Engine(
        specs=[spec],
        pool=None,
        generation_backends={},
        journal=SqliteJournal(folder),
        clock=LoopClock(),
        settings=EngineSettings(max_running_samples=1),
    )
    begun, cpu = time.perf_counter(), time.process_time()
    async with engine:
        ready, cpu = time.perf_counter(), time.process_time() - cpu
        await engine.drain(0.0)
    return ready - begun, cpu, opened - started, folded - opened


async def measure(store: str, count: int) -> Report:
    finished, checkpoint = store == "done", store == "waiting, checkpoint"
    took: list[tuple[float, float, float, float]] = []
    read: list[float] = []
    size = 0
    for _ in range(RUNS):
        # A store of its own for each run, because the start of an engine writes.
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            await make_store(folder, count, finished=finished, checkpoint=checkpoint)
            read.append(sqlite_seconds(folder))
            size = (folder / "journal.db").stat().st_size
            took.append(await restore(folder, count, finished=finished))
    whole, cpu, opened, folded = map(min, zip(*took, strict=True))
    return Report(
        store=store,
        tasks=count,
        store_mib=size / 2**20,
        restore_seconds=whole,
        restore_cpu_seconds=cpu,
        open_seconds=opened,
        fold_seconds=folded,
        sqlite_seconds=min(read),
    )


def show(report: Report) -> None:
    reached = "reached" if report.restore_seconds <= max(GOAL_SECONDS, 3 * report.sqlite_seconds) else "not reached"
    print(
        f"{report.tasks} tasks, {report.store}, {report.store_mib:.1f} MiB: restored in {report.restore_seconds:.2f} s "
        f"(goal {GOAL_SECONDS:g} s: {reached})\n"
        f"  {report.restore_cpu_seconds:.2f} s of processor time; proving the store whole "
        f"{report.open_seconds:.2f} s, applying {report.fold_seconds:.2f} s, the rest batches\n"
        f"  SQLite reads the same rows in {report.sqlite_seconds:.3f} s: ratio "
        f"{report.restore_seconds / report.sqlite_seconds:.0f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Restoring tasks from the journal, beside SQLite reading the rows.")
    parser.add_argument("--tasks", type=int, default=100_000)
    parser.add_argument("--json", type=Path, help="write the reports there as well")
    options = parser.parse_args()
    reports = []
    for store in ("waiting", "done", "waiting, checkpoint"):
        reports.append(asyncio.run(measure(store, options.tasks)))
        show(reports[-1])
    if options.json:
        options.json.write_bytes(msgspec.json.format(msgspec.json.encode(reports)) + b"\n")


if __name__ == "__main__":
    main()
