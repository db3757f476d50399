"""What a client of a server that is killed writes down: each call, reply and frame, as it comes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import msgspec

from py_scheduler.domain.events import AbortRequested, AttemptEnded, AttemptStarted, ResultsCollected, TaskDone
from py_scheduler.domain.requests import NodeView, SubmissionView, TasksAcceptedNotice, WatchedFrame, WatchedRecord

REFERENCE = "reference"


class Seen(msgspec.Struct, frozen=True, array_like=True):
    """An event as a client got it. state: how an attempt or task ended. gpu_ids: of a start; next_attempt_no: of an
    end.

    digest: of all the event says, so that two readings of it can be compared.
    """

    sequence: int
    kind: str
    submission_id: str
    task_ids: tuple[str, ...]
    digest: str = ""
    subtask_no: int = 0
    attempt_no: int = 0
    state: str = ""
    node_ip: str = ""
    gpu_ids: tuple[int, ...] = ()
    next_attempt_no: int = 0


class SubmitAnswered(msgspec.Struct, frozen=True, tag=True):
    request_id: str
    submission_id: str
    task_ids: tuple[str, ...]


class FrameRead(msgspec.Struct, frozen=True, tag=True):
    """submission_id: of the subscription's filter; empty: everything."""

    subscription: str
    submission_id: str
    after: int
    through: int
    events: tuple[Seen, ...]
    cursor: bytes = b""


class SubmitCalled(msgspec.Struct, frozen=True, tag=True):
    """A client is about to submit its work of this number: whoever takes its place has to go on with it."""

    number: int


class WorkFinished(msgspec.Struct, frozen=True, tag=True):
    """All of it was done and read."""

    number: int


class GapTold(msgspec.Struct, frozen=True, tag=True):
    """The server said that what a subscription wants next is gone; it begins again at `oldest`."""

    subscription: str
    oldest: int


class Acknowledged(msgspec.Struct, frozen=True, tag=True):
    submission_id: str


class Viewed(msgspec.Struct, frozen=True, tag=True):
    """How a submission stood. tasks: acknowledged to this client; states: TaskDone by state; is_last: after the end."""

    submission_id: str
    tasks: int
    pending: int
    states: dict[str, int]
    is_last: bool


class LeaseGranted(msgspec.Struct, frozen=True, tag=True):
    """asked_at, at: when it was first asked for and when the reply had come, on the clock that all processes of this
    machine share. until: when it expires at the earliest.
    """

    lease_id: str
    fencing_token: int
    gpus: tuple[tuple[str, int], ...]
    share: float
    asked_at: float
    at: float
    until: float


class LeaseReturned(msgspec.Struct, frozen=True, tag=True):
    """at: when the client began to say so."""

    lease_id: str
    at: float


class NodesSeen(msgspec.Struct, frozen=True, tag=True):
    """What is free of each node's supply, as (name, free, supply)."""

    amounts: tuple[tuple[str, float, float], ...]
    is_last: bool


class Unexpected(msgspec.Struct, frozen=True, tag=True):
    """An error that no fault explains."""

    what: str


Entry = (
    SubmitCalled
    | SubmitAnswered
    | WorkFinished
    | FrameRead
    | GapTold
    | Acknowledged
    | Viewed
    | LeaseGranted
    | LeaseReturned
    | NodesSeen
    | Unexpected
)


class Recorder:
    """Writes entries to a file as they come: what a killed client saw is not lost with it."""

    def __init__(self, file: Path) -> None:
        self._file: IO[bytes] = file.open("ab", buffering=0)

    def note(self, entry: Entry) -> None:
        self._file.write(msgspec.json.encode(entry) + b"\n")

    def close(self) -> None:
        self._file.close()


def read(file: Path) -> list[Entry]:
    """A last line without its end was never acted upon."""
    lines = file.read_bytes().split(b"\n")[:-1]
    return [msgspec.json.decode(line, type=Entry) for line in lines]


def seen(record: WatchedRecord) -> Seen:
    event = record.event
    task_ids: tuple[str, ...] = ()
    if isinstance(event, AttemptStarted | AttemptEnded | TaskDone):
        task_ids = (event.task_id,)
    elif isinstance(event, TasksAcceptedNotice | AbortRequested | ResultsCollected):
        task_ids = event.task_ids
    digest = str(hash_of(event))
    base = (record.sequence, type(event).__name__, event.submission_id, task_ids, digest)
    if isinstance(event, AttemptStarted):
        return Seen(*base, event.subtask_no, event.attempt_no, "", event.node_ip, event.gpu_ids)
    if isinstance(event, AttemptEnded):
        return Seen(*base, event.subtask_no, event.attempt_no, event.state, next_attempt_no=event.next_attempt_no)
    if isinstance(event, TaskDone):
        return Seen(*base, state=event.state)
    return Seen(*base)


def hash_of(event: msgspec.Struct) -> int:
    """The same in every process, unlike `hash`."""
    return zlib.crc32(repr(event).encode())


def frame_read(subscription: str, submission_id: str, frame: WatchedFrame) -> FrameRead:
    events = tuple(map(seen, frame.records))
    return FrameRead(subscription, submission_id, frame.after_sequence, frame.through_sequence, events, frame.cursor)


def viewed(view: SubmissionView, tasks: int, *, is_last: bool = False) -> Viewed:
    states = {
        "succeeded": view.succeeded_tasks,
        "partial": view.partial_tasks,
        "failed": view.failed_tasks,
        "aborted": view.aborted_tasks,
    }
    return Viewed(view.submission_id, tasks, view.open_tasks, states, is_last)


def nodes_seen(nodes: Iterable[NodeView], *, is_last: bool = False) -> NodesSeen:
    amounts: list[tuple[str, float, float]] = []
    for node in nodes:
        amounts += [(f"{node.node_ip}/gpu{i}", free, 1.0) for i, free in zip(node.gpu_ids, node.free_gpus, strict=True)]
        amounts.append((f"{node.node_ip}/cpu", node.free_cpu, node.cpu))
        amounts.append((f"{node.node_ip}/memory", node.free_memory_gb, node.memory_gb))
    return NodesSeen(tuple(amounts), is_last)


def now() -> float:
    return time.monotonic()
