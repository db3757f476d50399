"""`py-scheduler` with the failpoints that FAILPOINTS names: `python -m tests.faults.served serve --config ...`.

WALL_CLOCK_OFFSETS, a file with one number of seconds, moves the wall clock of this process alone, whenever it is
changed.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.cli import main
from tests.faults import failpoints

if TYPE_CHECKING:
    from collections.abc import Sequence

CLOCK_VARIABLE = "WALL_CLOCK_OFFSETS"


def run(arguments: Sequence[str]) -> int:
    failpoints.install(os.environ.get(failpoints.VARIABLE, ""))
    if file := os.environ.get(CLOCK_VARIABLE):
        _move_wall_clock(Path(file))
    return main(arguments)


def _move_wall_clock(file: Path) -> None:
    true_time = time.time
    time.time = lambda: true_time() + float(file.read_text())


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
