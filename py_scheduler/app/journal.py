"""The journal of a server: where it lies, what it keeps, what `py-scheduler journal` does to one without a server."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.adapters.sqlite_journal.journal import SqliteJournal
from py_scheduler.adapters.sqlite_journal.recovery import Examination, Lost, Recovery, examine, recover
from py_scheduler.adapters.sqlite_journal.retention import JournalLimits
from py_scheduler.domain.events import TasksAccepted
from py_scheduler.scheduler.ledger.ledger import Ledger
from py_scheduler.scheduler.ledger.snapshots import service_snapshot
from py_scheduler.scheduler.log.checkpoints import forgotten_among, snapshots_of
from py_scheduler.scheduler.restore import complete_from, fold
from py_scheduler.scheduler.slices import at_once

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.config import Config
    from py_scheduler.domain.events import EventRecord

__all__ = [
    "Compacted",
    "Examination",
    "Lost",
    "Recovery",
    "compact",
    "default_state_dir",
    "examine",
    "export",
    "file_journal",
    "recover",
    "state_dir_of",
]


def state_dir_of(config: Config, config_file: Path) -> Path | None:
    """The folder of the journal; None when there is to be none."""
    if not config.journal.enabled:
        return None
    located = config.located(config_file.resolve().parent).journal.state_dir
    return Path(located) if located else default_state_dir(config_file)


def default_state_dir(config_file: Path) -> Path:
    """One for each configuration file, so that servers of different ones never meet, and each finds its own again."""
    home = os.environ.get("XDG_STATE_HOME")
    # The rule of XDG: what is not absolute counts as not set.
    root = Path(home) if home and Path(home).is_absolute() else Path.home() / ".local" / "state"
    place = config_file.resolve()
    return root / "py-scheduler" / f"{place.stem}-{zlib.crc32(os.fsencode(place)):08x}"


def file_journal(config: Config, state_dir: Path) -> SqliteJournal:
    """Not opened yet."""
    return SqliteJournal(state_dir, limits_of(config))


def limits_of(config: Config) -> JournalLimits:
    settings, journal = config.scheduler, config.journal
    return JournalLimits(
        retained_events=settings.retained_events,
        retained_bytes=settings.retained_bytes,
        retained_seconds=journal.retained_seconds,
        checkpoint_bytes=journal.checkpoint_bytes,
        ballast_bytes=journal.ballast_bytes,
    )


class Compacted(msgspec.Struct, frozen=True):
    """Bytes of all files before and after; what is open; the events that watchers can still read."""

    bytes_before: int
    bytes_after: int
    open_tasks: int
    oldest_sequence: int
    last_sequence: int


def compact(config: Config, state_dir: Path) -> Compacted:
    """Writes the state down, drops what the limits no longer keep and makes the file as small as it gets.

    Raises JournalError.
    """
    journal = file_journal(config, state_dir)
    before = _bytes_in(state_dir)
    journal.open()
    try:
        ledger = Ledger(config.scheduler.retained_submissions)
        folded = fold(journal, ledger)
        if missing := folded.missing(ledger.state):
            complete_from(journal.export(missing[0] - 1), ledger, folded)
        snapshots = [service_snapshot(ledger.state)]
        for submission in ledger.state.submissions():
            snapshots.extend(snapshots_of(submission, ledger.state, folded.snapshots))
        journal.compact(snapshots, at_once(forgotten_among(folded.snapshots, ledger.state)))
        oldest, last = journal.oldest_sequence, journal.last_sequence
    finally:
        journal.abandon()
    return Compacted(before, _bytes_in(state_dir), ledger.state.open_tasks, oldest, last)


def _bytes_in(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.name.startswith("journal.db"))


def export(state_dir: Path) -> Iterator[dict[str, Any]]:
    """Every event that is retained, as JSON values; arrays of tokens as base64 of their little-endian bytes.

    Raises JournalError.
    """
    journal = SqliteJournal(state_dir)
    journal.open()
    try:
        for records in journal.export():
            yield from map(_exported, records)
    finally:
        journal.abandon()


def _exported(record: EventRecord) -> dict[str, Any]:
    event = record.event
    fields = msgspec.structs.asdict(event)
    if type(event) is TasksAccepted:
        fields["tasks"] = [msgspec.structs.asdict(accepted) for accepted in event.tasks]
    if samples := fields.get("samples"):
        fields["samples"] = [_exported_sample(sample) for sample in samples]
    head = {"sequence": record.sequence, "namespace": record.namespace, "event": type(event).__name__}
    said: dict[str, Any] = msgspec.to_builtins(head | fields)
    return said


def _exported_sample(sample: msgspec.Struct) -> dict[str, Any]:
    fields = msgspec.structs.asdict(sample)
    return fields | {"timings": msgspec.structs.asdict(fields["timings"])}
