"""Whether a file is still the one that was read, without reading it."""

from __future__ import annotations

from pathlib import Path

FileStamp = tuple[int, int, int, int]


def file_stamp(path: str | Path) -> FileStamp | None:
    """Differs from an earlier one after every change of content, permissions or name; None while there is no file.

    The change time is in it, because who gives a file its permissions back, or copies an older one over it with its
    times, leaves its modification time alone.
    """
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return found.st_ctime_ns, found.st_mtime_ns, found.st_size, found.st_ino
