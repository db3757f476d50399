"""Real SGLang servers. `make test-sglang` tells where they are; without it nothing of this folder is collected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.sglang.serve_cpu import CpuServer
from tests.sglang.asking import MAX_QUEUED, MAX_RUNNING, RealSglang, Reference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PYTHON = os.environ.get("TEST_SGLANG_PYTHON", "")
TINY_MODEL = Path(os.environ.get("TEST_TINY_MODEL", ""))
SMOLLM2 = Path(os.environ.get("TEST_SMOLLM2", ""))
collect_ignore_glob = [] if PYTHON else ["test_*.py"]

FLAGS = ("--max-running-requests", str(MAX_RUNNING), "--max-queued-requests", str(MAX_QUEUED))


@pytest.fixture(scope="session")
def shared_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[CpuServer]:
    with CpuServer(PYTHON, TINY_MODEL, tmp_path_factory.mktemp("sglang") / "sglang.log", flags=FLAGS) as server:
        yield server


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[CpuServer]:
    """Of the tiny model, for a test that breaks it."""
    with CpuServer(PYTHON, TINY_MODEL, tmp_path / "sglang.log") as server:
        yield server


@pytest.fixture
def smollm2_server(tmp_path: Path) -> Iterator[CpuServer]:
    with CpuServer(PYTHON, SMOLLM2, tmp_path / "sglang.log") as server:
        yield server


@pytest.fixture
async def real(shared_server: CpuServer) -> AsyncIterator[RealSglang]:
    """The tiny model's server. Whatever a test did, nothing decodes on afterwards."""
    async with RealSglang(shared_server.base_url) as server:
        yield server
        await server.undo()
        await server.until_idle()


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    with Reference(PYTHON, TINY_MODEL) as transformers:
        yield transformers
