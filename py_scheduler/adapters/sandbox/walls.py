"""The walls of the sandbox, asked of the kernel by ctypes: namespaces with a root of their own, or Landlock.

Used by the sandbox's child process alone, which has one thread. Every function raises OSError, whose `filename` says
what was asked for.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import stat
import struct

NOBODY = 65_534
WORKDIR = "/sandbox"
_NEW_ROOT = "/tmp"  # noqa: S108 - any folder that exists everywhere; what is in it is only hidden from this process
_DEVICES = ("/dev/full", "/dev/null", "/dev/random", "/dev/urandom", "/dev/zero")

_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWNS, _CLONE_NEWIPC, _CLONE_NEWUSER = 0x00020000, 0x08000000, 0x10000000
_CLONE_NEWPID, _CLONE_NEWNET = 0x20000000, 0x40000000
_MS_NOSUID, _MS_NODEV, _MS_BIND, _MS_REC, _MS_PRIVATE = 0x2, 0x4, 0x1000, 0x4000, 0x40000
_MNT_DETACH = 2
_AT_FDCWD, _AT_RECURSIVE = -100, 0x8000
_MOUNT_ATTR_RDONLY, _MOUNT_ATTR_NOSUID, _MOUNT_ATTR_NODEV = 0x1, 0x2, 0x4
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
# The same on all architectures that this is likely to meet.
_SYS_MOUNT_SETATTR, _SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 442, 444, 445, 446


def _call(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), what)
    return result


def die_with_parent() -> None:
    _call("parent death signal", _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def adopt_orphans() -> None:
    """Processes beneath this one whose parent ends become its children."""
    _call("subreaper", _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))


def gain_no_rights() -> None:
    """No program started from here on gets more rights than this process has, whatever its file's mode says."""
    _call("no_new_privs", _LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))


# Namespaces


def enter_namespaces(*, has_network: bool) -> bool:
    """Own users, mounts, processes and (unless it is let be) network. Whether root was left for nobody."""
    ready_read, ready_write = os.pipe()
    supervisor = os.getpid()
    if os.geteuid() == 0:
        _drop_groups()
    mapper = os.fork()
    if mapper == 0:
        code = 1
        try:
            os.close(ready_write)
            if os.read(ready_read, 1):
                code = _map_users(supervisor)
        finally:
            os._exit(code)
    os.close(ready_read)
    flags = _CLONE_NEWUSER | _CLONE_NEWNS | _CLONE_NEWPID | _CLONE_NEWIPC | (0 if has_network else _CLONE_NEWNET)
    try:
        _call("namespaces", _LIBC.unshare(flags))
        os.write(ready_write, b"+")
    finally:
        os.close(ready_write)
        _, status = os.waitpid(mapper, 0)
    code = os.waitstatus_to_exitcode(status)
    if code not in {_MAPPED_ONE, _MAPPED_TWO}:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM), "user mapping")
    return code == _MAPPED_TWO


_MAPPED_ONE, _MAPPED_TWO = 10, 11


def _drop_groups() -> None:
    try:
        os.setgroups([])
    except PermissionError:
        # A container's root may not; it has its groups' rights then, which its uid gives it anyway.
        pass


def _map_users(process: int) -> int:
    """Run outside, since only from there may root map a second user: the one that commands run as.

    Root inside builds the walls and is left before the command starts. Without it nobody stands for the user outside.
    """
    uid, gid = os.geteuid(), os.getegid()
    if uid == 0:
        try:
            _write_maps(process, f"0 0 1\n{NOBODY} {NOBODY} 1\n", f"0 {gid} 1\n{NOBODY} {NOBODY} 1\n")
        except OSError:
            pass
        else:
            return _MAPPED_TWO
    _write_maps(process, f"{NOBODY} {uid} 1\n", f"{NOBODY} {gid} 1\n")
    return _MAPPED_ONE


def _write_maps(process: int, users: str, groups: str) -> None:
    for name, text in (("uid_map", users), ("setgroups", "deny"), ("gid_map", groups)):
        descriptor = os.open(f"/proc/{process}/{name}", os.O_WRONLY)
        os.write(descriptor, text.encode())
        os.close(descriptor)


# A root of its own


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    texts = (text if text is None else os.fsencode(text) for text in (source, target, kind))
    result = _LIBC.mount(*texts, ctypes.c_ulong(flags), None if data is None else data.encode())
    _call(f"mount of {target}", result)


def _set_mount_attributes(path: str, attributes: int) -> None:
    value = ctypes.create_string_buffer(struct.pack("=QQQQ", attributes, 0, 0, 0))
    result = _LIBC.syscall(_SYS_MOUNT_SETATTR, _AT_FDCWD, os.fsencode(path), _AT_RECURSIVE, value, ctypes.c_size_t(32))
    _call(f"mount_setattr of {path}", result)


def enter_new_root(workdir: str, readable: list[str], owner: int | None) -> None:
    """A root that holds nothing but what is named here, all of it read-only but the working directory."""
    _mount(None, "/", None, _MS_REC | _MS_PRIVATE)
    if owner is not None:
        os.chown(workdir, owner, owner)
    # Opened before the new root hides some of them.
    opened_workdir = os.open(workdir, os.O_PATH | os.O_DIRECTORY)
    links = {path: os.readlink(path) for path in readable if os.path.islink(path)}
    sources = {
        path: os.open(path, os.O_PATH) for path in (*readable, *_DEVICES) if os.path.exists(path) and path not in links
    }
    _mount("tmpfs", _NEW_ROOT, "tmpfs", _MS_NOSUID | _MS_NODEV, "mode=755")
    for path, descriptor in sources.items():
        _bind(descriptor, _NEW_ROOT + path)
    for path, target in links.items():
        os.makedirs(os.path.dirname(_NEW_ROOT + path), exist_ok=True)
        os.symlink(target, _NEW_ROOT + path)
    os.mkdir(_NEW_ROOT + WORKDIR)
    for path in ("/tmp", "/dev/shm"):  # noqa: S108 - names of the new root
        if not os.path.lexists(_NEW_ROOT + path):
            os.symlink(WORKDIR, _NEW_ROOT + path)
    _set_mount_attributes(_NEW_ROOT, _MOUNT_ATTR_RDONLY | _MOUNT_ATTR_NOSUID)
    _bind(opened_workdir, _NEW_ROOT + WORKDIR)
    _set_mount_attributes(_NEW_ROOT + WORKDIR, _MOUNT_ATTR_NOSUID | _MOUNT_ATTR_NODEV)
    os.chdir(_NEW_ROOT)
    _call("pivot_root", _LIBC.pivot_root(b".", b"."))
    _call("umount of the old root", _LIBC.umount2(b".", _MNT_DETACH))
    os.chdir(WORKDIR)


def _bind(source: int, target: str) -> None:
    """Puts what is open at a new place, and closes it."""
    if stat.S_ISDIR(os.fstat(source).st_mode):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        os.close(os.open(target, os.O_WRONLY | os.O_CREAT))
    _mount(f"/proc/self/fd/{source}", target, None, _MS_BIND | _MS_REC)
    os.close(source)


# Landlock, in place of a new root where there are no namespaces

_READ, _WRITE_FILE = 0b1101, 0b10
"""Of the kernel's LANDLOCK_ACCESS_FS bits: execute, read files, read folders; write to what is there."""
_BITS_OF_ABI = {1: 13, 2: 14, 3: 15, 4: 15}
_SCOPE_ABI, _SCOPE_ALL = 6, 0b11


def restrict_files(workdir: str, readable: list[str]) -> None:
    """Reads nothing but what is named, writes nothing but the working directory; newer kernels also keep signals and
    abstract sockets inside.
    """
    abi = _call("landlock", _LIBC.syscall(_SYS_LANDLOCK_CREATE, None, ctypes.c_size_t(0), 1))
    everything = (1 << _BITS_OF_ABI.get(abi, 16)) - 1
    scope = _SCOPE_ALL if abi >= _SCOPE_ABI else 0
    attributes = struct.pack("=QQQ", everything, 0, scope)[: 24 if scope else 8]
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    ruleset = _call("landlock", _LIBC.syscall(_SYS_LANDLOCK_CREATE, buffer, ctypes.c_size_t(len(attributes)), 0))
    rules = {
        **dict.fromkeys(readable, _READ),
        **dict.fromkeys(_DEVICES, _READ | _WRITE_FILE),
        workdir: everything,
    }
    for path, allowed in rules.items():
        if not os.path.exists(path):
            continue
        descriptor = os.open(path, os.O_PATH)
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            allowed &= 0b111  # noqa: PLW2901 - what is meant for folders is refused for files
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor), 12)
        _call(f"landlock of {path}", _LIBC.syscall(_SYS_LANDLOCK_ADD, ruleset, 1, rule, 0))
        os.close(descriptor)
    _call("landlock", _LIBC.syscall(_SYS_LANDLOCK_RESTRICT, ruleset, 0))
