"""Paths under one root, and files that appear complete or not at all.

Invariant: what is written at the same time, be it under one name, never shares an unfinished file.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from io import BufferedReader
    from typing import BinaryIO

_UNFINISHED = ".unfinished"


def resolve_under(root: Path, relative: str, field: str = "path") -> Path:
    """The path below `root`. Raises InvalidArgumentError for one that leads out of it, or over a symbolic link."""
    given = Path(relative)
    if not relative or given.is_absolute() or ".." in given.parts or "\0" in relative:
        raise InvalidArgumentError(f"is {relative!r}, must be relative, without '..'", field)
    plain = root.resolve() / given
    resolved = plain.resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise InvalidArgumentError(f"{relative!r} leads out of its folder over a symbolic link", field)
    if resolved != plain:
        raise InvalidArgumentError(f"{relative!r} is, or goes over, a symbolic link: take it away", field)
    return plain


def open_regular(path: Path) -> BufferedReader:
    """For reading. Raises OSError, also for what is no file: a pipe would keep its reader waiting."""
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name, durably, when the block ends without an exception.

    Folders are made as needed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = unfinished_path(path)
    # O_EXCL: nothing that somebody put there is written to, or through.
    handle = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(handle, "w+b") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def unfinished_path(path: Path) -> Path:
    """A name beside `path` that nobody else uses, for what shall become it."""
    return path.with_name(f"{path.name}.{os.urandom(4).hex()}{_UNFINISHED}")


def drop_unfinished(folder: Path) -> None:
    """Removes what a killed process left half written in a folder that nobody writes to now."""
    for path in folder.glob(f"*{_UNFINISHED}"):
        with suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Makes what was renamed or linked in it durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
