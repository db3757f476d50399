"""`py-scheduler journal VERB`: looks after a store that no server uses."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.app import journal
from py_scheduler.commands.common import standard_console
from py_scheduler.config import Config, load_config
from py_scheduler.errors import ConfigError, JournalError
from py_scheduler.knobs import CONFIG

if TYPE_CHECKING:
    import argparse

    from rich.console import Console


def add(parser: argparse.ArgumentParser) -> None:
    verbs = parser.add_subparsers(required=True, metavar="VERB", help="what to do")
    for verb, text in (
        ("check", "reads everything and says what is damaged; exit code 1 if something is"),
        ("recover", "makes a new store of what is sound, moves the old one aside and says exactly what is lost"),
        ("compact", "drops what the configuration no longer keeps, and makes the file as small as it gets"),
        ("export", "prints every event that is retained, one JSON object to a line"),
    ):
        command = verbs.add_parser(verb, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument(
            CONFIG.flag, type=Path, metavar=CONFIG.metavar, help="the server's configuration, which says where it lies"
        )
        command.add_argument("--state-dir", type=Path, metavar="FOLDER", help="where it lies")
        command.set_defaults(verb=verb)


def run(options: argparse.Namespace) -> int:
    named = os.environ.get(CONFIG.variable)
    config_file = options.config or (Path(named) if named else None)
    return run_journal(options.verb, config_file, options.state_dir, standard_console())


def run_journal(verb: str, config_file: Path | None, state_dir: Path | None, console: Console) -> int:
    """The exit code. Raises ConfigError, JournalError."""
    config = Config() if config_file is None else load_config(config_file)
    folder = state_dir
    if folder is None and config_file is not None:
        folder = journal.state_dir_of(config, config_file)
    if folder is None:
        raise ConfigError("say where the journal lies: --state-dir FOLDER, or --config FILE of a server with one")
    if not folder.is_dir():
        raise JournalError(f"there is no journal in {folder}: no server has been started with it yet")
    match verb:
        case "check":
            return _check(folder, console)
        case "recover":
            return _recover(folder, console)
        case "compact":
            return _compact(config, folder, console)
        case _:
            return _export(folder)


def _check(folder: Path, console: Console) -> int:
    found = journal.examine(folder)
    console.print(f"journal {folder}")
    events = sum([frame.last_sequence - frame.first_sequence + 1 for frame in found.frames])
    console.print(
        f"  {events} events in {len(found.frames)} commits, sequences {found.oldest_sequence} to "
        f"{found.last_sequence}; acknowledged through {found.acknowledged}"
    )
    if found.checkpoint is not None:
        console.print(
            f"  {len(found.snapshots)} snapshots, checkpoint through {found.checkpoint.through_sequence}: "
            "a restart applies what comes after"
        )
    for fault in found.faults:
        console.print(f"  DAMAGED: {fault}")
    for lost in found.lost:
        console.print(f"  LOST: events {lost.first_sequence} to {lost.last_sequence} ({lost.reason})")
    console.print("  everything is whole" if found.is_sound else f"  `journal recover --state-dir {folder}` mends it")
    return 0 if found.is_sound else 1


def _recover(folder: Path, console: Console) -> int:
    recovery = journal.recover(folder)
    if recovery is None:
        console.print(f"journal {folder}: everything is whole, nothing was changed")
        return 0
    console.print(f"journal {folder}: made anew")
    for lost in recovery.lost:
        console.print(f"  LOST: events {lost.first_sequence} to {lost.last_sequence} ({lost.reason})")
    console.print(f"  kept: events {recovery.kept[0]} to {recovery.kept[1]}" if recovery.kept else "  kept: no event")
    console.print(
        "  the state of all tasks is whole, and cursors stay good"
        if recovery.is_state_whole
        else "  what was acknowledged in the lost range did not happen; watchers start anew, old cursors are refused"
    )
    console.print(f"  the damaged files are in {recovery.moved_to}")
    return 0


def _compact(config: Config, folder: Path, console: Console) -> int:
    done = journal.compact(config, folder)
    console.print(
        f"journal {folder}: {done.bytes_before / 2**20:.1f} MiB -> {done.bytes_after / 2**20:.1f} MiB; "
        f"{done.open_tasks} tasks are open, events {done.oldest_sequence} to {done.last_sequence} can still be read"
    )
    return 0


def _export(folder: Path) -> int:
    for event in journal.export(folder):
        sys.stdout.buffer.write(msgspec.json.encode(event) + b"\n")
    sys.stdout.buffer.flush()
    return 0
