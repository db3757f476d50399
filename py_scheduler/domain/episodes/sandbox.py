"""Where handlers run programs that they have no reason to trust: what they ask of it, and what comes back.

A program that fails, is stopped or never ends is a result. Only a sandbox that does not do its own work is an error.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

PYTHON = "python"
"""As a command's first word: the sandbox's own interpreter."""


class SandboxResult(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """How a command ended.

    exit_code: None when a signal ended it. signal: that signal's name ("SIGKILL"), or "".
    timed_out: its time was up, and it was ended with everything it had started.
    output: what it wrote to standard output and standard error, in order; of a long one its beginning and its end,
    with a line between them that says how many bytes are left out (`dropped_bytes`).
    seconds: wall time from its start to its end.
    """

    exit_code: int | None
    signal: str = ""
    timed_out: bool = False
    output: str = ""
    dropped_bytes: int = 0
    seconds: float = 0.0

    @property
    def is_ok(self) -> bool:
        return self.exit_code == 0


class Sandbox(Protocol):
    """Runs one command at a time for each caller, any number of them beside one another."""

    async def run(
        self,
        command: Sequence[str],
        *,
        workdir: Path,
        files: Mapping[str, str] | None = None,
        timeout_seconds: float | None = None,
        max_output_bytes: int | None = None,
    ) -> SandboxResult:
        """Runs a command in `workdir`, the one folder that it can write to and that outlives it.

        files: written into the folder beforehand, by name. timeout_seconds: of wall time; max_output_bytes: kept of
        what it prints; None: the sandbox's own.
        When this returns, raises or is cancelled, nothing that the command started is alive.
        Raises SandboxError when the sandbox fails, never for what the command does.
        """
        ...
