"""An SGLang engine on a scripted server."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.domain.generation import GenerationRequest, SamplingParams
from tests.support.models.scripted_sglang import ScriptedSglang

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

QUICK = SglangSettings(
    retry=RetrySettings(attempts=3, base_seconds=0.001, max_seconds=0.002), abort_grace_seconds=0.3, stream_interval=1
)


@asynccontextmanager
async def engine_on(**settings: Any) -> AsyncIterator[tuple[SglangBackend, ScriptedSglang]]:
    async with ScriptedSglang() as server:
        engine = SglangBackend(server.base_url, settings=replace(QUICK, **settings))
        await engine.start()
        try:
            yield engine, server
        finally:
            await engine.close()
            assert not server.running
            assert not server.died_of
            assert len(set(server.rids)) == len(server.rids)


def request(rid: str = "r", *, prompt: int = 3, max_new_tokens: int | None = 8, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        rid=rid,
        token_ids=list(range(1, prompt + 1)),
        sampling=SamplingParams(max_new_tokens=max_new_tokens, **sampling),
    )
