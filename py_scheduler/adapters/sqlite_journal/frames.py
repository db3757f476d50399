"""Events <-> frames: what one commit writes, and how its parts hang together.

A frame is the events of one commit as one blob of msgpack. They are encoded where they are made, in the event loop: for
another thread they are in no cache, and it would hold the interpreter just as long. Trajectories, which only watchers
need, stand in a second blob, and the event says where. Each frame's chain hash covers its own bytes, those of its
payload and the chain hash of the frame before: neither a flipped bit nor a missing frame goes unnoticed.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from itertools import chain
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import (
    AcceptedTask,
    AttemptEnded,
    EventRecord,
    JournalledEvent,
    TasksAccepted,
    approximate_size,
)
from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY, Trajectory

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator, Sequence

    from py_scheduler.domain.results import SampleDone

DIGEST_BYTES = 16
_FRAME_EVENTS = 4_096
_FRAME_BYTES = 4 << 20
"""A frame is read as a whole, so it does not grow with the backlog."""
_TASKS_AT_ONCE = 256
"""Of one event. What has more is encoded in slices."""
_SLICE_BYTES = 256 << 10
_SLICE_PARTS = 1_024
"""A slice is over when it has so many encoded bytes or parts."""
_HEAD = struct.Struct(">QQd")

_replace = msgspec.structs.replace


class Frame(msgspec.Struct, frozen=True, gc=False):
    """The events [first_sequence, last_sequence] as they are stored. chain: its own hash; previous: that before it."""

    first_sequence: int
    last_sequence: int
    unix_seconds: float
    previous: bytes
    chain: bytes
    payload_digest: bytes
    events: bytes

    @property
    def is_sound(self) -> bool:
        """Whether its bytes are those that were written; of the payload, its digest says that."""
        try:
            return self.chain == _chain(self)
        except (TypeError, struct.error):  # A damaged row may hold values of any type, NULL too.
            return False


class Draft(msgspec.Struct, frozen=True, gc=False):
    """What a frame is made of once those before it are: encoded events, and their trajectories (empty: none).

    events: in pieces. The writer joins them, in its thread and without the interpreter.
    """

    first_sequence: int
    last_sequence: int
    events: tuple[bytes, ...]
    payload: bytes


class _Stored(msgspec.Struct, array_like=True, gc=False):
    """An event in a frame. payloads: (start, length) of each sample's trajectory in the payload; (0, 0): it has none.
    Empty when no sample has one.
    """

    namespace: str
    event: JournalledEvent
    payloads: tuple[tuple[int, int], ...] = ()


_Item = tuple[str, JournalledEvent, tuple[tuple[int, int], ...]]
"""The fields of a `_Stored`, for the encoder, to which they are the same."""

_encode = msgspec.msgpack.Encoder().encode
_decode_events = msgspec.msgpack.Decoder(list[_Stored]).decode
_decode_trajectory = msgspec.msgpack.Decoder(Trajectory).decode


def digest_of(content: bytes) -> bytes:
    return blake2b(content, digest_size=DIGEST_BYTES).digest()


def _chain(frame: Frame) -> bytes:
    hashed = blake2b(frame.previous, digest_size=DIGEST_BYTES)
    hashed.update(_HEAD.pack(frame.first_sequence, frame.last_sequence, frame.unix_seconds))
    hashed.update(frame.payload_digest)
    hashed.update(frame.events)
    return hashed.digest()


def draft_of(records: Sequence[EventRecord]) -> Draft:
    """Of consecutive records. Raises whatever an event that cannot be stored makes the encoder raise."""
    payload = bytearray()
    events = _encode(
        [
            _ended(record.namespace, event, payload)
            if type(event := record.event) is AttemptEnded
            else (record.namespace, event, ())
            for record in records
        ]
    )
    return Draft(records[0].sequence, records[-1].sequence, (events,), bytes(payload))


def is_large(records: Sequence[EventRecord]) -> bool:
    """Whether there is an event of many tasks among them, which may have any metadata."""
    for record in records:
        event = record.event
        if record.tasks_as_decided or (type(event) is TasksAccepted and len(event.tasks) > _TASKS_AT_ONCE):
            return True
    return False


def drafting(records: Sequence[EventRecord]) -> Generator[None, None, Draft]:
    """`draft_of` in slices: the same bytes, in pieces."""
    payload = bytearray()
    pieces: list[bytes] = []
    slice_parts: list[bytes] = [_list_head(len(records))]
    size = 0
    for part in chain.from_iterable(_parts_of(record, payload) for record in records):
        slice_parts.append(part)
        size += len(part)
        if size > _SLICE_BYTES or len(slice_parts) > _SLICE_PARTS:
            pieces.append(b"".join(slice_parts))
            slice_parts, size = [], 0
            yield
    pieces.append(b"".join(slice_parts))
    return Draft(records[0].sequence, records[-1].sequence, tuple(pieces), bytes(payload))


def _parts_of(record: EventRecord, payload: bytearray) -> Iterator[bytes]:
    """What is written of it, in parts. Its trajectories go into the payload."""
    event = record.event
    if type(event) is TasksAccepted:
        yield _list_head(len(_Stored.__struct_fields__)) + _encode(record.namespace)
        fields = event.__struct_fields__
        yield _list_head(1 + len(fields)) + _encode(event.__struct_config__.tag)
        for name in fields:
            value = getattr(event, name)
            if name == "tasks":
                yield _list_head(len(value))
                yield from map(_encode, value) if record.tasks_as_decided is None else _as_decided(record, event)
            else:
                yield _encode(value)
        yield _encode(())
    elif type(event) is AttemptEnded:
        yield _encode(_ended(record.namespace, event, payload))
    else:
        yield _encode((record.namespace, event, ()))


def _as_decided(record: EventRecord, event: TasksAccepted) -> Iterator[bytes]:
    """Its tasks, and lets go of what they were made of."""
    encoded, record.tasks_as_decided = record.tasks_as_decided, None
    head = _list_head(len(AcceptedTask.__struct_fields__))
    for accepted, task in zip(event.tasks, encoded or (), strict=True):
        yield head + _encode(accepted.task_id) + task


def _list_head(count: int) -> bytes:
    """What stands before the items of a list: a None is one byte."""
    encoded = _encode((None,) * count)
    return encoded[: len(encoded) - count]


def portions(records: Sequence[EventRecord]) -> Iterator[Sequence[EventRecord]]:
    """So many at a time as one frame takes."""
    if len(records) <= _FRAME_EVENTS and sum([record.size for record in records]) <= _FRAME_BYTES:
        yield records  # Nearly always.
        return
    start = size = 0
    for end, record in enumerate(records):
        size += record.size
        if size > _FRAME_BYTES or end - start >= _FRAME_EVENTS:
            if end > start:
                yield records[start:end]
            start, size = end, record.size
    yield records[start:]


def framed(draft: Draft, previous: bytes, unix_seconds: float) -> Frame:
    """The frame that follows on the one with the chain hash `previous`."""
    unchained = Frame(
        first_sequence=draft.first_sequence,
        last_sequence=draft.last_sequence,
        unix_seconds=unix_seconds,
        previous=previous,
        chain=b"",
        payload_digest=digest_of(draft.payload) if draft.payload else b"",
        events=b"".join(draft.events),
    )
    return _replace(unchained, chain=_chain(unchained))


def _ended(namespace: str, event: AttemptEnded, payload: bytearray) -> _Item:
    for sample in event.samples:
        if sample.trajectory is not EMPTY_TRAJECTORY and len(sample.trajectory):
            places = tuple([_put(sample, payload) for sample in event.samples])
            bare = tuple([_replace(sample, trajectory=EMPTY_TRAJECTORY) for sample in event.samples])
            return namespace, _replace(event, samples=bare), places
    return namespace, event, ()


def _put(sample: SampleDone, payload: bytearray) -> tuple[int, int]:
    if not len(sample.trajectory):
        return 0, 0
    start = len(payload)
    payload += _encode(sample.trajectory)
    return start, len(payload) - start


def records_of(frame: Frame, payload: bytes) -> list[EventRecord]:
    """The records of a frame that is sound, with everything."""
    records = []
    for sequence, stored in enumerate(_decode_events(frame.events), frame.first_sequence):
        event = stored.event
        if stored.payloads and type(event) is AttemptEnded:
            places = zip(event.samples, stored.payloads, strict=True)
            event = _replace(event, samples=tuple([_whole(sample, place, payload) for sample, place in places]))
        records.append(EventRecord(sequence, stored.namespace, event, approximate_size(event)))
    return records


def bare_records_of(frame: Frame) -> list[EventRecord]:
    """For the ledger: samples without their trajectories, records without their sizes."""
    numbered = enumerate(_decode_events(frame.events), frame.first_sequence)
    return [EventRecord(sequence, stored.namespace, stored.event) for sequence, stored in numbered]


def _whole(sample: SampleDone, place: tuple[int, int], payload: bytes) -> SampleDone:
    start, length = place
    if not length:
        return sample
    return _replace(sample, trajectory=_decode_trajectory(memoryview(payload)[start : start + length]))
