"""Episodes' folders go away, whatever an episode did to them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

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
        subprocess.run([sys.executable, "-c", _CLOSES_ITS_FOLDER, root], check=True, cwd=Path(__file__).parents[2])
        assert not list(Path(root).iterdir())
