"""Folders of episodes' own: made when they are asked for, and gone after the episode.

Invariant: everything lies below one folder of this engine's, which goes with it, whatever was left in it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable


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
        """What cannot be removed now goes with the engine, if it can."""
        for path in paths:
            await asyncio.to_thread(_remove, path)

    async def close(self) -> None:
        """Removes everything that is still there."""
        if self._own is not None:
            await self.remove([self._own])
            self._own = None


def _remove(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)
    if path.exists():
        # An episode may have closed a folder to its own owner: open all of them, and try once more.
        path.chmod(0o700)
        for folder, names, _ in os.walk(path):
            for inner in (Path(folder, name) for name in names):
                if not inner.is_symlink():
                    inner.chmod(0o700)
        shutil.rmtree(path, ignore_errors=True)
