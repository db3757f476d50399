"""`py-scheduler knobs`: every flag and variable, for a terminal, as Markdown, or put into a document."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from py_scheduler.commands.common import standard_console
from py_scheduler.errors import ConfigError
from py_scheduler.knobs import CONFIG, KNOBS, knob_table

if TYPE_CHECKING:
    import argparse

    from rich.console import Console

BEGIN = "<!-- knobs: written by `py-scheduler knobs --write README.md` -->\n"
END = "<!-- end of knobs -->\n"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--markdown", action="store_true", help="as a Markdown table")
    parser.add_argument("--write", type=Path, metavar="FILE", help="put that table between its marks in a document")


def run(options: argparse.Namespace) -> int:
    if options.write:
        write_knobs(options.write)
    elif options.markdown:
        sys.stdout.write(knob_table())
    else:
        show_knobs(standard_console())
    return 0


def show_knobs(console: Console) -> None:
    table = Table("flag or variable", "key of the file", "default", "what it sets", box=box.ASCII2)
    for knob in (CONFIG, *KNOBS):
        names = f"{knob.flag}\n{knob.variable}".strip()
        table.add_row(names, "\n".join(knob.keys) or ("(by the rollout)" * knob.is_code_set), knob.default, knob.help)
    console.print(table)


def write_knobs(path: Path) -> None:
    """Replaces the table between the two marks of a document. Raises ConfigError when they are not there."""
    try:
        before, begin, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read {path}: {reason}") from error
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"{path} has no lines {BEGIN.strip()} and {END.strip()}: add them where the table is to be")
    try:
        path.write_text(f"{before}{begin}{knob_table()}{end}{after}", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error
