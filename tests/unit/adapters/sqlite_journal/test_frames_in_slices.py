"""What is encoded in slices is, byte for byte, what is encoded at once."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler.adapters.sqlite_journal import frames
from py_scheduler.adapters.sqlite_journal.frames import Draft, draft_of, drafting, framed, records_of
from py_scheduler.domain.events import AcceptedTask, EventRecord, JournalledEvent, Moment, TasksAccepted
from py_scheduler.scheduler.slices import at_once
from tests.support import strategies

accepted = st.builds(
    TasksAccepted,
    submission_id=strategies.names,
    namespace=strategies.names,
    batch_id=strategies.batch_ids,
    request_id=strategies.names,
    request_digest=st.binary(max_size=16),
    tasks=st.lists(st.builds(AcceptedTask, strategies.names, strategies.tasks), max_size=4).map(tuple),
    unix_seconds=strategies.seconds,
    iteration=st.none() | strategies.iterations,
    group_scored=st.frozensets(strategies.names, max_size=2),
    is_collected=st.booleans(),
    moment=st.none() | st.builds(Moment, st.binary(max_size=4), strategies.seconds),
    warnings=st.lists(strategies.texts, max_size=2).map(tuple),
)


def joined(draft: Draft) -> tuple[int, int, bytes, bytes]:
    return draft.first_sequence, draft.last_sequence, b"".join(draft.events), draft.payload


@given(st.lists(accepted | strategies.events_that_travel_whole, min_size=1, max_size=4))
def test_the_bytes_are_the_same(events: list[JournalledEvent]) -> None:
    records = [EventRecord(number, "ns", event) for number, event in enumerate(events, 1)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frames, "_SLICE_PARTS", 3)
        assert joined(at_once(drafting(records))) == joined(draft_of(records))


@given(accepted)
def test_and_they_are_read_back(event: TasksAccepted) -> None:
    draft = at_once(drafting([EventRecord(7, "ns", event)]))
    (record,) = records_of(framed(draft, b"", 0.0), b"")
    assert (record.sequence, record.event) == (7, event)


@given(accepted)
def test_tasks_are_written_as_they_were_when_they_were_decided(event: TasksAccepted) -> None:
    """And what they were is not held any longer."""
    encoded = [msgspec.msgpack.encode(named.task, order="deterministic") for named in event.tasks]
    other = msgspec.structs.replace(event.tasks[0].task, metadata={"changed": object()}) if event.tasks else None
    changed = tuple(msgspec.structs.replace(named, task=other) for named in event.tasks)
    record = EventRecord(7, "ns", msgspec.structs.replace(event, tasks=changed), tasks_as_decided=encoded)
    assert frames.is_large([record]) == bool(encoded)
    (written,) = records_of(framed(at_once(drafting([record])), b"", 0.0), b"")
    assert written.event == event
    assert record.tasks_as_decided is None
