"""The child process of the sandbox: puts up the walls, starts the command behind them, watches it, reports.

    supervisor: this process, told what to run by one JSON line on standard input, reporting as JSON on standard output
      `- init: process 1 of a process namespace of its own
           `- the command, and whatever it starts

Invariants: once the report is written, nothing that the command started is alive; the same when standard input closes,
which is how the parent stops it, and when the supervisor is killed. A wall that was asked for and cannot be had is a
failure, and the command is not started. Once it is started, whatever comes is its result, even that init has ended.
Without namespaces (`namespaces: false`, which the parent chooses openly) there is no init, and processes are found by
their parents instead.

A process of its own because namespaces are entered by a process with one thread. It imports next to nothing, so that it
starts within milliseconds.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

from py_scheduler.adapters.sandbox.calls import refuse_calls
from py_scheduler.adapters.sandbox.walls import (
    NOBODY,
    adopt_orphans,
    die_with_parent,
    enter_namespaces,
    enter_new_root,
    gain_no_rights,
    restrict_files,
)

_PIECE_BYTES = 1 << 16
_CANNOT_START = 126


def main() -> None:
    request = json.loads(_read_line())
    try:
        report = _supervise(request)
    except OSError as error:
        report = {"failure": f"{error.filename or 'the supervisor'}: {error.strerror}"}
    sys.stdout.write(json.dumps(report))


def _read_line() -> bytes:
    """Unbuffered: what is left on standard input is waited for by its file descriptor."""
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, _PIECE_BYTES)
        if not piece:
            os._exit(0)
        line += piece
    return line


def _supervise(request: dict[str, Any]) -> dict[str, Any]:
    null = os.open("/dev/null", os.O_RDWR)
    output_read, output_write = os.pipe()
    notes_read, notes_write = os.pipe()
    leash_read, leash_write = os.pipe()
    drops_root = False
    if request["namespaces"]:
        drops_root = enter_namespaces(has_network=request["network"])
        enter_new_root(request["workdir"], request["readable"], owner=NOBODY if drops_root else None)
    else:
        if not os.access(request["workdir"], os.X_OK):
            os.chmod(request["workdir"], 0o700)  # an earlier command has closed its own folder
        os.chdir(request["workdir"])
        adopt_orphans()
        _children(os.getpid())  # a kernel that does not tell them could not be made to keep the first invariant
    child = os.fork()
    if child == 0:
        os.close(leash_write)
        try:
            if request["namespaces"]:
                _be_init(request, drops_root, leash_read, (null, output_write, notes_write))
            _be_command(request, (null, output_write, notes_write))
        except OSError as error:
            _note(notes_write, {"failure": f"init: {error.filename or ''} {error.strerror}"})
        finally:
            os._exit(1)
    os.close(output_write)
    os.close(notes_write)
    started = time.monotonic()
    os.write(leash_write, b"+")
    output = _Output(request["max_output_bytes"])
    timed_out = _watch(child, output_read, output, started + request["timeout_seconds"])
    status = _end(child, has_init=request["namespaces"])
    seconds = time.monotonic() - started
    output.read_rest(output_read)
    notes = _read_notes(notes_read)
    if "failure" in notes:
        return {"failure": notes["failure"]}
    if request["namespaces"] and "status" not in notes and not timed_out:
        if "begun" not in notes:
            return {"failure": "init: it was killed"}
        # The command has found a way to end init, which was its own end.
        status = signal.SIGKILL
    report = _report(notes.get("status", status), output, timed_out=timed_out)
    return {**report, "seconds": seconds, "drops_root": drops_root}


def _read_notes(descriptor: int) -> dict[str, Any]:
    """What was noted, in one: `begun` before the command takes over, then perhaps `failure`, then `status`."""
    notes: dict[str, Any] = {}
    for line in os.read(descriptor, _PIECE_BYTES).splitlines():
        notes |= json.loads(line)
    return notes


def _report(status: int, output: _Output, *, timed_out: bool) -> dict[str, Any]:
    code = os.waitstatus_to_exitcode(status)
    return {
        "exit_code": code if code >= 0 else None,
        "signal": _signal_name(-code) if code < 0 else "",
        "timed_out": timed_out,
        "output": output.text(),
        "dropped_bytes": output.dropped_bytes,
    }


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


# Watching and ending


class _Output:
    """The beginning and the end of what was written, within a limit: a flood costs nobody but this process time."""

    def __init__(self, max_bytes: int) -> None:
        self._half = max(1, max_bytes // 2)
        # Pieces are often small, and the limit need not be.
        self._head = bytearray()
        self._tail = bytearray()
        self._total = 0

    def read(self, descriptor: int) -> bool:
        piece = os.read(descriptor, _PIECE_BYTES)
        self._total += len(piece)
        room = self._half - len(self._head)
        self._head += piece[:room]
        self._tail += piece[room:]
        del self._tail[: -self._half]
        return bool(piece)

    def read_rest(self, descriptor: int) -> None:
        while self.read(descriptor):
            pass

    @property
    def dropped_bytes(self) -> int:
        return self._total - len(self._head) - len(self._tail)

    def text(self) -> str:
        between = f"\n[... {self.dropped_bytes} bytes are left out here ...]\n" if self.dropped_bytes else ""
        if not between:
            return (self._head + self._tail).decode(errors="replace")
        return self._head.decode(errors="replace") + between + self._tail.decode(errors="replace")


def _watch(child: int, output_read: int, output: _Output, deadline: float) -> bool:
    """Until the child ends, the parent lets go or the time is up (True)."""
    ended = os.pidfd_open(child)
    poller = select.poll()
    for descriptor in (ended, 0, output_read):
        poller.register(descriptor, select.POLLIN)
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            return True
        ready = {descriptor for descriptor, _ in poller.poll(left * 1_000)}
        if 0 in ready or ended in ready:
            return False
        if output_read in ready and not output.read(output_read):
            poller.unregister(output_read)


def _end(child: int, *, has_init: bool) -> int:
    """Ends what is left and returns the child's wait status. The end of init is that of everything beneath it."""
    if has_init:
        os.kill(child, signal.SIGKILL)
        return os.waitpid(child, 0)[1]
    status = 0
    while found := _descendants(os.getpid()):
        # Stopped first: what is killed one by one forks on meanwhile.
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for process in found:
                try:
                    os.kill(process, number)
                except ProcessLookupError:
                    pass
        for process in found:
            try:
                _, how = os.waitpid(process, 0)
            except ChildProcessError:
                continue  # a grandchild, which becomes a child with the end of its parent
            if process == child:
                status = how
    return status


def _descendants(parent: int) -> list[int]:
    found: list[int] = []
    parents = [parent]
    while parents:
        try:
            children = _children(parents.pop())
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        found += children
        parents += children
    return found


def _children(parent: int) -> list[int]:
    with open(f"/proc/{parent}/task/{parent}/children") as file:
        return [int(word) for word in file.read().split()]


# Inside


def _be_init(request: dict[str, Any], drops_root: bool, leash: int, descriptors: tuple[int, int, int]) -> None:
    """Process 1: starts the command, takes in orphans, and ends with the command, which ends all others."""
    if drops_root:
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    die_with_parent()
    # Process 1 gets those signals only that it has a handler for, and Python has one for this.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # A supervisor that died before that line cannot say this any more.
    if not os.read(leash, 1):
        os._exit(1)
    command = os.fork()
    if command == 0:
        _be_command(request, descriptors)
    _, output, notes = descriptors
    os.close(output)
    while True:
        process, status = os.wait()
        if process == command:
            _note(notes, {"status": status})
            os._exit(0)


def _be_command(request: dict[str, Any], descriptors: tuple[int, int, int]) -> None:
    """Becomes the command; never returns. What is not its own fault is noted as a failure."""
    null, output, notes = descriptors
    try:
        os.setsid()
        for target, source in ((0, null), (1, output), (2, output)):
            os.dup2(source, target)
        die_with_parent()
        gain_no_rights()
        if request["landlock"]:
            restrict_files(request["workdir"], request["readable"])
        refuse_calls()
        _write_files(request["files"])
        _limit(request["limits"])
        # Python ignores these, and what is ignored stays so in the programs it starts.
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
        _note(notes, {"begun": True})
        _execute(request["command"], request["environment"])
    except OSError as error:
        _note(notes, {"failure": f"{error.filename}: {error.strerror}"})
    except ValueError as error:
        _note(notes, {"failure": f"{request['command'][0]!r}: {error}"})
    finally:
        os._exit(_CANNOT_START)


def _execute(command: list[str], environment: dict[str, str]) -> None:
    try:
        os.execvpe(command[0], command, environment)  # noqa: S606
    except OSError as error:
        # It would name the last place of PATH instead.
        raise OSError(error.errno, error.strerror, command[0]) from None


def _note(notes: int, note: dict[str, object]) -> None:
    os.write(notes, json.dumps(note).encode() + b"\n")


def _limit(limits: dict[str, int]) -> None:
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        _, most = resource.getrlimit(kind)
        hard = limit if most == resource.RLIM_INFINITY else min(limit, most)
        # A second less in the soft limit of processor time: it says by its signal what the hard one does not.
        resource.setrlimit(kind, (max(1, hard - 1) if name == "CPU" else hard, hard))


def _write_files(files: dict[str, str]) -> None:
    """With the command's own rights: an earlier one may have left links there that lead elsewhere.

    It may also have put a folder in the way; that is its own doing, and so the command's failure.
    """
    for name, text in files.items():
        try:
            descriptor = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
            with open(descriptor, "w", encoding="utf-8", errors="replace") as file:
                file.write(text)
        except OSError as error:
            if error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EIO}:
                raise
            os.write(2, f"{name} cannot be written: {error.strerror}\n".encode())
            os._exit(_CANNOT_START)
