"""Scripted SGLang servers with a fleet on them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from aiohttp import web

from py_scheduler.adapters.fleet.settings import FleetSettings
from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.domain.generation import Generation, GenerationRequest, SamplingParams, WeightUpdate
from tests.support.fake_clock import FakeClock
from tests.support.models.scripted_sglang import Script, ScriptedSglang

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

QUICK = SglangSettings(
    retry=RetrySettings(base_seconds=0.001, max_seconds=0.002), abort_grace_seconds=0.3, stream_interval=1
)
MAX_BACKOFF_SECONDS = 8.0
PAUSE, CONTINUE, UPDATE = "/pause_generation", "/continue_generation", "/update_weights_from_disk"
NAME = "/update_weight_version"


@asynccontextmanager
async def servers(count: int = 2, **said: Any) -> AsyncIterator[list[ScriptedSglang]]:
    async with AsyncExitStack() as stack:
        yield [await stack.enter_async_context(ScriptedSglang(**said)) for _ in range(count)]


@asynccontextmanager
async def fleet_on(*servers: ScriptedSglang, **settings: Any) -> AsyncIterator[tuple[SglangFleet, FakeClock]]:
    """Started; its clock stands still."""
    clock = FakeClock()
    fleet = fleet_of([server.base_url for server in servers], clock, **settings)
    await fleet.start()
    try:
        yield fleet, clock
    finally:
        await fleet.close()
        assert clock.live_timers == 0
        assert not any(server.running for server in servers)


class Controlled(ScriptedSglang):
    """Takes control calls, or answers `control_status`."""

    def __init__(self) -> None:
        super().__init__()
        self.control_status = 200
        self.control_gate: asyncio.Event | None = None
        """No control call is obeyed before it is set."""
        self.calls: list[str] = []

    def _add_calls(self, app: web.Application) -> None:
        super()._add_calls(app)
        for path in (PAUSE, CONTINUE, UPDATE, NAME):
            app.router.add_post(path, self._control)

    async def _generation(
        self,
        request: web.Request,
        reply: Any,
        body: dict[str, Any],
        script: Script,
        aborted: asyncio.Event,
    ) -> bool:
        """By the weights that it has when it begins."""
        whole = {"version": self.weight_version, "start": 0, "end": body["sampling_params"]["max_new_tokens"]}
        script.weight_versions = script.weight_versions or [whole]
        return await super()._generation(request, reply, body, script, aborted)

    async def _control(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(request.path)
        self._changed.set()
        if self.control_gate is not None:
            await self.control_gate.wait()
        if self.control_status == 200 and request.path == UPDATE:
            self.weight_version, self.weights_path = body["weight_version"], body["model_path"]
        elif self.control_status == 200 and request.path == NAME:
            self.weight_version = body["new_version"]
        elif self.control_status == 200:
            self.is_paused = request.path == PAUSE
        return web.json_response({"message": "scripted"}, status=self.control_status)


@asynccontextmanager
async def controlled() -> AsyncIterator[tuple[SglangFleet, FakeClock, Controlled, Controlled]]:
    async with Controlled() as first, Controlled() as second, fleet_on(first, second) as (fleet, clock):
        yield fleet, clock, first, second


def weights(version: str) -> WeightUpdate:
    return WeightUpdate(model_path="/weights/1", weight_version=version)


def fleet_of(base_urls: list[str], clock: FakeClock, **settings: Any) -> SglangFleet:
    said = {"set_aside_base_seconds": 1.0, "set_aside_max_seconds": MAX_BACKOFF_SECONDS, "load_interval_seconds": 1.0}
    return SglangFleet(base_urls, settings=QUICK, fleet=FleetSettings(**(said | settings)), clock=clock)


def request(rid: str = "r", *, session_id: str = "", prompt: int = 3, max_new_tokens: int = 8) -> GenerationRequest:
    return GenerationRequest(
        rid=rid,
        session_id=session_id,
        token_ids=list(range(1, prompt + 1)),
        sampling=SamplingParams(max_new_tokens=max_new_tokens),
    )


def up(fleet: SglangFleet) -> list[bool]:
    """Each of its endpoints."""
    return [endpoint.is_up for endpoint in fleet._endpoints]


def start(fleet: SglangFleet, rids: list[str]) -> list[asyncio.Task[Generation]]:
    """A generation for each id, under way."""
    return [asyncio.create_task(fleet.generate(request(rid))) for rid in rids]


def holding(server: ScriptedSglang, count: int) -> asyncio.Event:
    """The next generations of the server wait for the event."""
    gate = asyncio.Event()
    server.scripts.extend(Script(gate=gate) for _ in range(count))
    return gate
