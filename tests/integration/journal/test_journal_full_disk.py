"""A disk without room: reads go on, submits are refused, and it goes on by itself."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.requests import EventFilter
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import ResourceExhaustedError
from tests.support.handlers import SolvingAgent, spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.journal.journals import done, ended, open_journal
from tests.support.servers.served_process import ROOT, served_process
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from py_scheduler.client import Submission
    from py_scheduler.domain.requests import SubmitReply

DISK_BYTES = 24 << 20
LIMITS = JournalLimits(retained_bytes=1 << 30, ballast_bytes=4 << 20, wal_bytes=1 << 20)


@contextmanager
def small_disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, in memory. Skips the test where none can be mounted."""
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no file system can be mounted here: {made.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(folder: Path) -> Path:
    """A file that takes all the room there is."""
    filler = folder / "filler"
    with filler.open("wb") as sink:
        try:
            while True:
                sink.write(bytes(1 << 16))
                sink.flush()
        except OSError:
            pass
    return filler


async def submit_until_refused(harness: Harness) -> list[SubmitReply]:
    taken: list[SubmitReply] = []
    while harness.engine._event_log.failure is None:
        try:
            taken.append(await harness.submit([task_of("x" * 20_000)], batch_id=len(taken)))
        except ResourceExhaustedError:
            break
    with pytest.raises(ResourceExhaustedError, match="later") as refused:
        await harness.submit([task_of("refused")], batch_id="refused")
    assert refused.value.retry_after_seconds
    return taken


async def until_writable(harness: Harness) -> None:
    log = harness.engine._event_log
    while log.failure is not None:
        await log.wait_news()


async def test_submits_are_refused_reads_go_on_and_room_mends_it(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(disk / "state", LIMITS)) as harness:
            first = await harness.submit([task_of("first")], batch_id="first")
            await harness.done(first)
            filler = fill(disk)
            taken = await submit_until_refused(harness)
            assert len(await harness.done(first)) == 1, "what was committed can be watched"
            assert harness.engine.submission(harness.selector(first)).succeeded_tasks == 1
            filler.unlink()
            await until_writable(harness)
            last = await harness.submit([task_of("last")], batch_id="last")
            for reply in [*taken, last]:
                assert len(await harness.done(reply)) == 1
            frames = harness.engine.watch(EventFilter(), 0)
            sequences: list[int] = []
            while len(sequences) < harness.engine.last_sequence:
                sequences += [record.sequence for record in (await anext(frames)).records]
            assert sequences == list(range(1, len(sequences) + 1))
        async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(disk / "state", LIMITS)) as harness:
            assert len(await harness.done(last)) == 1


async def test_what_was_acknowledged_makes_room_on_a_disk_that_stays_full(tmp_path: Path) -> None:
    with small_disk(tmp_path) as disk:
        async with running_engine(spec_of(SolvingAgent()), journal=SqliteJournal(disk / "state", LIMITS)) as harness:
            for number in range(200):
                await harness.submit([task_of("x" * 20_000)], batch_id=f"before{number}")
            assert (disk / "state/ballast").exists()
            fill(disk)
            await submit_until_refused(harness)
            oldest = harness.engine.oldest_sequence
            harness.engine.acknowledge(EventFilter(), harness.engine.last_sequence)
            await until_writable(harness)
            await eventually(lambda: harness.engine.oldest_sequence > oldest, pause_seconds=0.01)
            await eventually((disk / "state/ballast").exists, pause_seconds=0.01)  # It is laid again for the next time.
            last = await harness.submit([task_of("last")], batch_id="last")
            assert len(await harness.done(last)) == 1


async def _on_files_of_limited_size(folder: Path) -> None:
    """In a process of its own, whose limit this changes."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limits = JournalLimits(ballast_bytes=0, wal_bytes=1 << 18)
    async with open_journal(folder, limits) as journal:
        await journal.commit(done(1))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
        while not journal.failures:
            journal.append(ended(journal.last_sequence + 1, 10_000))
            await asyncio.sleep(0)
        assert len(await journal.read_all()) == journal.committed < journal.last_sequence
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        await journal.committed_through(journal.last_sequence)
    async with open_journal(folder, limits) as journal:
        records = await journal.read_all()
        assert [record.sequence for record in records] == list(range(1, journal.last_sequence + 1))


def test_files_that_may_not_grow_are_like_a_full_disk(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path; "
        "from tests.integration.journal import test_journal_full_disk as here; "
        "asyncio.run(here._on_files_of_limited_size(Path(sys.argv[1])))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert ran.returncode == 0, ran.stderr
    assert "cannot be written" in ran.stderr


SERVED = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "{state}"
ballast_bytes = 4_194_304
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Echo"
resource = {{ concurrency = 8 }}
"""


async def submitted(client: SchedulerClient, batch_id: int) -> Submission:
    """Under a request id of its own: what was refused and is asked for again is the same."""
    task = Task(config=TaskConfig(task_type="echo"), prompt="x" * 20_000)
    return await client.submit([task], batch_id, request_id=f"r{batch_id}")


async def all_done(client: SchedulerClient, submission: Submission) -> None:
    async with aclosing(client.watch(submission_id=submission.submission_id, cursor=submission.cursor)) as frames:
        async for frame in frames:
            if any(isinstance(record.event, TaskDone) for record in frame.records):
                return


async def test_a_service_on_a_full_disk_refuses_submits_answers_reads_and_goes_on_by_itself_also_after_a_kill(
    tmp_path: Path,
) -> None:
    (tmp_path / "disk").mkdir()
    config = tmp_path / "scheduler.toml"
    config.write_text(SERVED.format(folder=tmp_path, state=tmp_path / "disk/state"))
    with small_disk(tmp_path / "disk") as disk:
        async with SchedulerClient(f"unix:{tmp_path}/s.sock", reconnect_seconds=60.0) as client, asyncio.timeout(90):
            async with served_process(config) as served:
                taken = [await submitted(client, 0)]
                await all_done(client, taken[0])
                filler = fill(disk)
                with pytest.raises(ResourceExhaustedError) as refused:  # noqa: PT012 - whichever of them it is
                    while True:
                        taken.append(await submitted(client, len(taken)))
                assert refused.value.retry_after_seconds
                await all_done(client, taken[0])
                assert (await client.get_submission(0)).succeeded_tasks == 1
                filler.unlink()
                await eventually(lambda: is_taken(client, len(taken)), pause_seconds=0.05)
                served.process.kill()
                await served.process.wait()
            async with served_process(config):
                for batch_id, submission in enumerate(taken):
                    assert (await submitted(client, batch_id)).task_ids == submission.task_ids
                    await all_done(client, submission)
                assert (await client.get_submission(len(taken))).scheduled_tasks == 1, "taken in once"


async def is_taken(client: SchedulerClient, batch_id: int) -> bool:
    try:
        await submitted(client, batch_id)
    except ResourceExhaustedError:
        return False
    return True
