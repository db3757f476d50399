"""What is not whole is noticed, and what of it can be had again is exactly stated."""

from __future__ import annotations

import asyncio
import sqlite3
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.recovery import examine, recover
from py_scheduler.domain.ports import Snapshot
from py_scheduler.errors import JournalDamagedError, JournalError
from tests.support.journal.journals import done, ended, filled, open_journal, same_events

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.events import EventRecord

DATABASE = "journal.db"


def opened(folder: Path) -> None:
    journal = SqliteJournal(folder)
    try:
        journal.open()
    finally:
        journal.abandon()


def edit(folder: Path, statement: str, *values: object) -> None:
    with sqlite3.connect(folder / DATABASE) as database:
        database.execute(statement, values)
    database.close()


def flip(path: Path, find: bytes) -> None:
    """One bit of the first place where these bytes stand."""
    content = bytearray(path.read_bytes())
    content[content.index(find)] ^= 0x10
    path.write_bytes(content)


async def kept_after_recovery(folder: Path) -> list[EventRecord]:
    async with open_journal(folder) as again:
        return await again.read_all(again.journal.oldest_sequence - 1)


DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped bit in an event": lambda folder: flip(folder / DATABASE, b"s-8"),
    "a flipped bit in a chain hash": lambda folder: edit(
        folder, "UPDATE frame SET chain = zeroblob(16) WHERE last_sequence = 9"
    ),
    "a zeroed event blob": lambda folder: edit(
        folder, "UPDATE frame SET events = zeroblob(length(events)) WHERE last_sequence = 9"
    ),
    "a number where bytes were": lambda folder: edit(folder, "UPDATE frame SET events = 7 WHERE last_sequence = 9"),
    "a missing frame": lambda folder: edit(folder, "DELETE FROM frame WHERE last_sequence = 9"),
    "a missing payload": lambda folder: edit(folder, "DELETE FROM payload WHERE last_sequence = 9"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
async def test_damage_in_the_middle_is_refused_and_its_range_stated(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    written = await filled(tmp_path, commits=5, events=3, tokens=50)
    assert examine(tmp_path).is_sound
    damage(tmp_path)
    with pytest.raises(JournalDamagedError, match="journal recover --state-dir"):
        opened(tmp_path)
    found = examine(tmp_path)
    assert [(lost.first_sequence, lost.last_sequence) for lost in found.lost] == [(7, 9)]
    recovery = recover(tmp_path)
    assert recovery is not None
    # What comes after the damage may rest on it.
    assert [(lost.first_sequence, lost.last_sequence) for lost in recovery.lost] == [(7, 15)]
    assert recovery.kept == (1, 6)
    assert not recovery.is_state_whole
    assert same_events(await kept_after_recovery(tmp_path), written[:6])
    assert (recovery.moved_to / DATABASE).exists()
    assert recover(tmp_path) is None


async def test_a_flipped_bit_in_a_payload_is_noticed_by_who_reads_it_and_by_a_check(tmp_path: Path) -> None:
    await filled(tmp_path, commits=3, events=1, tokens=500)
    edit(tmp_path, "UPDATE payload SET content = zeroblob(length(content)) WHERE last_sequence = 2")
    async with open_journal(tmp_path) as again:
        assert len(await again.journal.read(2, 1)) == 1
        with pytest.raises(JournalDamagedError, match="the trajectories of events 2 to 2"):
            await again.journal.read(1, 1)
    assert [(lost.first_sequence, lost.last_sequence) for lost in examine(tmp_path).lost] == [(2, 2)]


async def test_damage_before_the_checkpoint_costs_watchers_alone(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as before:
        epoch = before.journal.store_epoch
        for number in range(1, 6):
            await before.commit(done(number))
        before.journal.put_snapshots([Snapshot("s", 4, b"state")])
        before.journal.checkpoint(4, [])
        await before.commit(done(6))
        written = await before.read_all()
    edit(tmp_path, "DELETE FROM frame WHERE last_sequence = 3")
    with pytest.raises(JournalDamagedError):
        opened(tmp_path)
    recovery = recover(tmp_path)
    assert recovery is not None
    assert [(lost.first_sequence, lost.last_sequence) for lost in recovery.lost] == [(3, 3)]
    assert recovery.kept == (4, 6)
    assert recovery.is_state_whole
    async with open_journal(tmp_path) as again:
        assert again.journal.store_epoch == epoch, "no sequence means anything else than before"
        assert list(again.journal.snapshots()) == [Snapshot("s", 4, b"state")]
        assert same_events(await again.read_all(3), written[3:])


@pytest.mark.parametrize("statement", ["UPDATE snapshot SET content = x'00'", "DELETE FROM snapshot"])
async def test_a_damaged_snapshot_is_refused(tmp_path: Path, statement: str) -> None:
    async with open_journal(tmp_path) as before:
        await before.commit(done(1))
        before.journal.put_snapshots([Snapshot("s", 1, b"state")])
        before.journal.checkpoint(1, [])
    edit(tmp_path, statement)
    journal = SqliteJournal(tmp_path)
    journal.open()
    with pytest.raises(JournalDamagedError):
        list(journal.snapshots())
    journal.abandon()
    recovery = recover(tmp_path)
    assert recovery is not None
    assert recovery.kept == (1, 1), "what led to the state is all there, so the state can be made again"
    assert recovery.is_state_whole
    assert recovery.lost == ()


async def test_a_write_ahead_log_that_is_gone_is_noticed(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as before:
        await before.commit(done(1))
        await before.commit(done(2))
        # As a crash leaves it: nothing has moved from the log into the database yet.
        copy = tmp_path / "copy"
        copy.mkdir()
        for name in (DATABASE, "high_water"):
            (copy / name).write_bytes((tmp_path / name).read_bytes())
        with_log = tmp_path / "with_log"
        with_log.mkdir()
        for name in (DATABASE, f"{DATABASE}-wal", "high_water"):
            (with_log / name).write_bytes((tmp_path / name).read_bytes())
    with pytest.raises(JournalDamagedError, match=r"no journal|acknowledged and are missing"):
        opened(copy)
    opened(with_log)


@pytest.mark.parametrize("name", [DATABASE, "high_water"])
async def test_a_file_that_is_gone_is_noticed(tmp_path: Path, name: str) -> None:
    await filled(tmp_path)
    (tmp_path / name).unlink()
    with pytest.raises(JournalDamagedError, match="gone"):
        opened(tmp_path)
    recovery = recover(tmp_path)
    assert recovery is not None
    opened(tmp_path)


async def test_an_older_copy_of_the_database_is_noticed(tmp_path: Path) -> None:
    await filled(tmp_path, commits=2)
    older = (tmp_path / DATABASE).read_bytes()
    await filled(tmp_path, commits=2)
    (tmp_path / DATABASE).write_bytes(older)
    with pytest.raises(JournalDamagedError, match="the events 7 to 12 were acknowledged and are missing"):
        opened(tmp_path)
    recovery = recover(tmp_path)
    assert recovery is not None
    assert [(lost.first_sequence, lost.last_sequence) for lost in recovery.lost] == [(7, 12)]


@pytest.mark.parametrize("content", [b"", bytes(8192), b"not a database at all, but long enough to be one" * 400])
async def test_what_is_no_database_is_refused(tmp_path: Path, content: bytes) -> None:
    await filled(tmp_path)
    (tmp_path / DATABASE).write_bytes(content)
    with pytest.raises(JournalError):
        opened(tmp_path)
    recovery = recover(tmp_path)
    assert recovery is not None
    assert recovery.kept is None
    opened(tmp_path)


async def test_a_format_of_the_future_is_refused_and_left_alone(tmp_path: Path) -> None:
    await filled(tmp_path)
    edit(tmp_path, "PRAGMA user_version = 2")
    content = (tmp_path / DATABASE).read_bytes()
    for touch in (opened, examine, recover):
        with pytest.raises(JournalError, match="format 2"):
            touch(tmp_path)
    assert (tmp_path / DATABASE).read_bytes() == content


def test_the_sqlite_that_is_too_old_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apsw, "sqlite_lib_version", lambda: "3.40.1")
    with pytest.raises(JournalError, match=r"SQLite 3.40.1 is too old"):
        opened(tmp_path)


class Crash:
    """What a killed process leaves: its files as they were after each commit, the log still beside the database."""

    def __init__(self) -> None:
        self.database = b""
        self.logs: list[bytes] = []
        self.marks: list[bytes] = []
        self.sequences: list[int] = []

    def take(self, folder: Path, sequence: int) -> None:
        self.database = (folder / DATABASE).read_bytes()
        self.logs.append((folder / f"{DATABASE}-wal").read_bytes())
        self.marks.append((folder / "high_water").read_bytes())
        self.sequences.append(sequence)

    def lay(self, folder: Path, log: bytes, mark: bytes) -> None:
        (folder / DATABASE).write_bytes(self.database)
        (folder / f"{DATABASE}-wal").write_bytes(log)
        (folder / "high_water").write_bytes(mark)


async def crash_after(folder: Path, commits: list[tuple[int, int]]) -> tuple[Crash, list[EventRecord]]:
    crash = Crash()
    async with open_journal(folder) as journal:
        crash.take(folder, 0)
        for events, tokens in commits:
            first = journal.last_sequence + 1
            await journal.commit(*[ended(number, tokens) for number in range(first, first + events)])
            crash.take(folder, journal.last_sequence)
        return crash, await journal.read_all()


@settings(max_examples=40)
@given(
    st.lists(st.tuples(st.integers(1, 5), st.integers(0, 2_000)), min_size=1, max_size=6),
    st.floats(0, 1),
    st.sampled_from([b"", b"\0", b"\xa5"]),
)
def test_killed_at_any_byte_of_a_commit_what_was_acknowledged_is_there_and_nothing_but_whole_commits(
    commits: list[tuple[int, int]], where: float, rest: bytes
) -> None:
    """rest: what stands in the log behind the kill, as some file systems leave it."""
    with tempfile.TemporaryDirectory() as name:
        crash, written = asyncio.run(crash_after(Path(name), commits))
    before, after = len(crash.logs[-2]), len(crash.logs[-1])
    cut = before + int((after - before) * where)
    log = crash.logs[-1][:cut] + rest * (after - cut)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        crash.lay(folder, log, crash.marks[-2])
        found = asyncio.run(kept_after_recovery(folder))
    assert len(found) in ({crash.sequences[-2]} if cut < after else {crash.sequences[-1]})
    assert same_events(found, written[: len(found)])
    if cut < after:
        with tempfile.TemporaryDirectory() as name:
            crash.lay(Path(name), log, crash.marks[-1])
            with pytest.raises(JournalDamagedError, match="acknowledged and are missing"):
                opened(Path(name))


async def test_a_torn_end_is_dropped_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    crash, written = await crash_after(tmp_path, [(2, 10), (2, 4_000)])
    torn = tmp_path / "torn"
    torn.mkdir()
    crash.lay(torn, crash.logs[-1][:-5_000], crash.marks[-2])
    assert same_events(await kept_after_recovery(torn), written[:2])
    assert "was torn and never acknowledged" in caplog.text
