"""The checker finds each kind of violation in a history that is sound but for that one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from tests.faults import entries
from tests.faults.entries import (
    REFERENCE,
    Acknowledged,
    Entry,
    FrameRead,
    GapTold,
    LeaseGranted,
    LeaseReturned,
    NodesSeen,
    Recorder,
    Seen,
    SubmitAnswered,
    Unexpected,
    Viewed,
)
from tests.faults.history import History, check

if TYPE_CHECKING:
    from pathlib import Path

NODE = "10.0.0.1"
EVENTS = (
    Seen(1, "TasksAcceptedNotice", "s", ("s-0", "s-1")),
    Seen(2, "AttemptStarted", "s", ("s-0",), "", 0, 1, "", NODE, (0,)),
    Seen(3, "AttemptStarted", "s", ("s-1",), "", 0, 1, "", NODE, (0,)),
    Seen(4, "TasksAcceptedNotice", "t", ("t-0",)),
    Seen(5, "AttemptEnded", "s", ("s-0",), "", 0, 1, "lost", next_attempt_no=2),
    Seen(6, "AttemptEnded", "s", ("s-1",), "", 0, 1, "succeeded"),
    Seen(7, "TaskDone", "s", ("s-1",), state="succeeded"),
    Seen(8, "AttemptStarted", "s", ("s-0",), "", 0, 2, "", NODE, (0,)),
    Seen(9, "AttemptEnded", "s", ("s-0",), "", 0, 2, "succeeded"),
    Seen(10, "TaskDone", "s", ("s-0",), state="succeeded"),
    Seen(11, "AbortRequested", "t", ("t-0",)),
    Seen(12, "AttemptEnded", "t", ("t-0",), "", 0, 1, "aborted"),
    Seen(13, "TaskDone", "t", ("t-0",), state="aborted"),
)
SERVER = 1 << 32


def frame(
    subscription: str, submission_id: str, after: int, through: int, events: tuple[Seen, ...] = EVENTS
) -> FrameRead:
    chosen = [e for e in events if after < e.sequence <= through and submission_id in ("", e.submission_id)]
    return FrameRead(subscription, submission_id, after, through, tuple(chosen))


def view(submission_id: str, tasks: int, pending: int, *, is_last: bool = False, **states: int) -> Viewed:
    return Viewed(submission_id, tasks, pending, states, is_last)


def granted(
    lease_id: str, token: int, at: float, *, gpu: int = 0, until: float = 100.0, asked_at: float = 0.0
) -> LeaseGranted:
    return LeaseGranted(lease_id, token, ((NODE, gpu),), 0.5, asked_at or at - 0.1, at, until)


SOUND: tuple[Entry, ...] = (
    SubmitAnswered("r-0", "s", ("s-0", "s-1")),
    SubmitAnswered("r-0", "s", ("s-0", "s-1")),
    SubmitAnswered("r-1", "t", ("t-0",)),
    frame("c0/s", "s", 0, 4),
    view("s", 2, 2),
    frame("c0/s", "s", 4, 4),
    frame("c0/s", "s", 4, 10),
    Acknowledged("s"),
    frame("c0/t", "t", 3, 13),
    frame("auditor", "", 0, 3),
    GapTold("auditor", 4),
    frame("auditor", "", 3, 13),
    granted("l-0", SERVER + 1, 1.0),
    granted("l-1", SERVER + 2, 2.0),
    LeaseReturned("l-0", 3.0),
    granted("l-2", SERVER + 3, 4.0),
    granted("l-3", 2 * SERVER + 1, 5.0),
    NodesSeen(((f"{NODE}/gpu0", 0.5, 1.0),), is_last=False),
    view("s", 2, 0, is_last=True, succeeded=2),
    view("t", 1, 0, is_last=True, aborted=1),
    NodesSeen(((f"{NODE}/gpu0", 1.0, 1.0),), is_last=True),
    frame(REFERENCE, "", 0, 13),
)


def faults(entries: tuple[Entry, ...]) -> list[str]:
    return check(History(entries, gpu_share=0.5))


def with_events(change: Any) -> tuple[Entry, ...]:
    """The sound history as if the server had said other events, to everybody alike."""
    events = tuple(change(list(EVENTS)))

    def told(entry: Entry) -> Entry:
        if isinstance(entry, FrameRead):
            return frame(entry.subscription, entry.submission_id, entry.after, entry.through, events)
        return entry

    return tuple(map(told, SOUND))


def replaced(number: int, **fields: Any) -> Any:
    def change(events: list[Seen]) -> list[Seen]:
        events[number - 1] = msgspec.structs.replace(events[number - 1], **fields)
        return events

    return change


def replaced_entry(index: int, **fields: Any) -> tuple[Entry, ...]:
    entries = list(SOUND)
    entries[index] = msgspec.structs.replace(entries[index], **fields)
    return tuple(entries)


def test_a_sound_history_has_no_fault() -> None:
    assert faults(SOUND) == []


# Entry by entry: what is wrong, and what the checker has to say about it

VIOLATIONS: dict[str, tuple[tuple[Entry, ...], str]] = {
    "a submit that was answered is not there": (
        (*SOUND, SubmitAnswered("r-9", "s", ("s-9",))),
        "task s-9 of request r-9 was accepted 0 times",
    ),
    "a request id with two answers": (
        (*SOUND, SubmitAnswered("r-0", "s", ("s-0", "s-7"))),
        "request r-0 was answered ",
    ),
    "a task that two requests own": (
        (*SOUND, SubmitAnswered("r-9", "s", ("s-1",))),
        "task s-1 was given to 2 requests",
    ),
    "a task in the wrong submission": (replaced_entry(2, submission_id="s"), "task t-0 belongs to t"),
    "a task accepted twice": (
        with_events(replaced(4, task_ids=("t-0", "s-0"))),
        "task s-0 of request r-0 was accepted 2",
    ),
    "no terminal event": (with_events(replaced(7, kind="AbortRequested")), "task s-1 has 0 terminal events"),
    "two terminal events": (with_events(replaced(11, kind="TaskDone", task_ids=("s-1",))), "task s-1 has 2 terminal"),
    "an attempt after the end": (
        with_events(replaced(8, task_ids=("s-1",))),
        "task s-1 has AttemptStarted at 8, after its TaskDone",
    ),
    "done and never accepted": (with_events(replaced(7, task_ids=("s-5",))), "task s-5 is done and was never accepted"),
    "a frame that skips": (replaced_entry(6, after=5), "c0/s: a frame follows 5, the one before went through 4"),
    "a frame that repeats": (replaced_entry(6, after=3), "c0/s: a frame follows 3, the one before went through 4"),
    "an event left out": (replaced_entry(6, events=()), "c0/s: (4, 10] lacks [5, 6, 7, 8, 9, 10]"),
    "an event of another submission": (replaced_entry(8, submission_id="s"), "c0/t: (3, 13] lacks"),
    "an event that differs": (
        replaced_entry(3, events=(msgspec.structs.replace(EVENTS[0], digest="x"), *EVENTS[1:3])),
        "c0/s: (0, 4] lacks [1] of the reference and has [1] that differ",
    ),
    "sequences that do not rise": (replaced_entry(3, events=(EVENTS[1], EVENTS[0], EVENTS[2])), "do not rise"),
    "an event outside of its frame": (replaced_entry(3, through=2), "do not rise within (0, 2]"),
    "a hole in the reference": (
        replaced_entry(len(SOUND) - 1, events=EVENTS[:5] + EVENTS[6:]),
        "the reference has holes",
    ),
    "an attempt begun twice": (with_events(replaced(5, kind="AbortRequested")), "attempt 2 of s-0/0 began while 1"),
    "an attempt number left out": (
        with_events(lambda events: replaced(9, attempt_no=3)(replaced(8, attempt_no=3)(events))),
        "attempt 3 of s-0/0 follows 1",
    ),
    "an attempt ended that was not running": (with_events(replaced(9, attempt_no=1)), "attempt 1 of s-0/0 ended"),
    "more attempts than a GPU has room for": (
        with_events(replaced(4, kind="AttemptStarted", node_ip=NODE, gpu_ids=(0,), attempt_no=1)),
        f"GPU ('{NODE}', 0) carries 1.50 at sequence 4",
    ),
    "more leases than a GPU has room for": (
        (*SOUND, granted("l-9", SERVER + 4, 4.5)),
        f"GPU ('{NODE}', 0) carries leases of 1.50 when l-9",
    ),
    "a fencing token twice": ((*SOUND, granted("l-9", SERVER + 1, 9.0, gpu=1)), "have the same fencing token"),
    "a fencing token that falls": (
        (*SOUND, granted("l-9", 5, 9.0, gpu=1)),
        "lease l-9 was asked for after a higher fencing token had been granted",
    ),
    "a lease with two fencing tokens": ((*SOUND, granted("l-0", SERVER + 9, 1.0)), "lease l-0 has two fencing tokens"),
    "room below zero": (replaced_entry(17, amounts=(("cpu", -1.0, 4.0),)), "cpu: -1.0 of 4.0 is free"),
    "room above the supply": (replaced_entry(17, amounts=(("cpu", 5.0, 4.0),)), "cpu: 5.0 of 4.0 is free"),
    "room that is held at the end": (
        replaced_entry(20, amounts=(("cpu", 3.0, 4.0),)),
        "at the end only 3.0 of 4.0 is free",
    ),
    "nobody looked at the room": (replaced_entry(20, is_last=False), "nobody looked at the nodes at the end"),
    "a task unaccounted for": (replaced_entry(4, pending=1), "s: 1 tasks are accounted for when 2 were acknowledged"),
    "a task pending at the end": (replaced_entry(18, pending=1), "s: 1 tasks are pending at the end"),
    "more tasks than submitted": (
        replaced_entry(18, states={"succeeded": 3}),
        "s: 2 were submitted, 3 are accounted for",
    ),
    "counts that are not those of the events": (replaced_entry(19, states={"failed": 1}), "t: the view says "),
    "a submission nobody asked after": (replaced_entry(19, is_last=False), "t: nobody asked how it stood at the end"),
    "an error without a fault": ((*SOUND, Unexpected("INTERNAL")), "unexpected: INTERNAL"),
}


@pytest.mark.parametrize("name", VIOLATIONS)
def test_each_violation_is_found(name: str) -> None:
    entries, words = VIOLATIONS[name]
    found = faults(entries)
    assert any(words in fault for fault in found), found


def test_a_gap_over_what_nobody_acknowledged_is_found() -> None:
    skipping = [entry for entry in SOUND if entry != frame("auditor", "", 0, 3)]
    assert faults(tuple(skipping)) == []
    without = tuple(entry for entry in skipping if not isinstance(entry, Acknowledged))
    assert faults(without) == ["auditor: the gap before 4 holds events that nobody acknowledged"]


def test_a_recorder_keeps_what_it_wrote_and_a_torn_last_line_counts_as_never_seen(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path / "client")
    for entry in SOUND:
        recorder.note(entry)
    recorder.close()
    with (tmp_path / "client").open("ab") as file:
        file.write(b'{"type":"Acknowl')
    assert entries.read(tmp_path / "client") == list(SOUND)
