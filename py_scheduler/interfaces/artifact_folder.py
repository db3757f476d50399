"""The folder that steps write to: whose it is, and how the loop writes to it.

Invariants
  1. One holder at a time: the lock of a file in it goes with the process, also with one that is killed.
  2. Work in a thread has ended when its call returns, raises or is cancelled: what one step writes never meets what
     the next one writes.
  3. What the disk refuses is told as an error that names the folder and the way out.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from py_scheduler.errors import FailedPreconditionError, ResourceExhaustedError
from py_scheduler.rollout.files.iteration_summary import DETAILS_FOLDER
from py_scheduler.rollout.files.paths import drop_unfinished

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

T = TypeVar("T")

_log = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_FULL = (errno.ENOSPC, errno.EDQUOT)


class ArtifactFolder:
    """root: where it is, with links followed once and for all; None: nothing is kept."""

    def __init__(self, root: Path | None) -> None:
        self.root = None if root is None else root.resolve()
        self._lock: int | None = None

    def hold(self) -> None:
        """Makes the folder and keeps others out of it until `release`; may be called again.

        Raises FailedPreconditionError when another holds it or it cannot be made, ResourceExhaustedError.
        """
        if self.root is None or self._lock is not None:
            return
        with self.telling():
            self.root.mkdir(parents=True, exist_ok=True)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            self._lock = self._locked(os.open(self.root / LOCK_FILE, flags, 0o644), self.root)
            for folder in (self.root, self.root / DETAILS_FOLDER):
                drop_unfinished(folder)

    @staticmethod
    def _locked(handle: int, root: Path) -> int:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.truncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError as error:
            holder = os.pread(handle, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(handle)
            raise FailedPreconditionError(
                f"the artifact folder {root} is in use by another scheduler (process {holder}): stop that one, or give "
                "this one a folder of its own (rollout.artifact_dir)"
            ) from error
        except OSError:
            os.close(handle)
            raise
        return handle

    def release(self) -> None:
        """Lets others have it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    async def run(self, work: Callable[[], T]) -> T:
        """Does `work`, which reads or writes files, in a thread. A cancellation is raised when it has ended."""
        running = asyncio.ensure_future(asyncio.to_thread(self._told, work))
        try:
            return await asyncio.shield(running)
        except asyncio.CancelledError:
            while not running.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([running])
            if not running.cancelled() and (error := running.exception()) is not None:
                _log.warning("what was cancelled failed besides: %s", error)
            raise

    def _told(self, work: Callable[[], T]) -> T:
        with self.telling():
            return work()

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tells what the disk refuses in words for whoever asked. Raises ResourceExhaustedError,
        FailedPreconditionError.
        """
        try:
            yield
        except OSError as error:
            _log.warning("the artifact folder %s: %s", self.root, error)
            name = self.root.name if self.root is not None else ""
            # Its name alone: where it is, is not every caller's business.
            file = f" of {Path(os.fsdecode(error.filename)).name!r}" if isinstance(error.filename, str | bytes) else ""
            reason = error.strerror or type(error).__name__
            if error.errno in _FULL:
                raise ResourceExhaustedError(
                    f"the artifact folder {name!r} has no room left ({reason}): make room, then execute the step again"
                ) from error
            raise FailedPreconditionError(
                f"the artifact folder {name!r} cannot be used, because{file} the system says: {reason}. Put that "
                "right, or name another folder (rollout.artifact_dir), then execute the step again"
            ) from error
