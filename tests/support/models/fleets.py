"""Scripted SGLang servers with a fleet on them."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.adapters.sglang.settings import FleetSettings, SglangSettings
from py_scheduler.domain.generation import Generation, GenerationRequest, SamplingParams
from tests.support.fake_clock import FakeClock
from tests.support.models.scripted_sglang import Script, ScriptedSglang

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

QUICK = SglangSettings(
    retry=RetrySettings(base_seconds=0.001, max_seconds=0.002), abort_grace_seconds=0.3, stream_interval=1
)
MAX_BACKOFF_SECONDS = 8.0


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
