"""Episodes behind the gateway's HTTP front, for tests that are their clients."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.api.generation_http import GenerationHttp
from py_scheduler.config import GatewaySettings
from py_scheduler.domain.requests import AbortRequest
from tests.support.agents.chat_client import ChatClient, says
from tests.support.agents.chat_handlers import LendingAgent
from tests.support.handlers import spec_of
from tests.support.harness import Harness, running_engine, task_of
from tests.support.models.scripted_sglang import Script, ScriptedSglang

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.evaluator import BaseAgent, Episode
    from py_scheduler.domain.ports import GenerationBackend
    from py_scheduler.domain.requests import SubmitReply
    from py_scheduler.domain.results import SampleDone

HELLO = [says("system", "Be brief."), says("user", "Hello")]


@asynccontextmanager
async def playing(
    agent: BaseAgent, student: GenerationBackend, gateway: GatewaySettings | None = None, **spec: Any
) -> AsyncIterator[Harness]:
    """No key outlives its episode."""
    front = GenerationHttp(gateway or GatewaySettings(listen="127.0.0.1:0"), {"student": student}, LoopClock())
    async with (
        front,
        running_engine(spec_of(agent, **spec), generation_backends={"student": student}, api_front=front) as harness,
    ):
        yield harness
    assert len(front._keys) == 0


async def play(agent: BaseAgent, student: GenerationBackend, **options: Any) -> SampleDone:
    async with playing(agent, student, **options) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of()]))
    return sample


class Lent:
    """An episode that waits for the test: a client of it, and what it became."""

    def __init__(
        self, harness: Harness, agent: LendingAgent, reply: SubmitReply, episode: Episode, client: ChatClient
    ) -> None:
        self.harness, self.agent, self.episode, self.client, self._reply = harness, agent, episode, client, reply

    async def abort(self) -> None:
        await self.harness.engine.abort(AbortRequest(selector=self.harness.selector(self._reply), wait=True))

    async def sample(self) -> SampleDone:
        """What it became; without a stop it ends by itself."""
        self.agent.may_end.set()
        (sample,) = await self.harness.samples(self._reply)
        return sample

    def refusal_of(self, answer: tuple[int, dict[str, Any]]) -> tuple[int, str, str]:
        """Status, code and message."""
        status, body = answer
        error = body["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return status, error["code"], error["message"]


@asynccontextmanager
async def lent(student: GenerationBackend, agent: LendingAgent | None = None, **options: Any) -> AsyncIterator[Lent]:
    agent = agent or LendingAgent()
    async with playing(agent, student, **options) as harness:
        reply = await harness.submit([task_of()])
        episode = await agent.lent.get()
        async with ChatClient.of(episode) as client:
            yield Lent(harness, agent, reply, episode, client)
        agent.may_end.set()


@asynccontextmanager
async def sglang(*scripts: Script) -> AsyncIterator[tuple[ScriptedSglang, SglangBackend]]:
    """Each token has an event of its own. Nothing decodes on afterwards."""
    settings = SglangSettings(
        retry=RetrySettings(attempts=2, base_seconds=0.001, max_seconds=0.01),
        default_max_new_tokens=8,
        stream_interval=1,
    )
    async with ScriptedSglang(opening="<assistant>") as server:
        server.scripts.extend(scripts)
        engine = SglangBackend(server.base_url, settings=settings)
        await engine.start()
        try:
            yield server, engine
            await server.until(lambda: not server.running)
        finally:
            await engine.close()
