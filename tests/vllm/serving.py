"""A vLLM server on the CPU, as docs/vllm.md says to start one."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from examples.sglang.serve_cpu import HOST, CpuServer
from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.http_server.settings import ServerSettings
from py_scheduler.domain.generation import WeightUpdate
from tests.sglang.asking import CONTEXT_LENGTH, FIRST_VERSION

if TYPE_CHECKING:
    from pathlib import Path

    from py_scheduler.adapters.vllm.backend import VllmBackend

SETTINGS = ServerSettings(
    retry=RetrySettings(attempts=3, base_seconds=0.01, max_seconds=0.05),
    stream_interval=1,
    control_timeout_seconds=30.0,
)
FLAGS = (
    *("--dtype", "float32", "--max-model-len", str(CONTEXT_LENGTH), "--max-num-seqs", "16"),
    # Nothing is compiled: of a model this small that would take longer than all that is asked of it.
    "--enforce-eager",
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs"),
    *("--enable-server-load-tracking", "--enable-prompt-tokens-details"),
)


class VllmServer(CpuServer):
    """As CpuServer is one of SGLang. Its first start compiles for minutes where nothing was compiled yet."""

    maker = "vLLM"
    start_seconds = 600.0

    def __init__(self, python: str, model: Path, log: Path) -> None:
        super().__init__(python, model, log)
        self._first = WeightUpdate(model_path=str(model.resolve()), weight_version=FIRST_VERSION)
        address = ("--host", HOST, "--port", str(self.port), "--served-model-name", "tiny")
        # The command of the package asks for the version of `vllm`, and on the CPU that is another package.
        module = "vllm.entrypoints.openai.api_server"
        self._command = [python, "-m", module, "--model", str(model.resolve()), *address, *FLAGS]

    def _environment(self) -> dict[str, str]:
        ours = {
            # Without it: no pauses and no weights.
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_HOST_IP": HOST,
        }
        return {name: value for name, value in super()._environment().items() if name != "PYTHONPATH"} | ours

    async def until_idle(self, engine: VllmBackend) -> None:
        """Sooner than the long generations of these tests would end."""
        async with asyncio.timeout(10):
            while await engine.ask_requests():  # noqa: ASYNC110 - it is another process
                await asyncio.sleep(0.02)

    async def restore(self, engine: VllmBackend) -> None:
        if await engine.weight_version() != FIRST_VERSION:
            await engine.update_weights(self._first)
