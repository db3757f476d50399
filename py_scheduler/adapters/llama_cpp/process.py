"""Starts and ends the child process of the embedded backend (`server.py`).

Invariants

- The child lives no longer than its parent, however the parent ends: it stops when its standard input closes.
- It has a session of its own, so that a Ctrl-C for the scheduler does not end generations that are to be finished.
"""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Mapping

SCRIPT = Path(__file__).with_name("server.py")
LAST_LINES = 20
EXIT_SECONDS = 2.0
_PIECE_BYTES = 1 << 16
_LINE_BYTES = 1_000
"""Of one line, at most; the end of a long one says more than its beginning."""


class LlamaProcess:
    """One llama.cpp server process."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self._settings = settings
        self._process: asyncio.subprocess.Process | None = None
        self._said: deque[str] = deque(maxlen=LAST_LINES)
        self._listener: asyncio.Task[None] | None = None

    async def start(self, timeout_seconds: float) -> str:
        """The server's address once the model is loaded. Raises EngineUnavailableError with what the child said."""
        if importlib.util.find_spec("xllamacpp") is None:
            raise EngineUnavailableError(
                "the embedded engine needs xllamacpp: install the extra 'embedded' of py-scheduler"
            )
        # -P: beside the script lie modules of this package that must not pass for top-level ones.
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            str(SCRIPT),
            msgspec.json.encode(self._settings).decode(),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            # OpenMP's threads spin while they wait, and so slow down everything else that wants their cores.
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ,
            start_new_session=True,
        )
        self._listener = asyncio.get_running_loop().create_task(self._listen(self._process))
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout_seconds):
                address = (await self._process.stdout.readline()).decode().strip()
        except TimeoutError:
            await self.close()
            raise EngineUnavailableError(f"the model was not loaded within {timeout_seconds:g} s") from None
        except asyncio.CancelledError:
            await self.close()
            raise
        if not address:
            await self.close()
            raise EngineUnavailableError(f"the embedded engine did not start: {self.last_words}")
        return address

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.returncode is not None

    @property
    def last_words(self) -> str:
        code = None if self._process is None else self._process.returncode
        return f"its process ended with code {code}: " + ("; ".join(self._said) or "it said nothing")

    async def close(self) -> None:
        process = self._process
        if process is None:
            return
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(EXIT_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
        if self._listener is not None:
            await self._listener

    async def _listen(self, process: asyncio.subprocess.Process) -> None:
        """Keeps the last lines of the child's standard error, which would otherwise fill its pipe and stop it.

        Reads by the piece: a line may be longer than a stream reader takes as a line.
        """
        assert process.stderr is not None
        rest = b""
        while piece := await process.stderr.read(_PIECE_BYTES):
            *lines, rest = (rest + piece).split(b"\n")
            rest = rest[-_LINE_BYTES:]
            for line in lines:
                self._hear(line)
        self._hear(rest)

    def _hear(self, line: bytes) -> None:
        if text := line[-_LINE_BYTES:].decode(errors="replace").strip():
            self._said.append(text)
