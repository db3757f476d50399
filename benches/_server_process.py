"""A server in a process of its own: started, found by the address it prints, measured, stopped."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

_LISTENING = re.compile(r"listening on (\S+)")
_START_SECONDS = 60.0
_STOP_SECONDS = 30.0
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


class ServerProcess:
    """A running server. `address` is what it said it listens on."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.pid = process.pid
        self.address = address

    def cpu_seconds(self) -> float:
        """User and system time of all its threads so far, to a hundredth of a second."""
        stat = Path(f"/proc/{self.pid}/stat").read_text(encoding="ascii")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / _TICKS_PER_SECOND

    def resident_bytes(self, which: str = "VmRSS") -> int:
        """Now; "VmHWM": the most since the last `forget_peak`."""
        lines = Path(f"/proc/{self.pid}/status").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{which}:"))

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5", encoding="ascii")


@asynccontextmanager
async def server_process(arguments: Sequence[str]) -> AsyncIterator[ServerProcess]:
    """Runs `python *arguments` until the block is left; its standard output goes to this one's standard error."""
    root = str(Path(__file__).parent.parent)
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))},
        # Ctrl-C reaches the benchmark alone, which then stops its servers in order.
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(_START_SECONDS):
            address = await _read_address(process)
        yield ServerProcess(process, address)
    finally:
        await _stop(process)


async def _read_address(process: asyncio.subprocess.Process) -> str:
    assert process.stdout is not None
    async for raw in process.stdout:
        line = raw.decode(errors="replace").rstrip()
        if found := _LISTENING.search(line):
            return found[1]
        print(line, file=sys.stderr)
    raise RuntimeError(f"the server ended with {await process.wait()} before it listened")


async def _stop(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.send_signal(signal.SIGTERM)
    try:
        async with asyncio.timeout(_STOP_SECONDS):
            await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
