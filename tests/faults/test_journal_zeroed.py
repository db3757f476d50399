"""Zeros at random places of a journal that a real server has written, and what `journal recover` says of them.

What is lost is found out here by other means: each row of the damaged file is compared with that of a copy.
ZEROED_SEED replays one history's places.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import sqlite3
from contextlib import aclosing, closing
from typing import TYPE_CHECKING

import pytest

from py_scheduler.app import journal
from py_scheduler.cli import main
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.events import TaskDone
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import JournalDamagedError
from tests.support.servers.served_process import served_process

if TYPE_CHECKING:
    from pathlib import Path


pytestmark = [pytest.mark.slow]

BLOCK = 4_096
PLACES = 3
SEEDS = [int(os.environ["ZEROED_SEED"])] if "ZEROED_SEED" in os.environ else range(4)
CONFIG = """
[server]
listen = "unix:{folder}/s.sock"
[journal]
state_dir = "state"
[[evaluator]]
evaluator_id = "echo"
handler = "tests.support.agents.app_handlers:Recording"
resource = {{ concurrency = 8 }}
"""
ROW = "SELECT * FROM frame WHERE last_sequence = ?"
PAYLOAD = "SELECT content FROM payload WHERE last_sequence = ?"
LOST = re.compile(r"LOST: events (\d+) to (\d+)")
KEPT = re.compile(r"kept: events (\d+) to (\d+)")


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration and the store of a server that has ended in good order."""
    return tmp_path_factory.mktemp("history")


@pytest.fixture
async def copied(history: Path, tmp_path: Path) -> Path:
    """A copy of it, in which something may be broken."""
    config = history / "scheduler.toml"
    if not config.exists():
        config.write_text(CONFIG.format(folder=history))
        async with served_process(config) as served, SchedulerClient(f"unix:{history}/s.sock") as client:
            for number in range(40):
                await roll_out(client, number)
            served.process.terminate()
            assert await served.process.wait() == 0
    shutil.copytree(history / "state", tmp_path / "state")
    (tmp_path / "scheduler.toml").write_text(CONFIG.format(folder=tmp_path))
    return tmp_path


async def roll_out(client: SchedulerClient, number: int) -> None:
    tasks = [Task(config=TaskConfig(task_type="echo"), prompt=f"{number}/{n} {'x' * 300}") for n in range(10)]
    submission = await client.submit(tasks, number)
    left = len(tasks)
    async with aclosing(client.watch(submission_id=submission.submission_id, cursor=submission.cursor)) as frames:
        async for frame in frames:
            left -= sum(isinstance(record.event, TaskDone) for record in frame.records)
            if not left:
                return


def frames_of(folder: Path) -> list[tuple[int, int]]:
    """First and last sequence of each, in order."""
    with closing(sqlite3.connect(folder / "state/journal.db")) as database:
        return database.execute("SELECT first_sequence, last_sequence FROM frame ORDER BY last_sequence").fetchall()


def zero(folder: Path, places: list[int]) -> None:
    with (folder / "state/journal.db").open("r+b") as file:
        for place in places:
            file.seek(place)
            file.write(bytes(BLOCK))


def rows_of(folder: Path, last_sequence: int) -> list[object]:
    """All that stands in a store of one frame; what cannot be read is None."""
    found: list[object] = []
    with closing(sqlite3.connect(f"file:{folder}/state/journal.db?mode=ro&immutable=1", uri=True)) as database:
        for statement in (ROW, PAYLOAD):
            try:
                found.append(database.execute(statement, (last_sequence,)).fetchone())
            except sqlite3.Error:
                found.append(None)
    return found


def is_whole(folder: Path, sound: Path, last_sequence: int) -> bool:
    return rows_of(folder, last_sequence) == rows_of(sound, last_sequence)


@pytest.mark.parametrize("seed", SEEDS)
async def test_recover_states_exactly_what_zeros_at_three_places_have_cost(
    history: Path, copied: Path, seed: int, capsys: pytest.CaptureFixture[str]
) -> None:
    chance = random.Random(seed)
    size = (copied / "state/journal.db").stat().st_size
    frames, events = frames_of(copied), [*journal.export(copied / "state")]
    # The first page says that it is a database at all: another test's.
    zero(copied, [chance.randrange(BLOCK, size - BLOCK) for _ in range(PLACES)])
    damaged = [frame for frame in frames if not is_whole(copied, history, frame[1])]
    state = str(copied / "state")
    assert main(["journal", "check", "--state-dir", state]) == (1 if damaged else 0)
    told = ranges(capsys.readouterr().out, LOST)
    assert covered(told) >= covered(damaged), "what is gone is said to be gone"
    if not damaged:
        return
    with pytest.raises(JournalDamagedError):
        list(journal.export(copied / "state"))
    assert main(["journal", "recover", "--state-dir", state]) == 0
    said = capsys.readouterr().out
    first_lost, last = damaged[0][0], frames[-1][1]
    assert covered(ranges(said, LOST)) == set(range(first_lost, last + 1)), "what rests on it is lost too, to the end"
    kept = [(1, first_lost - 1)] if first_lost > 1 else []
    assert ranges(said, KEPT) == kept
    assert main(["journal", "check", "--state-dir", state]) == 0
    assert [*journal.export(copied / "state")] == events[: first_lost - 1]
    async with served_process(copied / "scheduler.toml"), SchedulerClient(f"unix:{copied}/s.sock") as client:
        await roll_out(client, 1_000)


def ranges(said: str, what: re.Pattern[str]) -> list[tuple[int, int]]:
    return [(int(first), int(last)) for first, last in what.findall(said)]


def covered(ranges: list[tuple[int, int]]) -> set[int]:
    return {sequence for first, last in ranges for sequence in range(first, last + 1)}


async def test_zeros_in_the_first_page_lose_everything_and_recover_says_so(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    last = frames_of(copied)[-1][1]
    zero(copied, [0])
    assert main(["journal", "check", "--state-dir", str(copied / "state")]) == 1
    assert "is no database" in capsys.readouterr().out
    assert main(["journal", "recover", "--state-dir", str(copied / "state")]) == 0
    assert covered(ranges(capsys.readouterr().out, LOST)) == set(range(1, last + 1))
    async with served_process(copied / "scheduler.toml"), SchedulerClient(f"unix:{copied}/s.sock") as client:
        await roll_out(client, 1_000)
