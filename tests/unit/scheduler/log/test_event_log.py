"""Nobody sees an event before its commit; every watcher sees consecutive ranges; slow ones are served from the
journal.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.domain.events import EventRecord, TaskDone
from py_scheduler.domain.requests import EventFilter, EventFrame, EventKind
from py_scheduler.domain.results import TaskState
from py_scheduler.errors import CursorExpiredError, InvalidArgumentError, ResourceExhaustedError
from py_scheduler.scheduler.log import event_log as event_log_module
from py_scheduler.scheduler.log.event_log import EventLog
from tests.support.journal.journal_store import SlowJournal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator


def record(sequence: int, submission_id: str = "s", namespace: str = "default") -> EventRecord:
    return EventRecord(
        sequence,
        namespace,
        TaskDone(
            submission_id=submission_id,
            task_id=f"{submission_id}-{sequence}",
            client_key="",
            state=TaskState.SUCCEEDED,
            planned_samples=1,
            outcomes={},
            reason="",
            unix_seconds=0.0,
        ),
    )


def log_with(count: int, journal: MemoryJournal | None = None) -> EventLog:
    log = EventLog(journal or MemoryJournal())
    log.start(0)
    for sequence in range(1, count + 1):
        log.append(record(sequence, submission_id=f"s{sequence % 2}"))
    log.flush()
    return log


async def read(frames: AsyncIterator[EventFrame], through: int) -> list[int]:
    """The sequences up to `through`, checking on the way that no range is skipped."""
    sequences: list[int] = []
    at: int | None = None
    async for frame in frames:
        assert at is None or frame.after_sequence == at
        assert all(frame.after_sequence < r.sequence <= frame.through_sequence for r in frame.records)
        at = frame.through_sequence
        sequences.extend(r.sequence for r in frame.records)
        if at >= through:
            return sequences
    raise AssertionError("the stream ended")


async def test_the_first_frame_comes_at_once_even_when_empty() -> None:
    frames = log_with(0).watch(EventFilter(), None)
    frame = await anext(frames)
    assert (frame.after_sequence, frame.through_sequence, frame.records) == (0, 0, ())


async def test_two_watchers_from_the_start_see_the_same() -> None:
    log = log_with(3_000)
    first, second = log.watch(EventFilter(), None), log.watch(EventFilter(), 0)
    assert await read(first, 3_000) == await read(second, 3_000) == list(range(1, 3_001))


async def test_a_cursor_resumes_without_gap_or_repetition() -> None:
    log = log_with(2_000)
    assert await read(log.watch(EventFilter(), 1_234), 2_000) == list(range(1_235, 2_001))


async def test_a_filter_drops_events_but_no_range() -> None:
    log = log_with(2_000)
    only_s1 = EventFilter(submission_id="s1", kinds=frozenset({EventKind.TASK_DONE}))
    assert await read(log.watch(only_s1, None), 1_999) == list(range(1, 2_000, 2))
    assert await anext(log.watch(EventFilter(kinds=frozenset({EventKind.TASKS_ACCEPTED})), None)) is not None
    other = await anext(log.watch(EventFilter(namespace="other"), None))
    assert other.records == ()
    assert other.through_sequence == 2_000


async def test_a_watcher_is_woken_by_new_events() -> None:
    log = log_with(1)
    frames = log.watch(EventFilter(), 1)
    assert (await anext(frames)).records == ()
    waiting = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    assert not waiting.done()
    log.append(record(2))
    assert [r.sequence for r in (await waiting).records] == [2]


async def test_an_idle_filter_is_told_how_far_it_has_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log_module, "_IDLE_FRAME_SECONDS", 0.01)
    log = log_with(1)
    frames = log.watch(EventFilter(submission_id="nobody"), None)
    await anext(frames)
    waiting = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    log.append(record(2))
    frame = await waiting
    assert (frame.after_sequence, frame.through_sequence, frame.records) == (1, 2, ())


async def test_nothing_is_seen_before_its_commit() -> None:
    journal = SlowJournal()
    log = log_with(3, journal)
    frames = log.watch(EventFilter(), None)
    assert (await anext(frames)).records == ()
    committed = asyncio.ensure_future(log.wait_committed(2))
    waiting = asyncio.ensure_future(anext(frames))
    await asyncio.sleep(0)
    journal.commit(1)
    assert [r.sequence for r in (await waiting).records] == [1]
    assert not committed.done()
    journal.commit(3)
    await committed
    assert [r.sequence for r in (await anext(frames)).records] == [2, 3]


@pytest.fixture
def short_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log_module, "_TAIL_EVENTS", 100)


@pytest.mark.usefixtures("short_tail")
async def test_a_watcher_behind_the_tail_reads_the_journal() -> None:
    log = log_with(0)
    frames = log.watch(EventFilter(), 0)
    await anext(frames)
    for sequence in range(1, 5_001):
        log.append(record(sequence))
        log.flush()
    assert len(log._tail) <= 200
    assert await read(frames, 5_000) == list(range(1, 5_001))


@pytest.mark.usefixtures("short_tail")
async def test_a_watcher_behind_the_retention_is_told_of_the_gap() -> None:
    log = EventLog(MemoryJournal(retained_events=50))
    log.start(0)
    frames = log.watch(EventFilter(), 0)
    await anext(frames)
    for sequence in range(1, 1_001):
        log.append(record(sequence))
        log.flush()
    with pytest.raises(CursorExpiredError) as raised:
        await anext(frames)
    assert raised.value.oldest_sequence == 951
    assert await read(log.watch(EventFilter(), None), 1_000) == list(range(951, 1_001))


async def test_a_hole_in_the_sequence_is_refused_at_once() -> None:
    log = log_with(1)
    with pytest.raises(AssertionError, match="hole"):
        log.append(record(3))


async def test_closing_ends_the_watches_after_what_is_committed() -> None:
    log = log_with(2)
    frames = log.watch(EventFilter(), 0)
    waiting = asyncio.ensure_future(read(frames, 99))
    await asyncio.sleep(0)
    log.append(record(3))
    log.close()
    with pytest.raises(AssertionError, match="the stream ended"):
        await waiting
    assert await read(log.watch(EventFilter(), 0), 3) == [1, 2, 3]


async def test_the_tail_is_bounded_by_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log_module, "_TAIL_BYTES", 50 * 600)
    log = log_with(0)
    frames = log.watch(EventFilter(), 0)
    await anext(frames)
    for sequence in range(1, 1_001):
        log.append(record(sequence))
        log.flush()
    assert len(log._tail) <= 100
    assert log._tail_bytes == sum(kept.size for kept in log._tail)
    assert await read(frames, 1_000) == list(range(1, 1_001))


async def test_the_tail_lets_go_of_what_everybody_has_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """But for its newest part, of which a second watcher may be a little behind."""
    monkeypatch.setattr(event_log_module, "_READ_TAIL_BYTES", 50 * 600)
    log = log_with(0)
    for sequence in range(1, 1_001):
        log.append(record(sequence))
        log.flush()
    kept = list(log._tail)
    for served in kept:
        served.encoded = b"encoded"
    log.acknowledge("default", "s", 500)
    assert 1 < log._tail[0].sequence <= 501, "what is unread stays"
    log.acknowledge("default", "s", 1_000)
    assert log._tail_bytes == sum(held.size for held in log._tail) <= 50 * 600
    assert [held.encoded for held in kept if held.sequence < log._tail[0].sequence] == [None] * (1_000 - len(log._tail))
    with pytest.raises(CursorExpiredError):
        await anext(log.watch(EventFilter(), 0))


async def test_what_is_read_back_from_the_journal_keeps_no_encoded_form(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_log_module, "_TAIL_EVENTS", 10)
    log = log_with(1_000)
    frames = log.watch(EventFilter(), 0)
    frame = await anext(frames)
    for served in frame.records:
        served.encoded = b"encoded"
    await anext(frames)
    oldest_in_tail = log._tail[0].sequence
    kept = [served.encoded for served in frame.records if served.sequence < oldest_in_tail]
    assert kept
    assert set(kept) == {None}


async def test_a_journal_that_cannot_write_is_said_so_until_it_can_again() -> None:
    journal = SlowJournal()
    log = log_with(1, journal)
    waiting = asyncio.ensure_future(log.wait_committed(1))
    await asyncio.sleep(0)
    journal.fail(OSError(28, "No space left on device"))
    with pytest.raises(ResourceExhaustedError, match="again later"):
        await waiting
    with pytest.raises(ResourceExhaustedError):
        log.check_writable()
    journal.commit(1)
    log.check_writable()
    await log.wait_committed(1)


async def test_a_sequence_of_the_future_is_refused() -> None:
    log = log_with(3)
    with pytest.raises(InvalidArgumentError, match="cursor"):
        await anext(log.watch(EventFilter(), 4))


@pytest.mark.parametrize(
    "limits", [{"retained_events": 10}, {"retained_bytes": 10 * 600}], ids=["by count", "by bytes"]
)
async def test_the_memory_journal_is_bounded(limits: dict[str, Any]) -> None:
    journal = MemoryJournal(**limits)
    for sequence in range(1, 1_001):
        journal.append([record(sequence)])
    assert journal.oldest_sequence == 991
    assert [r.sequence for r in await journal.read(0, 3)] == [991, 992, 993]
    assert [r.sequence for r in await journal.read(998, 30)] == [999, 1_000]
    assert len(journal._records) == 10


async def test_submissions_that_nobody_ever_acknowledges_leave_nothing_when_the_journal_dropped_them() -> None:
    log = EventLog(MemoryJournal(retained_events=100))
    log.start(0)
    for number in range(1, 10_001):
        log.append(record(number, f"s{number}"))
        log.flush()
    read = log.acknowledgements
    assert max(len(read._readers), len(read._oldest)) < 2_500


async def test_it_is_behind_from_so_many_bytes_on_until_half_of_them_are_on_disk() -> None:
    journal, told = SlowJournal(), list[bool]()
    size = record(1).size
    log = EventLog(journal, max_uncommitted_bytes=4 * size)
    log.behind_listener = told.append
    log.start(0)
    for sequence in range(1, 7):
        log.append(record(sequence))
        assert log.is_behind is (sequence > 4)
    log.flush()
    with pytest.raises(ResourceExhaustedError, match="max_uncommitted_bytes") as refused:
        log.check_keeps_up()
    assert refused.value.retry_after_seconds
    for sequence in range(1, 7):
        journal.commit(sequence)
        assert log.uncommitted_bytes == (6 - sequence) * size
        assert log.is_behind is (sequence < 4)
    log.check_keeps_up()
    assert told == [True, False]
