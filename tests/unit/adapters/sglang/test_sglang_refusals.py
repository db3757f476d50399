"""A server that refuses a request or gives it up: asked again before the first token, and after it tokens are kept."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from py_scheduler.domain.generation import FinishReason, Generation
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError, GenerationError
from tests.support.models.scripted_sglang import Script
from tests.support.models.served_backends import engine_on, request
from tests.support.models.sglang_events import assert_first, event

if TYPE_CHECKING:
    from tests.support.models.scripted_sglang import ScriptedSglang

END = b"[DONE]"


def failed(code: int | None, known: int, form: str) -> bytes:
    """The last event of a stream that has `known` tokens, in each of the ways in which a server says it."""
    if form == "error":
        error: dict[str, Any] = {"message": "out of memory"} | ({} if code is None else {"code": code})
        return msgspec.json.encode({"error": error})
    return event(known, known, finish_reason={"type": "abort", "message": "out of memory", "status_code": code})


def script(server: ScriptedSglang, *events: bytes) -> None:
    server.scripts.append(Script(pieces=[b"data: " + each + b"\n\n" for each in (*events, END)]))


def known(increments: bool, *ends: int) -> list[bytes]:
    return [event(before if increments else 0, end) for before, end in zip((0, *ends), ends, strict=False)]


@pytest.mark.parametrize("increments", [True, False], ids=["increments", "cumulative"])
@pytest.mark.parametrize("ends", [(1,), (1, 4), (1, 4, 9)])
@pytest.mark.parametrize(
    ("code", "form", "kind"),
    [
        (500, "error", EngineUnavailableError),
        (503, "abort", EngineUnavailableError),
        (429, "error", EngineUnavailableError),
        (429, "abort", EngineUnavailableError),
        (None, "error", EngineUnavailableError),
        (400, "error", EngineRejectedError),
        (400, "abort", EngineRejectedError),
    ],
)
async def test_a_server_that_gives_up_after_tokens_is_not_asked_again_and_they_are_kept(
    code: int | None, form: str, kind: type[GenerationError], ends: tuple[int, ...], increments: bool
) -> None:
    async with engine_on() as (engine, server):
        script(server, *known(increments, *ends), failed(code, ends[-1], form))
        with pytest.raises(kind, match="out of memory") as caught:
            await engine.generate(request())
        assert isinstance(caught.value.partial, Generation)
        assert caught.value.partial.finish_reason is FinishReason.ABORT
        assert_first(caught.value.partial, ends[-1])
        assert len(server.bodies) == 1


@pytest.mark.parametrize("form", ["error", "abort"])
@pytest.mark.parametrize("code", [429, 500])
async def test_a_server_that_gives_up_before_the_first_token_is_asked_again(code: int, form: str) -> None:
    async with engine_on() as (engine, server):
        script(server, failed(code, 0, form))
        assert len((await engine.generate(request())).token_ids) == 8
        assert len(server.bodies) == 2


@pytest.mark.parametrize("form", ["error", "abort"])
async def test_a_request_that_is_refused_before_the_first_token_has_no_partial(form: str) -> None:
    async with engine_on() as (engine, server):
        script(server, failed(400, 0, form))
        with pytest.raises(EngineRejectedError, match="out of memory") as caught:
            await engine.generate(request())
        assert caught.value.partial is None
        assert len(server.bodies) == 1


async def test_who_was_aborted_gets_what_was_there_when_the_server_then_gives_up() -> None:
    async with engine_on() as (engine, server):
        server.scripts.append(Script(stall_after=4, aborted=failed(500, 4, "error")))
        task = asyncio.create_task(engine.generate(request()))
        await server.until(lambda: server.streamed == 4)
        await engine.abort("r")
        generation = await task
        assert (generation.finish_reason, len(generation.token_ids)) == (FinishReason.ABORT, 4)
        assert len(server.bodies) == 1
