"""Paths under one root, and files that appear complete or not at all."""

from __future__ import annotations

import os
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import BinaryIO


def resolve_under(root: Path, relative: str, field: str = "path", *, follow_links: bool = False) -> Path:
    """The path below `root`. Raises InvalidArgumentError for one that leads out of it, or over a symbolic link.

    follow_links: links are taken, as long as they stay inside.
    """
    given = Path(relative)
    if not relative or given.is_absolute() or ".." in given.parts or "\0" in relative:
        raise InvalidArgumentError(f"is {relative!r}, must be relative, without '..'", field)
    plain = root.resolve() / given
    resolved = plain.resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise InvalidArgumentError(f"{relative!r} leads out of its folder over a symbolic link", field)
    if not follow_links and resolved != plain:
        raise InvalidArgumentError(f"{relative!r} is, or goes over, a symbolic link: take it away", field)
    return plain


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name, durably, when the block ends without an exception.

    Folders are made as needed.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    # O_NOFOLLOW: a link that somebody put there is not written through.
    flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        with os.fdopen(os.open(unfinished, flags, 0o644), "w+b") as sink:
            yield sink
            sink.flush()
            os.fsync(sink.fileno())
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes what was renamed or linked in it durable."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
