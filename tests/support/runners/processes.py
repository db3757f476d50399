"""Which processes of this machine run, by a word of their command line that only one test uses."""

from __future__ import annotations

import os
import select
import uuid
from pathlib import Path


class Marker:
    """`argument` makes a `sleep` recognisable: it is a duration that nobody else waits for."""

    def __init__(self) -> None:
        self.argument = f"9{uuid.uuid4().int % 10**6}.{uuid.uuid4().int % 10**9}"

    def processes(self) -> list[int]:
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / "cmdline").read_bytes().split(b"\0")
                    is_zombie = not words[0]
                except OSError:
                    continue
                if not is_zombie and self.argument.encode() in words:
                    found.append(int(entry.name))
        return found


def wait_until_ended(processes: list[int], seconds: float = 10.0) -> None:
    """Waits for processes that are nobody's children here. Raises TimeoutError."""
    for process in processes:
        try:
            descriptor = os.pidfd_open(process)
        except ProcessLookupError:
            continue
        try:
            if not select.select([descriptor], [], [], seconds)[0]:
                raise TimeoutError(f"process {process} still runs")
        finally:
            os.close(descriptor)
