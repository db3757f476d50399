"""Opaque cursors: where a watcher is in which store, under which filter.

Layout, big-endian: version (1 byte), store epoch (16), sequence (8), filter hash (8), CRC-32 of all that (4).
A cursor is good for its own filter, and one of all kinds also for the same submission or namespace under fewer kinds:
whoever has seen every event up to a sequence has missed none of those. The checksum notices damage; it does not keep
anybody from forging one, and need not: a cursor opens nothing that its filter does not.
"""

from __future__ import annotations

import struct
import zlib
from hashlib import blake2b
from typing import TYPE_CHECKING

from py_scheduler.domain.requests import EventFilter
from py_scheduler.errors import CursorExpiredError, CursorMismatchError, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterable

_VERSION = 1
_BODY = struct.Struct(">B16sQ8s")
_CHECKSUM = struct.Struct(">I")
_LENGTH = _BODY.size + _CHECKSUM.size


class CursorCodec:
    """Cursors of one filter on one store. `encode` is called for every frame, so the hash is made once."""

    __slots__ = ("_epoch", "_hash", "_hash_of_all_kinds", "_oldest_sequence")

    def __init__(self, store_epoch: bytes, event_filter: EventFilter, oldest_sequence: int = 1) -> None:
        """`oldest_sequence` is what a holder of another store's cursor is told."""
        self._epoch = store_epoch
        self._oldest_sequence = oldest_sequence
        self._hash = _hash(event_filter, event_filter.kinds)
        self._hash_of_all_kinds = _hash(event_filter, ())

    def encode(self, sequence: int) -> bytes:
        body = _BODY.pack(_VERSION, self._epoch, sequence, self._hash)
        return body + _CHECKSUM.pack(zlib.crc32(body))

    def decode(self, cursor: bytes) -> int | None:
        """The sequence to continue after; None for the empty cursor, which is the oldest event.

        Raises InvalidArgumentError (not a cursor), CursorExpiredError (of another store), CursorMismatchError (of
        another filter).
        """
        if not cursor:
            return None
        body, checksum = cursor[: _BODY.size], cursor[_BODY.size :]
        if len(cursor) != _LENGTH or _CHECKSUM.pack(zlib.crc32(body)) != checksum or body[0] != _VERSION:
            raise InvalidArgumentError("is not a cursor of this service, or was damaged: start without one", "cursor")
        _version, epoch, sequence, filter_hash = _BODY.unpack(body)
        if epoch != self._epoch:
            raise CursorExpiredError(
                "the cursor belongs to another store (the server was started anew without its journal): "
                "start without a cursor, and submit again what is missing; if it was a step, call execute_rollout or "
                "execute_eval again",
                self._oldest_sequence,
            )
        if filter_hash not in (self._hash, self._hash_of_all_kinds):
            raise CursorMismatchError(
                "was made for another filter: use the filter that it came with, or start without a cursor", "cursor"
            )
        return int(sequence)


def _hash(event_filter: EventFilter, kinds: Iterable[str]) -> bytes:
    parts = [event_filter.namespace, event_filter.submission_id, *sorted(kinds)]
    digest = blake2b(digest_size=8)
    for part in parts:
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "big") + encoded)
    return digest.digest()
