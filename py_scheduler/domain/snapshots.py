"""A piece of the state as a journal keeps it, so that a restart need not read how it came about."""

from __future__ import annotations

import msgspec

SERVICE = ""
"""The name of the snapshot of what is of no submission."""


class Snapshot(msgspec.Struct, frozen=True, gc=False):
    """State after the event `sequence`; later events are applied on top. What `content` says is the scheduler's alone.

    name: a submission's id; a task's, for the result that is kept of it; or SERVICE. is_final: whether it will never be
    written again, only dropped.
    """

    name: str
    sequence: int
    content: bytes
    is_final: bool = False
