"""Real SGLang servers. `make test-sglang` tells where they are; without it nothing of this folder is collected."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from examples.sglang.serve_cpu import CpuServer
from tests.sglang.asking import FIRST_VERSION, MAX_QUEUED, MAX_RUNNING, TRAINED_VERSION, RealSglang, Reference

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

PYTHON = os.environ.get("TEST_SGLANG_PYTHON", "")
TINY_MODEL = Path(os.environ.get("TEST_TINY_MODEL", ""))
TRAINED_MODEL = TINY_MODEL / "trained"
"""The same with other weights."""
SMOLLM2 = Path(os.environ.get("TEST_SMOLLM2", ""))
both_ways = pytest.mark.parametrize("real", [0, 1], ids=["increments", "cumulative"], indirect=True)
collect_ignore_glob = [] if PYTHON else ["test_*.py"]

FLAGS = ("--max-running-requests", str(MAX_RUNNING), "--max-queued-requests", str(MAX_QUEUED))


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[CpuServer]]:
    """Two of the tiny model, which start side by side. Who ends one starts it again. The first streams increments, and
    each event of the second repeats the output so far.
    """
    folder = tmp_path_factory.mktemp("sglang")
    pair = [
        CpuServer(PYTHON, TINY_MODEL, folder / f"sglang{n}.log", streams_increments=n == 0, flags=FLAGS)
        for n in range(2)
    ]
    try:
        for server in pair:
            server.start()
        for server in pair:
            server.wait_until_ready()
        yield pair
    finally:
        for server in pair:
            server.stop()


@pytest.fixture
def smollm2_server(tmp_path: Path) -> Iterator[CpuServer]:
    with CpuServer(PYTHON, SMOLLM2, tmp_path / "sglang.log") as server:
        yield server


@pytest.fixture
async def pair(servers: list[CpuServer]) -> AsyncIterator[list[RealSglang]]:
    """Whatever a test did, nothing decodes on afterwards, and the next one finds them as they were started."""
    async with AsyncExitStack() as stack:
        looks = [RealSglang(server.base_url, TINY_MODEL, streams_increments=n == 0) for n, server in enumerate(servers)]
        both = [await stack.enter_async_context(real) for real in looks]
        yield both
        for real in both:
            await real.restore()


@pytest.fixture
def real(request: pytest.FixtureRequest, pair: list[RealSglang]) -> RealSglang:
    """The one that streams increments, or as a test asks for with `both_ways`."""
    return pair[getattr(request, "param", 0)]


@pytest.fixture(scope="session")
def reference() -> Iterator[Reference]:
    with Reference(PYTHON, {FIRST_VERSION: TINY_MODEL, TRAINED_VERSION: TRAINED_MODEL}) as transformers:
        yield transformers
