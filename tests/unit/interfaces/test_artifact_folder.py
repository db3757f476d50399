"""The artifact folder: one holder, work that ends before anything else begins, and what the disk refuses."""

from __future__ import annotations

import asyncio
import errno
import os
import threading
from typing import TYPE_CHECKING

import pytest

from py_scheduler.errors import FailedPreconditionError, ResourceExhaustedError, SchedulerError
from py_scheduler.interfaces.artifact_folder import ArtifactFolder

if TYPE_CHECKING:
    from pathlib import Path


def test_a_folder_has_one_holder_until_it_is_released(tmp_path: Path) -> None:
    first, second = ArtifactFolder(tmp_path / "made"), ArtifactFolder(tmp_path / "made")
    first.hold()
    first.hold()
    with pytest.raises(FailedPreconditionError, match=rf"in use by another scheduler \(process {os.getpid()}\)"):
        second.hold()
    first.release()
    second.hold()
    second.release()


def test_what_a_killed_process_left_half_written_goes_when_the_folder_is_taken(tmp_path: Path) -> None:
    (tmp_path / "loop_state.json.0a1b2c3d.unfinished").write_text("{")
    (tmp_path / "kept.json").write_text("{}")
    folder = ArtifactFolder(tmp_path)
    folder.hold()
    folder.release()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "kept.json"]


async def test_a_cancelled_call_is_over_when_its_thread_is() -> None:
    folder = ArtifactFolder(None)
    loop = asyncio.get_running_loop()
    begun, gate = asyncio.Event(), threading.Event()
    done = []

    def work() -> None:
        loop.call_soon_threadsafe(begun.set)
        gate.wait()
        done.append(True)

    call = asyncio.create_task(folder.run(work))
    await begun.wait()
    for _ in range(2):
        call.cancel()
        await asyncio.sleep(0)
    assert not call.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert done


@pytest.mark.parametrize(
    ("number", "kind", "said"),
    [
        (errno.ENOSPC, ResourceExhaustedError, "artifact folder 'rollouts' has no room left"),
        (errno.EDQUOT, ResourceExhaustedError, "make room"),
        (errno.EROFS, FailedPreconditionError, "Read-only file system"),
        (errno.EACCES, FailedPreconditionError, "of 'x.parquet' the system says: Permission denied"),
    ],
)
async def test_what_the_disk_refuses_is_told_without_saying_where_it_is(
    number: int, kind: type[SchedulerError], said: str, tmp_path: Path
) -> None:
    def work() -> None:
        raise OSError(number, os.strerror(number), str(tmp_path / "rollouts" / "x.parquet"))

    with pytest.raises(kind, match=said) as caught:
        await ArtifactFolder(tmp_path / "rollouts").run(work)
    assert str(tmp_path) not in str(caught.value)
