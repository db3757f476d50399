"""Events <-> frames: what one commit writes, and how its parts hang together.

A frame is the events of one commit as one blob of msgpack. Trajectories, which only watchers need, stand in a second
blob, and the event says where. Each frame's chain hash covers its own bytes, those of its payload and the chain hash of
the frame before: neither a flipped bit nor a missing frame goes unnoticed.
"""

from __future__ import annotations

import struct
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import AttemptEnded, EventRecord, JournalledEvent, approximate_size
from py_scheduler.domain.trajectory import Trajectory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.results import SampleDone

DIGEST_BYTES = 16
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
        return self.chain == _chain(self)


class _Stored(msgspec.Struct, array_like=True, gc=False):
    """An event in a frame. payloads: (start, length) of each sample's trajectory in the payload; (0, 0): it has none.
    Empty when no sample has one.
    """

    namespace: str
    event: JournalledEvent
    payloads: tuple[tuple[int, int], ...] = ()


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


def make_frame(records: Sequence[EventRecord], previous: bytes, unix_seconds: float) -> tuple[Frame, bytes]:
    """The frame of consecutive records, and its payload (empty: none)."""
    payload = bytearray()
    events = _encode([_stored(record, payload) for record in records])
    content = bytes(payload)
    unchained = Frame(
        first_sequence=records[0].sequence,
        last_sequence=records[-1].sequence,
        unix_seconds=unix_seconds,
        previous=previous,
        chain=b"",
        payload_digest=digest_of(content) if content else b"",
        events=events,
    )
    return _replace(unchained, chain=_chain(unchained)), content


def _stored(record: EventRecord, payload: bytearray) -> _Stored:
    event = record.event
    if type(event) is AttemptEnded and any(len(sample.trajectory) for sample in event.samples):
        places = tuple([_put(sample, payload) for sample in event.samples])
        bare = tuple([_replace(sample, trajectory=Trajectory()) for sample in event.samples])
        return _Stored(record.namespace, _replace(event, samples=bare), places)
    return _Stored(record.namespace, event)


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
