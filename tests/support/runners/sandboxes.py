"""Sandboxes for tests, where the machine grants them."""

from __future__ import annotations

import os
import textwrap
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.adapters.sandbox.sandbox import ProcessSandbox, SandboxSettings, _Walls
from py_scheduler.domain.episodes.sandbox import PYTHON, SandboxResult
from py_scheduler.errors import SandboxError

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine
    from pathlib import Path

    Run = Callable[..., Coroutine[Any, Any, SandboxResult]]

SETTINGS = SandboxSettings(memory_mib=256, processes=16, file_mib=1, max_output_bytes=4_096)


def _reason_to_skip() -> str:
    try:
        ProcessSandbox(SandboxSettings()).probe()
    except SandboxError as error:
        return str(error)
    return ""


_REASON = _reason_to_skip()
needs_sandbox = pytest.mark.skipif(bool(_REASON) and not os.environ.get("CI"), reason=_REASON)
"""On a machine that grants no namespaces there is nothing to test; CI has to have them."""


def python_in(sandbox: ProcessSandbox, workdir: Path) -> Run:
    async def run(code: str, **options: Any) -> SandboxResult:
        files = {"main.py": textwrap.dedent(code), **options.pop("files", {})}
        return await sandbox.run((PYTHON, "-u", "main.py"), workdir=workdir, files=files, **options)

    return run


def sandbox_without_namespaces() -> ProcessSandbox:
    """What is left on a machine that grants no namespaces."""
    sandbox = ProcessSandbox(SandboxSettings(memory_mib=256, network="allow"))
    sandbox._walls = _Walls(namespaces=False, landlock=True)
    return sandbox
