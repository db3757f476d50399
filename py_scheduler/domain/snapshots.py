"""A submission's state as a journal keeps it, so that a restart need not read how it came about."""

from __future__ import annotations

import msgspec


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """State after the event `sequence`; later events of the submission are applied on top. What `content` says is the
    scheduler's alone.
    """

    submission_id: str
    sequence: int
    content: bytes
