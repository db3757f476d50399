"""The journal on real files: what is acknowledged is there again, and what is no longer wanted goes."""

from __future__ import annotations

import asyncio
import threading
from typing import TYPE_CHECKING

import msgspec
import pytest

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits
from py_scheduler.adapters.sqlite_journal.store import DATABASE, JournalStore
from py_scheduler.domain.ports import Snapshot
from py_scheduler.errors import CursorExpiredError, JournalError
from tests.support.journal.journals import done, ended, filled, open_journal, same_events

if TYPE_CHECKING:
    from pathlib import Path


async def test_what_was_acknowledged_is_there_again_under_the_same_name(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as opened:
        epoch = opened.journal.store_epoch
        written = await opened.commit(done(1), ended(2, tokens=300), done(3))
        written += await opened.commit(ended(4, tokens=5))
    async with open_journal(tmp_path) as opened:
        assert opened.journal.store_epoch == epoch
        assert opened.journal.last_sequence == 4
        assert same_events(await opened.read_all(), written)
        written += await opened.commit(done(5))
        assert same_events(await opened.read_all(), written)


async def test_a_replay_has_every_event_and_no_trajectory(tmp_path: Path) -> None:
    await filled(tmp_path, tokens=100)
    journal = SqliteJournal(tmp_path)
    journal.open()
    records = [record for records in journal.replay() for record in records]
    await journal.close()
    assert [record.sequence for record in records] == list(range(1, 16))
    assert {len(sample.trajectory) for record in records for sample in record.event.samples} == {0}  # type: ignore[union-attr]


async def test_events_that_come_together_are_one_commit(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as opened:
        for number in range(1, 501):
            opened.append(done(number))
        await opened.committed_through(500)
    journal = SqliteJournal(tmp_path)
    journal.open()
    frames = list(journal.replay())
    await journal.close()
    assert sum(map(len, frames)) == 500
    assert len(frames) < 100


async def test_what_is_appended_while_a_commit_is_under_way_is_the_next_commit(tmp_path: Path) -> None:
    under_way, may_go_on = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def at(point: str) -> None:
        if point == "before_commit" and not may_go_on.is_set():
            loop.call_soon_threadsafe(under_way.set)
            may_go_on.wait()

    async with open_journal(tmp_path, at=at) as opened, asyncio.timeout(20):
        opened.append(done(1))
        await under_way.wait()
        for number in range(2, 21):
            opened.append(ended(number, tokens=number))
        may_go_on.set()
        await opened.committed_through(20)
        assert [record.sequence for record in await opened.read_all(1)] == list(range(2, 21))
        opened.append(done(21))
        opened.append(done(22))
        opened.journal.put_snapshots([Snapshot("a", 22, b"counts both in")])
        await opened.committed_through(22)
    journal = SqliteJournal(tmp_path)
    journal.open()
    frames = [[record.sequence for record in records] for records in journal.replay()]
    await journal.close()
    assert frames == [[1], list(range(2, 21)), [21], [22]]


async def test_the_log_is_moved_when_it_is_full_and_not_with_every_commit_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moves = 0
    move = JournalStore.move_wal

    def counting(store: JournalStore, *, truncate: bool = False) -> None:
        nonlocal moves
        moves += not truncate
        move(store, truncate=truncate)

    monkeypatch.setattr(JournalStore, "move_wal", counting)
    log = tmp_path / f"{DATABASE}-wal"
    async with open_journal(tmp_path, JournalLimits(wal_bytes=1 << 20, ballast_bytes=0)) as opened:
        for number in range(1, 201):
            await opened.commit(ended(number, tokens=4_000))
        log_bytes = log.stat().st_size
    assert 4 <= moves <= 20, "200 commits of some 5 pages each: 16 MiB in a log of 1 MiB"
    assert log_bytes < 2 << 20


async def test_two_never_share_a_store(tmp_path: Path) -> None:
    async with open_journal(tmp_path):
        with pytest.raises(JournalError, match=r"in use by process \d+"):
            SqliteJournal(tmp_path).open()
    SqliteJournal(tmp_path).open()


async def test_fencing_tokens_begin_far_above_those_of_before_whatever_the_clock_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = []
    for now in (2_000_000_000, 1_000_000_000, 1_000_000_001):
        monkeypatch.setattr("time.time_ns", lambda now=now: now * 10**9)
        async with open_journal(tmp_path) as opened:
            tokens.append(opened.journal.first_fencing_token)
    assert tokens[1] - tokens[0] >= 1 << 32
    assert tokens[2] - tokens[1] >= 1 << 32


async def test_snapshots_take_the_place_of_older_ones_and_events_before_the_checkpoint_are_not_replayed(
    tmp_path: Path,
) -> None:
    async with open_journal(tmp_path) as opened:
        await opened.commit(*map(done, range(1, 11)))
        opened.journal.put_snapshots([Snapshot("a", 5, b"old"), Snapshot("b", 6, b"b"), Snapshot("c", 7, b"c")])
        opened.journal.put_snapshots([Snapshot("a", 9, b"new")])
        opened.journal.checkpoint(8, ["c", "never was there"])
        await opened.commit(done(11))
    async with open_journal(tmp_path) as opened:
        assert sorted(opened.journal.snapshots(), key=lambda s: s.name) == [
            Snapshot("a", 9, b"new"),
            Snapshot("b", 6, b"b"),
        ]
        # Also of the frame that the checkpoint is in: what it forgot nothing can be applied to.
        assert [record.sequence for records in opened.journal.replay() for record in records] == [9, 10, 11]
        opened.journal.checkpoint(10, [])
        await opened.commit(done(12))
    async with open_journal(tmp_path) as opened:
        assert [record.sequence for records in opened.journal.replay() for record in records] == [11, 12]


async def test_what_is_acknowledged_goes_when_a_checkpoint_covers_it(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as opened:
        for number in range(1, 301):
            await opened.commit(ended(number, tokens=100))
        opened.journal.discard_through(200)
        await opened.commit(done(301))
        assert opened.journal.oldest_sequence == 1, "a restart still needs them"
        opened.journal.checkpoint(250, [])
        await opened.commit(done(302))
        await opened.commit(done(303))
        assert opened.journal.oldest_sequence == 201
        with pytest.raises(CursorExpiredError) as raised:
            await opened.journal.read(100, 10)
        assert raised.value.oldest_sequence == 201
        assert [record.sequence for record in await opened.read_all(200)] == list(range(201, 304))
    async with open_journal(tmp_path) as opened:
        assert opened.journal.oldest_sequence == 201
        assert [record.sequence for record in await opened.read_all(200)] == list(range(201, 304))


@pytest.mark.parametrize(
    "limits",
    [JournalLimits(retained_events=100), JournalLimits(retained_bytes=100_000)],
    ids=["by count", "by bytes"],
)
async def test_caps_ask_for_a_checkpoint_and_then_hold(tmp_path: Path, limits: JournalLimits) -> None:
    async with open_journal(tmp_path, limits) as opened:
        for number in range(1, 501):
            await opened.commit(ended(number, tokens=100))
            if opened.journal.wants_checkpoint:
                opened.journal.checkpoint(number, [])
        kept = 501 - opened.journal.oldest_sequence
    assert 50 <= kept <= 300


async def test_a_store_that_lives_long_stays_small(tmp_path: Path) -> None:
    limits = JournalLimits(retained_bytes=1 << 20, wal_bytes=1 << 20, ballast_bytes=0)
    async with open_journal(tmp_path, limits) as opened:
        for number in range(1, 301):
            await opened.commit(ended(number, tokens=20_000))
            if opened.journal.wants_checkpoint:
                opened.journal.checkpoint(number, [])
        size_bytes = sum(file.stat().st_size for file in tmp_path.iterdir())  # noqa: ASYNC240 - a test's own folder
    assert size_bytes < 20 << 20, "of 54 MB of trajectories, and twice that with the log, most is gone"


async def test_a_frame_larger_than_what_is_asked_for_is_read_in_steps(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as opened:
        await opened.commit(*map(done, range(1, 101)))
        assert [record.sequence for record in await opened.journal.read(10, 5)] == [11, 12, 13, 14, 15]
        assert [record.sequence for record in await opened.journal.read(98, 5)] == [99, 100]
        assert await opened.journal.read(100, 5) == []


async def test_what_cannot_be_encoded_ends_the_journal_for_good_and_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_journal(tmp_path) as opened, asyncio.timeout(20):
        await opened.commit(done(1))
        opened.append(msgspec.structs.replace(done(2), unix_seconds=2**70))
        failure = await opened.failed()
        assert isinstance(failure, JournalError)
        assert "OverflowError" in str(failure)
        assert "writes nothing any more" in caplog.text
        opened.append(done(3))
        assert [record.sequence for record in await opened.read_all()] == [1], "what was committed can be read"
    async with open_journal(tmp_path) as opened:
        assert opened.journal.last_sequence == 1


async def test_reads_go_on_while_it_is_written(tmp_path: Path) -> None:
    async with open_journal(tmp_path) as opened:
        await opened.commit(done(1))
        for number in range(2, 400):
            opened.append(done(number))
            if number % 50 == 0:
                found = await opened.read_all()
                assert [record.sequence for record in found] == list(range(1, len(found) + 1))
                await asyncio.sleep(0)
        await opened.committed_through(399)
