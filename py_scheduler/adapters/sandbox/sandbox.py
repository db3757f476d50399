"""The sandbox: commands in child processes that are kept from the network, from other files and from the machine.

What is in force, where the kernel lets an ordinary user make namespaces (`network = "deny"` needs that):

- no network at all, not even this machine's own; no other process is to be seen or signalled;
- a root of its own: the system's programs and libraries, Python and `readable_paths`, all read-only; one folder to
  write to, the episode's, which stands there as /sandbox and is HOME and TMPDIR. No /proc, no sockets of this machine;
- a server that runs as root leaves root for nobody; no program can gain rights (no_new_privs, no user namespaces);
- system calls that would pass by all this are refused: sockets other than local, IP and netlink ones (vsock leads to
  the host of a virtual machine), kernel keyrings, io_uring, 32-bit programs, and memory that no limit of a process
  counts (memfd, System V shared memory, message queues and semaphores);
- limits of wall and processor time, memory of each process, number of processes, size of each file, open files; no
  core files; output within bytes; standard input is empty, no descriptor and no environment variable is handed down.

Without namespaces, which needs `network = "allow"`: Landlock keeps the command to the same files, system calls are
refused and the limits stand as above, but the number of processes is not bounded, the command runs as the server's user
and may use the network. A kernel older than 6.12 does not keep its signals inside then: it can kill the server.

What it does not do: it shares the kernel, so a fault of the kernel is a way out. Memory and files are bounded for each
process and file and not in sum: processes x memory_mib at most, and what the kernel holds for them beside that (pages
of files, and what waits in pipes and sockets, a few MiB for each of `open_files`); the disk takes any number of files.
Whatever lies under /usr can be read. For code that is hostile rather than merely unknown, run the whole server in a
virtual machine.

A child process starts anew for every command, some 0.1 s: nothing is kept from one to the next but the folder.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec

from py_scheduler.adapters.sandbox.walls import WORKDIR
from py_scheduler.domain.episodes.sandbox import PYTHON, SandboxResult
from py_scheduler.errors import InvalidArgumentError, SandboxError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

logger = logging.getLogger(__name__)

_START = "import sys; sys.path.append(sys.argv[1]); from py_scheduler.adapters.sandbox.child import main; main()"
_PACKAGE_FOLDER = str(Path(__file__).parents[3])
_SYSTEM = (
    "/bin",
    "/lib",
    "/lib32",
    "/lib64",
    "/libx32",
    "/sbin",
    "/usr",
    "/etc/alternatives",
    "/etc/ld.so.cache",
)
_SYSTEM_FOR_NETWORK = (
    "/etc/ca-certificates",
    "/etc/hosts",
    "/etc/nsswitch.conf",
    "/etc/pki",
    "/etc/resolv.conf",
    "/etc/ssl",
)
_ANSWER_SECONDS = 15.0
"""What the child may take beside the command's own time."""
_END_SECONDS = 5.0
_OWN_PROCESSES = 2
"""Supervisor and init count among the processes of their user."""

_Positive = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class SandboxSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How commands are kept. Units stand in the names; all limits but those of time and output are of one process."""

    timeout_seconds: _Positive = 10.0
    """Wall time, where a command is given none of its own."""
    cpu_seconds: _Count = 10
    """Of processor time."""
    memory_mib: _Count = 512
    """Of address space, which is more than what is used: a bare Python takes some 20."""
    processes: _Count = 32
    """Of one command, threads included."""
    file_mib: _Count = 16
    """Of one file that it writes."""
    open_files: _Count = 64
    """Descriptors at once."""
    max_output_bytes: _Count = 8_192
    """Of a longer output the beginning and the end are kept."""
    network: Literal["deny", "allow"] = "deny"
    """ "allow" leaves the network open, and is needed where the kernel grants no namespaces."""
    files: Literal["confine", "allow"] = "confine"
    """ "allow" does without any wall around files where neither namespaces nor Landlock are to be had."""
    python: str = ""
    """The interpreter, by an absolute path or a name in PATH; default: the one that this server's is made from, without
    its installed packages. What lies beside its bin/ is readable."""
    readable_paths: tuple[str, ...] = ()
    """More that commands may read, such as a virtual environment; absolute paths."""

    def __post_init__(self) -> None:
        """Raises InvalidArgumentError for what would depend on the server's working directory."""
        for path in self.readable_paths:
            if not Path(path).is_absolute() or not os.path.normpath(path).strip("/"):
                raise InvalidArgumentError(f"has {path!r}, must be absolute paths, and not /", "readable_paths")
        if self.python:
            found = self.python if "/" in self.python else shutil.which(self.python) or ""
            if not Path(found).is_absolute():
                raise InvalidArgumentError(
                    f"is {self.python!r}, must be an absolute path or the name of a program that PATH leads to",
                    "python",
                )
            msgspec.structs.force_setattr(self, "python", found)


class _Walls(msgspec.Struct, frozen=True):
    """One way to keep a command, and what it is called."""

    namespaces: bool
    landlock: bool

    def describe(self, settings: SandboxSettings, report: _Report) -> tuple[str, ...]:
        network = "no network" if settings.network == "deny" else "network open"
        always = ("system calls filtered", "limits")
        if not self.namespaces:
            return (network, "files confined by Landlock" if self.landlock else "files open", *always)
        user = ("user nobody instead of root",) if report.drops_root else ()
        return (network, "own processes", "own root file system", *user, *always)


class _Report(msgspec.Struct, frozen=True):
    """What the child answers; `failure` alone when it is not the command that ended."""

    failure: str = ""
    exit_code: int | None = None
    signal: str = ""
    timed_out: bool = False
    output: str = ""
    dropped_bytes: int = 0
    seconds: float = 0.0
    drops_root: bool = False


class ProcessSandbox:
    """Implements `domain.episodes.sandbox.Sandbox`."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self._settings = settings or SandboxSettings()
        self._python = self._settings.python or _own_python()
        self._readable = [*_outermost(self._readable_paths())]
        self._walls: _Walls | None = None
        self._in_force: tuple[str, ...] = ()

    def probe(self) -> tuple[str, ...]:
        """Runs a command that does nothing, once, and says in words which walls stand. Blocks some 0.1 s.

        Raises SandboxError with the way out when a wall that the settings ask for cannot be had.
        """
        if self._walls is None:
            self._walls, report = self._first_that_holds()
            self._in_force = self._walls.describe(self._settings, report)
            level = logging.INFO if self._walls.namespaces else logging.WARNING
            logger.log(level, "sandbox: %s", ", ".join(self._in_force))
        return self._in_force

    async def run(
        self,
        command: Sequence[str],
        *,
        workdir: Path,
        files: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        """See the port."""
        if self._walls is None:
            await asyncio.to_thread(self.probe)
        assert self._walls is not None
        seconds = self._settings.timeout_seconds if timeout_seconds is None else timeout_seconds
        line = self._request(self._walls, command, workdir, files or {}, seconds, max_output_bytes)
        report = await _converse(line, seconds + _ANSWER_SECONDS)
        if report.failure:
            raise SandboxError(f"the sandbox failed at {report.failure}")
        return SandboxResult(
            exit_code=report.exit_code,
            signal=report.signal,
            timed_out=report.timed_out,
            output=report.output,
            dropped_bytes=report.dropped_bytes,
            seconds=report.seconds,
        )

    def _first_that_holds(self) -> tuple[_Walls, _Report]:
        settings = self._settings
        ways = [_Walls(namespaces=True, landlock=False)]
        if settings.network == "allow":
            ways.append(_Walls(namespaces=False, landlock=True))
            if settings.files == "allow":
                ways.append(_Walls(namespaces=False, landlock=False))
        failures = []
        for walls in ways:
            with tempfile.TemporaryDirectory(prefix="py-scheduler-sandbox-") as folder:
                line = self._request(walls, (PYTHON, "-c", ""), Path(folder), {}, settings.timeout_seconds)
                report = _ask(line)
            if not report.failure and report.exit_code != 0:
                report = _Report(
                    failure=f"{self._python}: {report.output.strip() or report.signal or 'no exit code 0'}"
                )
            if not report.failure:
                return walls, report
            failures.append(report.failure)
        way_out = self._way_out(failures[-1])
        raise SandboxError(f"the sandbox cannot be had here, it failed at {'; '.join(failures)}. {way_out}")

    def _way_out(self, failure: str) -> str:
        if failure.startswith(self._python):
            return "Correct `python` and `readable_paths`, or raise the limits"
        if self._settings.network == "deny":
            return (
                "Let unprivileged users make namespaces on this machine (in containers: a seccomp profile that allows "
                'unshare and mount), or set network = "allow" to do without them, with the network open'
            )
        if self._settings.files == "confine":
            return 'Use a kernel with Landlock, or set files = "allow" to leave files open too'
        return "Correct `readable_paths`"

    def _request(
        self,
        walls: _Walls,
        command: Sequence[str],
        workdir: Path,
        files: Mapping[str, str],
        seconds: float,
        max_output_bytes: int | None = None,
    ) -> bytes:
        settings = self._settings
        limits = {
            "CPU": settings.cpu_seconds + 1,
            "AS": settings.memory_mib << 20,
            "FSIZE": settings.file_mib << 20,
            "NOFILE": settings.open_files,
            "CORE": 0,
        }
        if walls.namespaces:
            # Elsewhere it would count all that the server's user runs on this machine.
            limits["NPROC"] = settings.processes + _OWN_PROCESSES
        home = WORKDIR if walls.namespaces else str(workdir)
        request: dict[str, Any] = {
            "command": [self._python if command[0] == PYTHON else command[0], *command[1:]],
            "workdir": os.path.realpath(workdir),
            "files": {name: text.encode(errors="replace").decode() for name, text in files.items()},
            "environment": {
                "PATH": f"{Path(self._python).parent}:/usr/local/bin:/usr/bin:/bin",
                "HOME": home,
                "TMPDIR": home,
                "LANG": "C.UTF-8",
            },
            "timeout_seconds": seconds,
            "max_output_bytes": max_output_bytes or settings.max_output_bytes,
            "limits": limits,
            "namespaces": walls.namespaces,
            "landlock": walls.landlock,
            "network": settings.network == "allow",
            "readable": self._readable,
        }
        return msgspec.json.encode(request) + b"\n"

    def _readable_paths(self) -> Iterator[str]:
        yield from _SYSTEM
        if self._settings.network == "allow":
            yield from _SYSTEM_FOR_NETWORK
        # bin/ and lib/ lie beside one another, in an installation and in a virtual environment; those of / are there.
        for python in (self._python, os.path.realpath(self._python)):
            folder = Path(python).parent
            readable = folder.parent if folder.name == "bin" else Path(python)
            if readable != Path("/"):
                yield str(readable)
        yield from self._settings.readable_paths


def _outermost(paths: Iterator[str]) -> Iterator[str]:
    """Without those that lie in another one."""
    kept: list[str] = []
    for path in sorted({os.path.normpath(path) for path in paths}):
        if not any(path.startswith(f"{outer}/") for outer in kept):
            kept.append(path)
            yield path


def _own_python() -> str:
    """The interpreter that this one, or the virtual environment it is in, is made from."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


# The child


def _arguments() -> list[str]:
    # Isolated and without site-packages: nothing of the server's environment decides what is imported.
    return [sys.executable, "-I", "-S", "-c", _START, _PACKAGE_FOLDER]


def _ask(line: bytes) -> _Report:
    """One command from outside of an event loop."""
    with subprocess.Popen(  # noqa: S603 -- the command is this module's own
        _arguments(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={},
        start_new_session=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            process.stdin.write(line)
            # Not `communicate`, which would close standard input, and so stop the command.
            process.stdin.flush()
            return _read_report(process.stdout.read(), process.stderr.read())
        except BrokenPipeError:
            return _read_report(b"", process.stderr.read())
        finally:
            process.kill()


async def _converse(line: bytes, timeout_seconds: float) -> _Report:
    """One command. However this ends, the child has ended, and with it everything inside. Raises SandboxError."""
    try:
        process = await asyncio.create_subprocess_exec(
            *_arguments(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env={},
            start_new_session=True,
        )
    except OSError as error:
        raise SandboxError(f"the sandbox's child process does not start: {error}") from error
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        async with asyncio.timeout(timeout_seconds):
            process.stdin.write(line)
            return _read_report(await process.stdout.read(), await process.stderr.read())
    except TimeoutError:
        raise SandboxError(f"the sandbox's child process gave no report within {timeout_seconds:g} s") from None
    finally:
        process.stdin.close()
        await _ended(process)


async def _ended(process: asyncio.subprocess.Process) -> None:
    """Closing its standard input has told it to end; what is deaf to that is killed, which ends init too."""
    try:
        async with asyncio.timeout(_END_SECONDS):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()


def _read_report(answer: bytes, said: bytes) -> _Report:
    try:
        return msgspec.json.decode(answer, type=_Report)
    except msgspec.DecodeError:
        last = said.decode(errors="replace").strip().rpartition("\n")[2]
        return _Report(failure=f"its child process, which gave no report: {last or 'and said nothing'}")
