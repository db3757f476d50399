"""A server behind one address that was away and came back as another one: nobody told, and no fleet probes it."""

from __future__ import annotations

import asyncio

import pytest

from py_scheduler.domain.generation import ChatMessage, WeightSpan
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError
from tests.support.models.scripted_sglang import Script
from tests.support.models.served_backends import backend_of, request, served_on, server_of

pytestmark = pytest.mark.usefixtures("any_server")


@pytest.mark.parametrize("script", [Script(disconnect_before=True), Script(disconnect_after=3), Script(close_after=3)])
async def test_a_server_whose_connection_broke_is_asked_what_it_serves_before_the_next_attempt(script: Script) -> None:
    async with served_on() as (engine, server):
        server.vocab_size, server.model_name = 50, "another"
        server.scripts.append(script)
        await asyncio.gather(engine.generate(request("a")), return_exceptions=True)
        with pytest.raises(EngineRejectedError, match="outside the vocabulary"):
            await engine.generate(request("b", prompt=60))
        info = await engine.model_info()
        assert (info.vocab_size, info.name) == (50, "another")


async def test_a_server_that_was_away_while_it_was_asked_for_something_else_is_asked_too() -> None:
    server = server_of()
    async with server:
        engine = backend_of(server)
        await engine.start()
        assert await engine.encode("a") == [97]
    with pytest.raises(EngineUnavailableError):
        await engine.encode("b")
    server.model_name = "another"
    async with server:
        await engine.generate(request())
        assert (await engine.model_info()).name == "another"
        await engine.close()


async def test_of_many_whose_connections_broke_one_asks() -> None:
    async with served_on() as (engine, server):
        server.scripts.extend([Script(disconnect_after=1)] * 20)
        await asyncio.gather(*(engine.generate(request(f"cut{n}")) for n in range(20)), return_exceptions=True)
        asked = server.model_questions
        generations = await asyncio.gather(*(engine.generate(request(f"r{n}")) for n in range(20)))
        assert [generation.token_count for generation in generations] == [8] * 20
        assert server.model_questions == asked + 1


async def test_of_a_server_that_stays_away_all_who_wait_are_told_at_once() -> None:
    server = server_of()
    async with server:
        engine = backend_of(server)
        await engine.start()
    async with asyncio.timeout(20):
        outcomes = await asyncio.gather(
            *(engine.generate(request(f"r{n}")) for n in range(500)), return_exceptions=True
        )
    assert {type(outcome) for outcome in outcomes} == {EngineUnavailableError}
    await engine.close()


@pytest.mark.parametrize("is_heard", [True, False])
async def test_what_its_tokenizer_said_is_forgotten_when_it_was_away(is_heard: bool) -> None:
    """Whether whoever asked meanwhile was told, or a second try hid it."""
    server = server_of()
    chat = [ChatMessage("u", "a")]
    async with server:
        engine = backend_of(server)
        await engine.start()
        assert await engine.encode_chat(chat) == [60, 117, 62, 97]
        if not is_heard:
            server.tokenize_failures = 1
            await engine.encode("b")
            server.opening = "!"
            assert await engine.encode_chat(chat) == [60, 117, 62, 97, 33]
    if is_heard:
        with pytest.raises(EngineUnavailableError):
            await engine.encode("b")
        server.opening = "!"
        async with server:
            assert await engine.encode_chat(chat) == [60, 117, 62, 97, 33]
    await engine.close()


async def test_tokens_of_a_connection_that_broke_have_no_other_weights_than_made_them() -> None:
    async with served_on() as (engine, server):
        server.scripts.append(Script(disconnect_after=4))
        with pytest.raises(EngineUnavailableError) as caught:
            await engine.generate(request())
        assert caught.value.partial.weight_spans == (WeightSpan("default", 0, 4),)  # type: ignore[attr-defined]
