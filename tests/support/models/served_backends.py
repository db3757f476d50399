"""An engine on a scripted server: SGLang, or whichever `KIND` says."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec.structs import replace

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.adapters.http_server.settings import ServerSettings
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.adapters.vllm.backend import VllmBackend
from py_scheduler.domain.generation import GenerationRequest, SamplingParams
from tests.support.models.scripted_sglang import ScriptedSglang
from tests.support.models.scripted_vllm import GENERATE, ScriptedVllm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.adapters.http_server.backend import HttpBackend

QUICK = SglangSettings(
    retry=RetrySettings(attempts=3, base_seconds=0.001, max_seconds=0.002), abort_grace_seconds=0.3, stream_interval=1
)


QUICK_VLLM = ServerSettings(retry=QUICK.retry, abort_grace_seconds=0.3, stream_interval=1)
BackendT = TypeVar("BackendT", bound="HttpBackend")
KIND = "sglang"


def server_of(**said: Any) -> ScriptedSglang:
    """A server of the kind."""
    return ScriptedVllm(**said) if KIND == "vllm" else ScriptedSglang(**said)


def generate_path() -> str:
    """Where it is asked to generate."""
    return GENERATE if KIND == "vllm" else "/generate"


def backend_of(server: ScriptedSglang, **settings: Any) -> HttpBackend:
    """An engine on it that retries quickly."""
    if KIND == "vllm":
        return VllmBackend(server.base_url, settings=replace(QUICK_VLLM, **settings))
    return SglangBackend(server.base_url, settings=replace(QUICK, **settings))


@asynccontextmanager
async def served_on(**settings: Any) -> AsyncIterator[tuple[HttpBackend, ScriptedSglang]]:
    """On a server of the kind."""
    async with server_of() as server, _started(backend_of(server, **settings), server) as engine:
        yield engine, server


@asynccontextmanager
async def engine_on(**settings: Any) -> AsyncIterator[tuple[SglangBackend, ScriptedSglang]]:
    """On SGLang."""
    async with ScriptedSglang() as server:
        quick = SglangBackend(server.base_url, settings=replace(QUICK, **settings))
        async with _started(quick, server) as engine:
            yield engine, server


@asynccontextmanager
async def vllm_on(**settings: Any) -> AsyncIterator[tuple[VllmBackend, ScriptedVllm]]:
    async with ScriptedVllm() as server:
        quick = VllmBackend(server.base_url, settings=replace(QUICK_VLLM, **settings))
        async with _started(quick, server) as engine:
            yield engine, server


@asynccontextmanager
async def _started(engine: BackendT, server: ScriptedSglang) -> AsyncIterator[BackendT]:
    await engine.start()
    try:
        yield engine
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
