"""`py-scheduler serve` that notes when it was where with each event, and writes that down when it ends.

    python benches/_stamped_server.py STAMPS.json serve --config scheduler.toml

All times are of the monotonic clock, which the processes of a machine share.
"""

from __future__ import annotations

import sys
import time
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler import cli
from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.api.boundary import OutgoingStream
from py_scheduler.app import building, journal
from py_scheduler.scheduler.log.event_log import EventLog

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from py_scheduler.domain.events import EventRecord


class Stamps(msgspec.Struct):
    """appended, published: (last sequence, when) of what was handed to the journal, and of what the loop heard was
    committed. committed: when the journal was done with each of the latter, in its own thread. read: whenever a watch
    began to read; written: whenever one handed a frame to gRPC.
    """

    appended: list[tuple[int, float]] = []
    committed: list[float] = []
    published: list[tuple[int, float]] = []
    read: list[float] = []
    written: list[float] = []


_stamps = Stamps()


class _StampedMemoryJournal(MemoryJournal):
    def start(self, on_commit: Callable[[int], None], on_failure: Callable[[Exception], None]) -> None:
        super().start(_noting(on_commit), on_failure)

    def append(self, records: Sequence[EventRecord]) -> None:
        _stamps.appended.append((records[-1].sequence, time.monotonic()))
        _stamps.committed.append(time.monotonic())
        super().append(records)


class _StampedSqliteJournal(SqliteJournal):
    def __init__(self, folder: Path, *arguments: Any) -> None:
        super().__init__(folder, *arguments, at=_note_commit)

    def start(self, on_commit: Callable[[int], None], on_failure: Callable[[Exception], None]) -> None:
        super().start(_noting(on_commit), on_failure)

    def append(self, records: Sequence[EventRecord]) -> None:
        _stamps.appended.append((records[-1].sequence, time.monotonic()))
        super().append(records)


def _note_commit(point: str) -> None:
    if point == "before_ack":
        _stamps.committed.append(time.monotonic())


def _noting(on_commit: Callable[[int], None]) -> Callable[[int], None]:
    def noted(through_sequence: int) -> None:
        _stamps.published.append((through_sequence, time.monotonic()))
        on_commit(through_sequence)

    return noted


def _note_calls(owner: type, method: str, times: list[float]) -> None:
    called = getattr(owner, method)

    @wraps(called)
    def noted(*arguments: Any) -> Any:
        times.append(time.monotonic())
        return called(*arguments)

    setattr(owner, method, noted)


def main() -> None:
    # By name, where the server is put together.
    setattr(building, MemoryJournal.__name__, _StampedMemoryJournal)
    setattr(journal, SqliteJournal.__name__, _StampedSqliteJournal)
    _note_calls(EventLog, "_read", _stamps.read)
    _note_calls(OutgoingStream, "write", _stamps.written)
    out, *arguments = sys.argv[1:]
    code = cli.main(arguments)
    Path(out).write_bytes(msgspec.json.encode(_stamps))
    sys.exit(code)


if __name__ == "__main__":
    main()
