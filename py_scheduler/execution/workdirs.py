"""Folders of the episodes' own: made when a handler asks for one, and removed after the episode.

Invariant: they all lie below one folder of this engine, which is removed with it, whatever was left there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_log = logging.getLogger(__name__)


class Workdirs:
    """`root` is where the engine's folder is made; None: where the system keeps temporary files."""

    def __init__(self, root: str | None = None) -> None:
        self._root = root
        self._own: Path | None = None

    def make(self, name: str) -> Path:
        """A fresh, empty folder that only this user can look into. `name` comes from ids of the server's making."""
        if self._own is None:
            if self._root is not None:
                Path(self._root).mkdir(parents=True, exist_ok=True)
            self._own = Path(tempfile.mkdtemp(prefix="py-scheduler-", dir=self._root))
        path = self._own / name
        path.mkdir(mode=0o700)
        return path

    async def remove(self, paths: Iterable[Path]) -> None:
        """Never raises: a folder that cannot be removed is logged, and removed with the engine if that can be done."""
        for path in paths:
            try:
                await asyncio.to_thread(_remove, path)
            except Exception as error:  # noqa: BLE001 - whatever an episode left there, the server goes on
                _log.warning("the folder %s of an episode stays: %s", path, error)

    async def close(self) -> None:
        """Removes everything that is still there."""
        if self._own is not None:
            await self.remove([self._own])
            self._own = None


_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW


def _remove(path: Path) -> None:
    """Takes a tree apart: moves each folder that it finds up to `path` and empties it there, so that none lies deep.

    A tree may be deeper than a path is long and than calls can nest, may be closed to its own owner, and may have
    filled the disk, so that nothing new can be made. Raises OSError when something stays.
    """
    if not path.exists():
        return
    path.chmod(0o700)
    heap = os.open(path, _OPEN_FOLDER)
    names = (f"{secrets.token_hex(8)}-{number}" for number in count())
    waiting: list[str] = []

    def empty(folder: int) -> None:
        with os.scandir(folder) as entries:
            found = sorted((entry.is_dir(follow_symlinks=False), entry.name) for entry in entries)
        for is_folder, name in found:
            with suppress(OSError):
                if is_folder:
                    os.chmod(name, 0o700, dir_fd=folder)
                    new_name = next(names)
                    os.rename(name, new_name, src_dir_fd=folder, dst_dir_fd=heap)
                    waiting.append(new_name)
                else:
                    os.unlink(name, dir_fd=folder)

    try:
        empty(heap)
        while waiting:
            name = waiting.pop()
            with suppress(OSError):
                folder = os.open(name, _OPEN_FOLDER, dir_fd=heap)
                try:
                    empty(folder)
                finally:
                    os.close(folder)
                os.rmdir(name, dir_fd=heap)
    finally:
        os.close(heap)
    path.rmdir()
