"""`py-scheduler` that says what it holds when it is asked: `python -m tests.faults.measured serve --config ...`.

Upon SIGUSR1 it writes a line of JSON to the file that MEASUREMENTS names: `blocks`, pieces of memory that Python holds;
`objects`, how many there are of each type that the collector knows; `malloc_bytes`, what malloc has given out and
nobody has freed, whoever asked for it. What is resident would also tell how scattered the free pieces lie.
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
"""Pieces that a thread puts aside for itself count as given out: how many depends on the load of the machine."""


class _Mallinfo2(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            "arena",
            "ordblks",
            "smblks",
            "hblks",
            "hblkhd",
            "usmblks",
            "fsmblks",
            "uordblks",
            "fordblks",
            "keepcost",
        )
    ]


def _malloc_bytes() -> int:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Mallinfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def _measure(*_: object) -> None:
    gc.collect()
    objects = Counter(type(thing).__qualname__ for thing in gc.get_objects())
    blocks = sys.getallocatedblocks()
    line = {"blocks": blocks, "objects": objects, "malloc_bytes": _malloc_bytes()}
    with Path(os.environ[VARIABLE]).open("a") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    signal.signal(signal.SIGUSR1, _measure)
    sys.exit(main(sys.argv[1:]))
