"""sglang-router as a process in front of real servers."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import aiohttp

from examples.sglang.serve_cpu import HOST, environment, free_port
from py_scheduler.adapters.sglang.backend import SglangBackend
from tests.sglang.asking import ANSWER_SECONDS, SETTINGS
from tests.sglang.conftest import PYTHON

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence
    from pathlib import Path

LOOK_SECONDS = 0.1
LAUNCH = (
    "import runpy, sys; sys.modules['sglang'] = None; "
    "runpy.run_module('sglang_router.launch_router', run_name='__main__')"
)
"""Without SGLang itself, which it would load for its traces: that takes longer than all else that it does."""
OUR_FLAGS = ("--disable-retries", "--health-check-endpoint", "/model_info")
"""As the README asks for them."""


@asynccontextmanager
async def router_for(*worker_urls: str, log: Path, flags: Sequence[str] = OUR_FLAGS) -> AsyncIterator[str]:
    """Its address. The workers get requests in turn, and it looks at their health every second."""
    port = free_port()
    address = ("--host", HOST, "--port", str(port), "--prometheus-host", HOST, "--prometheus-port", str(free_port()))
    command = (PYTHON, "-c", LAUNCH, *address, "--worker-urls", *worker_urls)
    looks = ("--policy", "round_robin", "--health-check-interval-secs", "1")
    with log.open("wb") as sink:
        process = await asyncio.create_subprocess_exec(
            *command, *looks, *flags, stdout=sink, stderr=sink, env=environment()
        )
    try:
        await _until_ready(f"http://{HOST}:{port}", len(worker_urls), process)
        yield f"http://{HOST}:{port}"
    finally:
        process.kill()
        await process.wait()


async def _until_ready(base_url: str, workers: int, process: asyncio.subprocess.Process) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(ANSWER_SECONDS):
        while True:
            assert process.returncode is None
            try:
                async with session.get(f"{base_url}/readiness") as response:
                    if (await response.json())["healthy_workers"] == workers:
                        return
            except (aiohttp.ClientError, KeyError):
                pass
            await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def engine_behind(router_url: str, *worker_urls: str) -> AsyncIterator[SglangBackend]:
    engine = SglangBackend(router_url, control_urls=worker_urls, settings=SETTINGS)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
