"""A server process whose samples generate at a paced server, and what is asked of it from outside."""

from __future__ import annotations

import asyncio
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from benches._paced_sglang import Held, Pace, paced_server
from benches._scripted_sglang import VOCAB_SIZE
from benches._server_process import ServerProcess, server_process
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.generation import SamplingParams
from py_scheduler.domain.task import Task, TaskConfig

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.requests import Delivery

SAMPLES = 1_000
LOOK_SECONDS = 0.25
CONFIG = """
[server]
listen = "127.0.0.1:0"
log_level = "warning"
[generation.student]
kind = "sglang"
base_url = "{base_url}"
vocab_size = {vocab_size}
{backend}
[[evaluator]]
evaluator_id = "writing"
handler = "benches._generating_agents:WritingAgent"
resource = {{ concurrency = {samples} }}
[[evaluator]]
evaluator_id = "lag"
handler = "benches._generating_agents:LagAgent"
resource = {{ concurrency = 1 }}
[[evaluator]]
evaluator_id = "trimming"
handler = "benches._generating_agents:TrimmingAgent"
resource = {{ concurrency = 1 }}
"""


class GeneratingServer:
    """Both processes, and a client."""

    def __init__(
        self, process: ServerProcess, client: SchedulerClient, engine: str, session: aiohttp.ClientSession
    ) -> None:
        self.process = process
        self.client = client
        self._engine = engine
        self._session = session

    async def submit(self, samples: int, tokens: int, batch_id: int, delivery: Delivery) -> str:
        """Each a task of its own. Returns the submission's id."""
        config = TaskConfig(task_type="writing", sampling=SamplingParams(max_new_tokens=tokens))
        tasks = [Task(config=config, client_key=str(number)) for number in range(samples)]
        return (await self.client.submit(tasks, batch_id, delivery=delivery)).submission_id

    async def until_running(self, submission_id: str, samples: int) -> None:
        while (await self.client.get_submission(submission_id=submission_id)).running_attempts < samples:  # noqa: ASYNC110
            await asyncio.sleep(LOOK_SECONDS)

    async def until_held(self, samples: int) -> None:
        """Everything but the last event of each has come."""
        while await self._held() < samples:  # noqa: ASYNC110 - another process has them
            await asyncio.sleep(LOOK_SECONDS)
        await asyncio.sleep(2 * LOOK_SECONDS)  # What is on its way arrives.

    async def _held(self) -> int:
        async with self._session.get(f"{self._engine}/held") as answer:
            return msgspec.json.decode(await answer.read(), type=Held).held

    async def ask_engine(self, what: str) -> None:
        async with self._session.get(f"{self._engine}/{what}") as answer:
            await answer.read()

    async def until_done(self, submission_id: str) -> None:
        """Of all tasks; nothing is read of them."""
        while True:
            view = await self.client.get_submission(submission_id=submission_id)
            if not view.open_tasks:
                assert not view.failed_tasks + view.partial_tasks + view.aborted_tasks, view
                return
            await asyncio.sleep(LOOK_SECONDS)


@asynccontextmanager
async def generating_server(
    pace: Pace, *, journal: bool, backend: str = "", samples: int = SAMPLES
) -> AsyncIterator[GeneratingServer]:
    """`backend`: further lines of the engine's table."""
    with tempfile.TemporaryDirectory() as name, paced_server(pace) as engine:
        config = Path(name) / "scheduler.toml"
        config.write_text(CONFIG.format(base_url=engine, vocab_size=VOCAB_SIZE, backend=backend, samples=samples))
        keeps = ["--state-dir", f"{name}/state"] if journal else ["--no-journal"]
        serve = ["-m", "py_scheduler.cli", "serve", "--config", str(config), *keeps]
        async with (
            server_process(serve) as process,
            SchedulerClient(process.address) as client,
            aiohttp.ClientSession() as session,
        ):
            yield GeneratingServer(process, client, engine, session)
