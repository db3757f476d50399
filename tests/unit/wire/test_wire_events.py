"""Events, samples and frames on the wire."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import event_pb2, task_pb2
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.domain.events import AcceptedTask, EventRecord, JournalledEvent, TasksAccepted
from py_scheduler.domain.requests import EventFilter, EventFrame, TasksAcceptedNotice
from py_scheduler.domain.results import Outcome, Reward, SampleDone
from py_scheduler.domain.task import BatchId, Task, TaskConfig
from py_scheduler.domain.trajectory import Trajectory, Turn
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire.common.cursor import CursorCodec
from py_scheduler.wire.events import decode_event, decode_frame, encode_frames, encode_record
from py_scheduler.wire.results import decode_sample, decode_trajectory, encode_sample
from tests.support import strategies
from tests.support.servers.fake_engine import events_of_finish

CURSORS = CursorCodec(bytes(16), EventFilter())


def frames_of(events: list[JournalledEvent], max_bytes: int = 1 << 20) -> list[service.WatchEventsResponse]:
    """Through the wire as the events 11, 12, ... of a frame (10, 20]."""
    records = tuple(EventRecord(number, "default", event) for number, event in enumerate(events, 11))
    frame = EventFrame(after_sequence=10, through_sequence=20, records=records)
    return [service.WatchEventsResponse.FromString(raw) for raw in encode_frames(frame, CURSORS, max_bytes)]


@given(st.lists(strategies.events_that_travel_whole, max_size=4))
def test_a_frame_travels_unchanged(events: list[Any]) -> None:
    (message,) = frames_of(events)
    frame = decode_frame(message)
    assert (frame.after_sequence, frame.through_sequence) == (10, 20)
    assert CURSORS.decode(frame.cursor) == 20
    assert [(record.sequence, record.event) for record in frame.records] == list(enumerate(events, 11))


@given(strategies.batch_ids, st.lists(strategies.names, max_size=3))
def test_tasks_accepted_travels_as_ids(batch_id: BatchId, task_ids: list[str]) -> None:
    event = TasksAccepted(
        submission_id="s",
        namespace="default",
        batch_id=batch_id,
        request_id="r",
        request_digest=b"d",
        tasks=tuple(AcceptedTask(task_id, Task(config=TaskConfig(task_type="a"))) for task_id in task_ids),
        unix_seconds=1.5,
    )
    (record,) = decode_frame(frames_of([event])[0]).records
    assert record.event == TasksAcceptedNotice(
        submission_id="s", batch_id=batch_id, task_ids=tuple(task_ids), unix_seconds=1.5
    )


@given(st.integers(1, 400))
def test_split_frames_join_without_a_gap(max_bytes: int) -> None:
    events = [event for number in range(3) for event in events_of_finish(f"s-{number}")]
    messages = frames_of(events, max_bytes)
    bounds = [(message.after_sequence, message.through_sequence) for message in messages]
    assert bounds[0][0] == 10
    assert bounds[-1][1] == 20
    assert all(before[1] == after[0] for before, after in pairwise(bounds))
    for message in messages:
        assert CURSORS.decode(message.cursor) == message.through_sequence
        assert all(message.after_sequence < event.sequence <= message.through_sequence for event in message.events)
    assert [event.sequence for message in messages for event in message.events] == list(range(11, 20))


def test_an_event_is_encoded_once() -> None:
    record = EventRecord(1, "default", events_of_finish("s-0")[0])
    encoded = encode_record(record)
    assert record.encoded is encoded
    frame = EventFrame(after_sequence=0, through_sequence=1, records=(record,))
    record.encoded = service.WatchEventsResponse(events=[event_pb2.Event(sequence=77)]).SerializeToString()
    (raw,) = encode_frames(frame, CURSORS)
    assert service.WatchEventsResponse.FromString(raw).events[0].sequence == 77


# What handlers may say, and what newer servers may send


def travel(sample: SampleDone) -> SampleDone:
    message = task_pb2.SampleDone()
    encode_sample(sample, message)
    return decode_sample(task_pb2.SampleDone.FromString(message.SerializeToString()))


UNREADABLE = "unreadable_details: TypeError: object is no JSON value"
TOO_BIG = "unreadable_details: OverflowError: can't serialize ints < -2**63 or > 2**64 - 1"


@pytest.mark.parametrize(
    ("details", "expected"),
    [
        ({"f": object(), "g": [{"x": object()}], "h": 1}, {"f": UNREADABLE, "g": UNREADABLE, "h": 1}),
        ({("a", "b"): 1, "c": 2}, {"('a', 'b')": 1, "c": 2}),
        ({"s": "a\ud800", "\ud800": 1}, {"s": "a?", "?": 1}),
        ({"n": 2**70, "m": 2**63}, {"n": TOO_BIG, "m": 2**63}),
        (
            {
                "a": np.float32(0.5),
                "b": np.arange(3),
                "c": [np.int64(3)],
                "d": np.bool_(True),
                np.int64(7): np.str_("x"),
            },
            {"a": 0.5, "b": [0, 1, 2], "c": [3], "d": True, "7": "x"},
        ),
        ({"a": np.float32(0.5), "b": object()}, {"a": 0.5, "b": UNREADABLE}),
    ],
)
def test_details_that_are_no_json_lose_only_themselves(details: dict[Any, Any], expected: dict[str, Any]) -> None:
    sample = SampleDone(
        task_id="t", sample_no=0, attempt_no=1, outcome=Outcome.SOLVED, reward=Reward(score=1.0, details=details)
    )
    arrived = travel(sample)
    assert arrived.reward == Reward(score=1.0, details=expected)


def test_text_that_utf8_cannot_carry_arrives_mended() -> None:
    sample = SampleDone(task_id="t", sample_no=0, attempt_no=1, outcome=Outcome.SOLVED, error="é \udcff")
    assert travel(sample).error == "é ?"


def test_events_of_unknown_kinds_are_left_out() -> None:
    (message,) = frames_of(events_of_finish("s-0"))
    # Field 99 of an Event: a kind that a newer server has in the same oneof.
    del message.events[1]
    message.events.add(sequence=12).MergeFromString(b"\x9a\x06\x02hi")
    frame = decode_frame(message)
    assert [record.sequence for record in frame.records] == [11, 13]
    assert frame.through_sequence == 20
    assert decode_event(event_pb2.Event(sequence=1)) is None


class Odd:
    """A handler's object that cannot even be described."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__
    __float__ = __str__


@pytest.mark.parametrize(
    "changes",
    [
        {"reward": Reward(score=Odd())},  # type: ignore[arg-type]
        {"reward": Reward(score=10**400)},
        {"reward": Reward(score=None)},  # type: ignore[arg-type]
        {"termination_reason": Odd()},
        {"termination_reason": 7},
        {"error": [1]},
        {"phase": "lunch"},
        {"trajectory": Trajectory(turns=(Turn(start=0, end=1, source="environment", text=Odd()),))},  # type: ignore[arg-type]
        {"trajectory": Trajectory(turns=(Turn(start=-1, end=1, source="environment"),))},
    ],
)
def test_an_odd_value_never_makes_a_sample_unsendable(changes: dict[str, Any]) -> None:
    good = SampleDone(task_id="t", sample_no=3, attempt_no=2, outcome=Outcome.SOLVED, node_ip="10.0.0.1", gpu_ids=(1,))
    arrived = travel(msgspec.structs.replace(good, **changes))
    assert "cannot be sent as it is" in arrived.error
    assert msgspec.structs.replace(arrived, error="") == good


@pytest.mark.parametrize("details", [[1], "text", None, Odd()])
def test_details_that_are_no_object_are_told(details: Any) -> None:
    sample = SampleDone(
        task_id="t", sample_no=0, attempt_no=1, outcome=Outcome.SOLVED, reward=Reward(score=0.5, details=details)
    )
    arrived = travel(sample).reward
    assert arrived.score == 0.5
    assert list(arrived.details or ["unreadable_details"]) == ["unreadable_details"]


def test_details_that_cannot_be_described_are_told_one_by_one() -> None:
    details: dict[Any, Any] = {"o": Odd(), Odd(): 1, "rest": 2}
    sample = SampleDone(
        task_id="t", sample_no=0, attempt_no=1, outcome=Outcome.SOLVED, reward=Reward(score=0.5, details=details)
    )
    assert travel(sample).reward.details == {
        "o": "unreadable_details: TypeError: Odd is no JSON value",
        "RuntimeError: no words": 1,
        "rest": 2,
    }


def test_unknown_numbers_are_errors_that_name_the_field() -> None:
    with pytest.raises(InvalidArgumentError, match=r"outcome: is 99, must be one of 1 \(SOLVED\)"):
        decode_sample(task_pb2.SampleDone(outcome=99))  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="disagree"):
        decode_trajectory(task_pb2.Trajectory(token_ids=bytes(4), log_probs=bytes(4), loss_mask=bytes(2)))
    with pytest.raises(InvalidArgumentError, match="details_json"):
        decode_sample(task_pb2.SampleDone(outcome=task_pb2.OUTCOME_SOLVED, reward=task_pb2.Reward(details_json=b"[")))
