"""Fixtures of the sandbox's tests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.sandbox.sandbox import ProcessSandbox
from tests.support.runners.sandboxes import SETTINGS, python_in, sandbox_without_namespaces

if TYPE_CHECKING:
    from pathlib import Path

    from tests.support.runners.sandboxes import Run


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Runs Python code in a sandbox."""
    return python_in(ProcessSandbox(SETTINGS), tmp_path)


@pytest.fixture
def without_namespaces(tmp_path: Path) -> Run:
    """The same where the machine grants no namespaces."""
    return python_in(sandbox_without_namespaces(), tmp_path)
