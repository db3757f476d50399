"""Children as processes of this machine. Implements `domain.runners.runner.ChildHost`.

Invariants
  1. A child is a fresh program, never a fork, in a session of its own: to kill it kills what its handler has started.
  2. Its environment holds the listed names of the server's own and what the server sets, nothing else. A variable that
     changes how programs are loaded never gets there, listed or not.
  3. A child ends with the server: by the kernel's signal, and when it sees its socket closed.
  4. `on_end` comes after its last frame, once nothing of it runs any more.
  5. A session is signalled only while its first process, ended or not, has not been reaped: afterwards its number may
     be another session's.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.adapters.children.framed_child import FramedChild
from py_scheduler.adapters.children.frames import FrameProtocol
from py_scheduler.domain.runners.runner import is_forbidden
from py_scheduler.errors import RunnerStartError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.runners.runner import RunnerKey, RunnerSettings

_PR_SET_PDEATHSIG = 1
_BOOT = (
    "import ctypes, json, os, signal, sys; "
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL); "
    "os.getppid() == int(sys.argv[2]) or os._exit(0); "
    "sys.path[:] = json.loads(sys.argv[3]); from py_scheduler.child_main import main; main(int(sys.argv[1]))"
)
"""It ends with the server from its first moment on. It looks at its parent, too: the server may have ended before the
kernel was asked.
"""
GPU_VARIABLE = "CUDA_VISIBLE_DEVICES"
_EOF_SECONDS = 1.0
"""How long a child may take to end by itself once its socket is closed, and its socket to close once it has ended."""
_STDERR = 2
_MIB = 1 << 20


class ProcessHost:
    """Starts and ends children."""

    kind = "process"

    async def open(self) -> None: ...

    def key_of(self, token: PlacementToken) -> RunnerKey:
        # Children run on this machine, whatever node the token names.
        return ("", tuple(token.gpu_ids))

    async def launch(self, key: RunnerKey, settings: RunnerSettings) -> ProcessChild:
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                _, protocol = await asyncio.get_running_loop().create_unix_connection(FrameProtocol, sock=ours)
            except BaseException:
                ours.close()
                raise
            try:
                return _start(theirs.fileno(), child_environment(os.environ, key, settings), protocol)
            except (OSError, RuntimeError) as error:
                protocol.close()
                raise RunnerStartError(f"no process could be started: {error}") from error

    async def close(self) -> None: ...


def _start(descriptor: int, environment: dict[str, str], protocol: FrameProtocol) -> ProcessChild:
    """Takes about a millisecond of the loop's time. Raises OSError, RuntimeError for want of processes or threads.

    Not a loop's own subprocess: uvloop forks and goes on for a while before it execs, and children were seen to crash
    there. Not in a thread: the kernel would end a child with that thread.
    """
    process = subprocess.Popen(  # noqa: S603 -- this program itself
        [
            sys.executable,
            # Neither the environment nor the folder that it starts in decides what it imports.
            "-I",
            "-c",
            _BOOT,
            str(descriptor),
            str(os.getpid()),
            json.dumps(import_path()),
        ],
        pass_fds=[descriptor],
        stdin=subprocess.DEVNULL,
        # What handlers print is no part of the server's own standard output.
        stdout=_STDERR,
        env=environment,
        start_new_session=True,
    )
    try:
        return ProcessChild(process, protocol)
    except BaseException:
        _kill_session_of(process)
        process.wait()
        raise


class ProcessChild(FramedChild):
    """One process."""

    def __init__(self, process: subprocess.Popen[bytes], protocol: FrameProtocol) -> None:
        self._process = process
        self._loop = asyncio.get_running_loop()
        self._exited = asyncio.Event()
        threading.Thread(target=self._wait, name=f"wait for {process.pid}", daemon=True).start()
        super().__init__(process.pid, protocol)

    def resident_mib(self) -> float | None:
        try:
            pages = int(Path(f"/proc/{self.pid}/statm").read_text(encoding="ascii").split()[1])
        except (OSError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE") / _MIB

    @property
    def _has_ended(self) -> bool:
        return self._exited.is_set()

    def _end_by_force(self) -> None:
        if self._process.returncode is None:
            _kill_session_of(self._process)

    def _wait(self) -> None:
        """In a thread: nothing else tells every kind of loop that a process has ended. `_end` reaps it."""
        with suppress(ChildProcessError):  # Other code of this program has reaped it: it has ended.
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        try:
            self._loop.call_soon_threadsafe(self._exited.set)
        except RuntimeError:  # The loop is closed: nobody asks any more.
            self._process.wait()

    async def _end(self) -> str:
        exited = asyncio.ensure_future(self._exited.wait())
        lost = asyncio.ensure_future(self._protocol.lost.wait())
        await asyncio.wait([exited, lost], return_when=asyncio.FIRST_COMPLETED)
        if not exited.done():
            await asyncio.wait([exited], timeout=_EOF_SECONDS)
        # Programs that its handler has started may hold the socket open, and are of no use without it.
        self._end_by_force()
        await exited
        return_code = self._process.wait()  # It has ended.
        if not lost.done():
            # A program that has left the session may hold the other end open for ever. The child's own last frames are
            # read by then.
            await asyncio.wait([lost], timeout=_EOF_SECONDS)
            self._protocol.close()
        await lost
        return how_it_ended(return_code)


def _kill_session_of(process: subprocess.Popen[bytes]) -> None:
    """The process must not have been reaped."""
    with suppress(ProcessLookupError, PermissionError):  # Nothing of it is left.
        os.killpg(process.pid, signal.SIGKILL)


def import_path() -> list[str]:
    """Where this process finds its modules, whatever folder others are started in."""
    return [str(Path(folder).absolute()) for folder in sys.path]


def how_it_ended(return_code: int) -> str:
    """`exit status 1`, `signal SIGKILL`."""
    if return_code >= 0:
        return f"exit status {return_code}"
    try:
        return f"signal {signal.Signals(-return_code).name}"
    except ValueError:
        return f"signal {-return_code}"


def child_environment(environment: Mapping[str, str], key: RunnerKey, settings: RunnerSettings) -> dict[str, str]:
    """The listed names of the server's own environment, and the GPUs of the token."""
    said = {name: environment[name] for name in settings.environment if name in environment and not is_forbidden(name)}
    _node_ip, gpu_ids = key
    if gpu_ids is not None:
        said[GPU_VARIABLE] = ",".join(map(str, gpu_ids))
    elif GPU_VARIABLE in environment:
        said[GPU_VARIABLE] = environment[GPU_VARIABLE]
    return said
