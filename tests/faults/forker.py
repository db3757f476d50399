"""A warm process that forks the others: a server is up in a tenth of a second instead of one or more.

Run as a program it imports all that servers and clients need, then forks on demand: one JSON `Fork` a line on its
standard input, the new process's id on its standard output. Whatever it forked ends with it, and it ends with its
input.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import signal
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tests.support.servers.served_process import ROOT

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

_MODULES = (
    *("py_scheduler.app", "py_scheduler.app.journal", "py_scheduler.cli", "uvloop", "tests.faults.handlers"),
    *("tests.faults.served", "tests.faults.chaos_client"),
)
_LISTENING = b"listening on "


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Runs `run(arguments)` of a module, whose result is the exit status, with these variables added."""

    module: str
    arguments: list[str]
    environment: dict[str, str]
    log: str


class Reap(msgspec.Struct, frozen=True, tag=True):
    """Waits for the end of a child; answered with its status, negative for a signal."""

    pid: int


def main() -> None:
    loaded = {name: importlib.import_module(name) for name in _MODULES}
    assert loaded
    gc.freeze()
    children: set[int] = set()
    try:
        for line in sys.stdin.buffer:
            order = msgspec.json.decode(line, type=Fork | Reap)
            if isinstance(order, Reap):
                _, status = os.waitpid(order.pid, 0)
                children.discard(order.pid)
                answer = os.waitstatus_to_exitcode(status)
            else:
                answer = os.fork()
                if answer == 0:
                    _become(order)
                children.add(answer)
            sys.stdout.write(f"{answer}\n")
            sys.stdout.flush()
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)


def _become(order: Fork) -> None:
    """In the child; does not return. Its standard output stays the forker's: that is where a server says it is up."""
    status = 1
    try:
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 2)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.environ.update(order.environment)
        status = importlib.import_module(order.module).run(order.arguments)
    except BaseException:  # noqa: BLE001 - nothing of the forker's own may run on in the child
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stderr.flush()
        os._exit(status)


class Forker:
    """The other end of a running forker. `is_up`: the last server that was forked said that it listens."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self._answers: asyncio.Queue[int] = asyncio.Queue()
        self._turn = asyncio.Lock()
        self.is_up = asyncio.Event()

    async def read(self) -> None:
        assert self._process.stdout is not None
        async for line in self._process.stdout:
            if line.startswith(_LISTENING):
                self.is_up.set()
            else:
                self._answers.put_nowait(int(line))

    async def _ask(self, order: Fork | Reap) -> int:
        assert self._process.stdin is not None
        async with self._turn:
            self._process.stdin.write(msgspec.json.encode(order) + b"\n")
            return await self._answers.get()

    async def fork(self, module: str, arguments: list[str], log: Path, environment: dict[str, str]) -> Child:
        return Child(self, await self._ask(Fork(module, arguments, environment, str(log))))

    async def reap(self, pid: int) -> int:
        return await self._ask(Reap(pid))


class Child:
    """A forked process."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker = forker
        self.pid = pid

    def signal(self, number: signal.Signals) -> None:
        """Until it is reaped there is such a process, be it dead."""
        os.kill(self.pid, number)

    async def ended(self) -> int:
        """Its exit status, negative for a signal, once it has ended."""
        descriptor = os.pidfd_open(self.pid)
        over = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(descriptor, over.set)
        try:
            await over.wait()
        finally:
            loop.remove_reader(descriptor)
            os.close(descriptor)
        return await self._forker.reap(self.pid)


@asynccontextmanager
async def warm_forker() -> AsyncIterator[Forker]:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "tests.faults.forker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    forker = Forker(process)
    reading = asyncio.create_task(forker.read())
    try:
        yield forker
    finally:
        assert process.stdin is not None
        process.stdin.close()
        await process.wait()
        await reading


if __name__ == "__main__":
    main()
