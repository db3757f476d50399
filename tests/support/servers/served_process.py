"""`py-scheduler serve` in a process of its own, for tests in which that process matters."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

ROOT = Path(__file__).parents[3]


class ServedProcess:
    """A running server: where it listens, and its process."""

    def __init__(self, process: asyncio.subprocess.Process, address: str) -> None:
        self.process = process
        self.address = address


@asynccontextmanager
async def served_process(
    config: Path, program: str = "py_scheduler.cli", environment: Mapping[str, str] | None = None
) -> AsyncIterator[ServedProcess]:
    """Serves a configuration until the block is left; then it is killed if it still runs. Its log is appended to.

    program: the module that is run; environment: what is added to this process's own.
    """
    with config.with_suffix(".log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            program,
            "serve",
            "--config",
            str(config),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, **(environment or {}), "PYTHONPATH": str(ROOT)},
        )
        try:
            assert process.stdout is not None
            line = (await process.stdout.readline()).decode()
            found = re.fullmatch(r"listening on (\S+)\n", line)
            assert found is not None, config.with_suffix(".log").read_text()
            yield ServedProcess(process, found[1])
        finally:
            if process.returncode is None:
                process.kill()
            await process.communicate()
