"""A real vLLM server. `make test-vllm` tells where it is; without it nothing of this folder is collected."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.vllm.backend import VllmBackend
from tests.sglang.asking import FIRST_VERSION, TRAINED_VERSION, Reference
from tests.vllm.serving import SETTINGS, VllmServer

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PYTHON = os.environ.get("TEST_VLLM_PYTHON", "")
TINY_MODEL = Path(os.environ.get("TEST_TINY_MODEL", ""))
TRAINED_MODEL = TINY_MODEL / "trained"
"""The same with other weights."""
collect_ignore_glob = [] if PYTHON else ["test_*.py"]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with VllmServer(PYTHON, TINY_MODEL, tmp_path_factory.mktemp("vllm") / "vllm.log") as started:
        yield started


@pytest.fixture
async def engine(server: VllmServer) -> AsyncIterator[VllmBackend]:
    """Whatever a test did, nothing decodes on afterwards, and the next one finds the server as it was started."""
    backend = VllmBackend(server.base_url, settings=SETTINGS)
    await backend.start()
    yield backend
    await backend.resume()
    await server.until_idle(backend)
    await server.restore(backend)
    await backend.close()


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    with Reference(PYTHON, {FIRST_VERSION: TINY_MODEL, TRAINED_VERSION: TRAINED_MODEL}) as transformers:
        yield transformers
