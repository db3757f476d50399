"""Episodes' folders go away, whatever an episode did to them."""

from __future__ import annotations

import asyncio
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from py_scheduler.execution import workdirs as module
from py_scheduler.execution.workdirs import Workdirs

_CLOSES_ITS_FOLDER = """
import asyncio, concurrent.futures.thread, os, sys
from py_scheduler.execution.workdirs import Workdirs

async def main():
    if os.geteuid() == 0:  # whom no folder is closed to
        os.setgid(65534)
        os.setuid(65534)
    workdirs = Workdirs(sys.argv[1])
    path = workdirs.make("episode")
    inner = path / "closed"
    inner.mkdir()
    (inner / "file").write_text("kept from its owner")
    inner.chmod(0)
    await workdirs.remove([path])
    assert not path.exists(), "a closed folder stayed"
    await workdirs.close()

asyncio.run(main())
"""


def test_a_folder_that_was_closed_to_its_owner_is_removed() -> None:
    # Not pytest's own folder, which other users cannot reach.
    with tempfile.TemporaryDirectory() as root:
        Path(root).chmod(0o777)
        subprocess.run([sys.executable, "-c", _CLOSES_ITS_FOLDER, root], check=True, cwd=Path(__file__).parents[3])
        assert not list(Path(root).iterdir())


def grow(folder: Path, depth: int) -> None:
    """Folders in folders, with a file and a link out of there in each."""
    descriptor = os.open(folder, os.O_RDONLY)
    for _ in range(depth):
        os.mkdir("d", dir_fd=descriptor)
        inner = os.open("d", os.O_RDONLY, dir_fd=descriptor)
        os.close(descriptor)
        descriptor = inner
        os.close(os.open("file", os.O_CREAT, dir_fd=descriptor))
        os.symlink("/", "link", dir_fd=descriptor)
    os.close(descriptor)


async def test_a_tree_deeper_than_calls_nest_and_paths_are_long_is_removed(tmp_path: Path) -> None:
    workdirs = Workdirs(str(tmp_path))
    kept = workdirs.make("kept")
    path = workdirs.make("episode")
    (path / "kept").symlink_to(kept)
    (kept / "file").touch()
    await asyncio.to_thread(grow, path, 2_100)
    await workdirs.remove([path, path])
    assert not path.exists()
    assert (kept / "file").exists()
    await asyncio.to_thread(grow, kept, 2_100)
    await workdirs.close()
    assert os.listdir(tmp_path) == []  # noqa: PTH208


async def test_what_cannot_be_removed_is_logged_and_ends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    workdirs = Workdirs(str(tmp_path))
    first, second = workdirs.make("first"), workdirs.make("second")
    remove = module._remove

    def fail_at_first(path: Path) -> None:
        if path == first:
            raise RecursionError("deep")
        remove(path)

    monkeypatch.setattr(module, "_remove", fail_at_first)
    with caplog.at_level(logging.WARNING):
        await workdirs.remove([first, second])
    assert not second.exists()
    assert f"the folder {first} of an episode stays: deep" in caplog.text
