"""`py-scheduler` that says what it holds when it is asked: `python -m tests.faults.measured serve --config ...`.

Upon SIGUSR1 it writes a line of JSON to the file that MEASUREMENTS names: `blocks`, pieces of memory that Python holds;
`objects`, how many there are of each type that the collector knows; `resident_bytes`, after free memory was returned.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import signal
import sys
from collections import Counter
from pathlib import Path

from py_scheduler.cli import main

VARIABLE = "MEASUREMENTS"
EXACT_MALLOC = {"MALLOC_ARENA_MAX": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
"""Without free memory that each thread puts aside for itself: how much that is changes with the load of the machine."""


def _measure(*_: object) -> None:
    gc.collect()
    objects = Counter(type(thing).__qualname__ for thing in gc.get_objects())
    blocks = sys.getallocatedblocks()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    line = {"blocks": blocks, "objects": objects, "resident_bytes": pages * os.sysconf("SC_PAGE_SIZE")}
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _measure)
    sys.exit(main(sys.argv[1:]))
