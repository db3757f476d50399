"""System calls that the sandbox refuses, by a filter (seccomp) that nothing inside can take off again.

It closes what namespaces and limits leave open: sockets that no network namespace holds, the keyrings of the server,
memory that no limit of a process counts, and user namespaces, in which a command would have all rights.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct

from py_scheduler.adapters.sandbox.walls import _LIBC, _call

_KEYRINGS = ("add_key", "request_key", "keyctl")
_UNCOUNTED_MEMORY = ("memfd_create", "memfd_secret", "shmget", "msgget", "semget")
_NAMESPACES = ("unshare",)
# It makes calls in a command's name, past any filter.
_OTHERS = ("io_uring_setup",)
_REFUSED = (*_KEYRINGS, *_UNCOUNTED_MEMORY, *_NAMESPACES, *_OTHERS)
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_FAMILIES = (_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK)
_CLONE_NEWUSER = 0x10000000

_SHARED = {"io_uring_setup": 425, "clone3": 435, "memfd_secret": 447}
_X86_64 = _SHARED | {
    "shmget": 29,
    "socket": 41,
    "clone": 56,
    "semget": 64,
    "msgget": 68,
    "add_key": 248,
    "request_key": 249,
    "keyctl": 250,
    "unshare": 272,
    "memfd_create": 319,
}
_GENERIC = _SHARED | {
    "unshare": 97,
    "msgget": 186,
    "semget": 190,
    "shmget": 194,
    "socket": 198,
    "add_key": 217,
    "request_key": 218,
    "keyctl": 219,
    "clone": 220,
    "memfd_create": 279,
}
_MACHINES = {"x86_64": (0xC000003E, _X86_64), "aarch64": (0xC00000B7, _GENERIC), "riscv64": (0xC00000F3, _GENERIC)}
"""The kernel's names of architectures, and their numbers of calls."""

_PR_SET_SECCOMP, _FILTER = 22, 2
_LOAD, _IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16
"""Where they stand in what a filter sees of a call; of the argument its lower half."""
_ALLOW, _KILL, _FAIL = 0x7FFF0000, 0x80000000, 0x00050000
_FIRST_OF_X32 = 0x40000000
"""x86-64 has its calls a second time from here on, for a kind of program that nobody has."""

_Line = tuple[int, int, int, int]


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("lines", ctypes.c_char_p))


def refuse_calls() -> None:
    """For this process and all it will start, which must be barred from gaining rights."""
    machine = os.uname().machine
    if machine not in _MACHINES:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS), f"system call filter of {machine}")
    lines = _lines(*_MACHINES[machine])
    program = _Program(len(lines), b"".join(struct.pack("=HBBI", *line) for line in lines))
    _call("system call filter", _LIBC.prctl(_PR_SET_SECCOMP, _FILTER, ctypes.byref(program), 0, 0))


def _lines(architecture: int, numbers: dict[str, int]) -> list[_Line]:
    lines = [
        _load(_ARCHITECTURE),
        (_IF_EQUAL, 1, 0, architecture),
        _end(_KILL),
        _load(_NUMBER),
        *_when(_IF_AT_LEAST, _FIRST_OF_X32, _end(_KILL)),
    ]
    for name in _REFUSED:
        lines += _when(_IF_EQUAL, numbers[name], _fail(errno.EPERM))
    # Its flags lie where no filter can look. The C library then takes `clone`.
    lines += _when(_IF_EQUAL, numbers["clone3"], _fail(errno.ENOSYS))
    new_users = _when(_IF_ANY_BIT, _CLONE_NEWUSER, _fail(errno.EPERM))
    lines += _when(_IF_EQUAL, numbers["clone"], _load(_FIRST_ARGUMENT), *new_users, _end(_ALLOW))
    families = [line for family in _FAMILIES for line in _when(_IF_EQUAL, family, _end(_ALLOW))]
    lines += _when(_IF_EQUAL, numbers["socket"], _load(_FIRST_ARGUMENT), *families, _fail(errno.EAFNOSUPPORT))
    return [*lines, _end(_ALLOW)]


def _load(offset: int) -> _Line:
    return (_LOAD, 0, 0, offset)


def _when(condition: int, value: int, *then: _Line) -> list[_Line]:
    return [(condition, 0, len(then), value), *then]


def _end(action: int) -> _Line:
    return (_RETURN, 0, 0, action)


def _fail(number: int) -> _Line:
    return _end(_FAIL | number)
