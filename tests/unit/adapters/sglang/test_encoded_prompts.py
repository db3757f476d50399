"""What a tokenizer answered is given again for as long as it is what that tokenizer would answer."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

import pytest

from py_scheduler.adapters.http_server.encoded import EncodedPrompts
from py_scheduler.adapters.sglang.backend import SglangBackend
from py_scheduler.adapters.sglang.fleet import SglangFleet
from py_scheduler.domain.generation import ChatMessage, Endpoints
from py_scheduler.errors import EngineUnavailableError
from tests.support.models.scripted_sglang import Script, ScriptedSglang
from tests.support.models.served_backends import QUICK, request

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

AnyBackend = TypeVar("AnyBackend", bound=SglangBackend | SglangFleet)


@asynccontextmanager
async def closing(backend: AnyBackend) -> AsyncIterator[AnyBackend]:
    try:
        yield backend
    finally:
        await backend.close()


CHAT = [ChatMessage("u", "a")]


class Tokenizer:
    """Answers each question with its number, when it is let."""

    def __init__(self) -> None:
        self.questions: list[bytes] = []
        self.may_answer = asyncio.Event()
        self.failure: Exception | None = None

    async def __call__(self, body: bytes) -> list[int]:
        self.questions.append(body)
        number = len(self.questions)
        await self.may_answer.wait()
        if self.failure is not None:
            raise self.failure
        return [number]


def asked(prompts: EncodedPrompts, tokenizer: Tokenizer, body: bytes = b"a") -> asyncio.Task[list[int]]:
    return asyncio.create_task(prompts.of(body, tokenizer))


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def test_all_samples_of_a_group_ask_once_and_each_has_a_list_of_its_own() -> None:
    prompts, tokenizer = EncodedPrompts(10), Tokenizer()
    group = [asked(prompts, tokenizer) for _ in range(8)]
    await turns()
    tokenizer.may_answer.set()
    lists = [*await asyncio.gather(*group), await prompts.of(b"a", tokenizer)]
    assert lists == [[1]] * 9
    lists[0].append(5)
    lists[-1].append(5)
    assert await prompts.of(b"a", tokenizer) == [1]
    assert await prompts.of(b"b", tokenizer) == [2]
    assert tokenizer.questions == [b"a", b"b"]


async def test_who_asks_and_is_cancelled_leaves_the_others_their_answer() -> None:
    prompts, tokenizer = EncodedPrompts(10), Tokenizer()
    first, second, third = (asked(prompts, tokenizer) for _ in range(3))
    await turns()
    first.cancel()
    await turns()
    tokenizer.may_answer.set()
    assert [*await asyncio.gather(second, third)] == [[2], [2]]


async def test_who_waits_and_is_cancelled_disturbs_nobody() -> None:
    prompts, tokenizer = EncodedPrompts(10), Tokenizer()
    first, second, third = (asked(prompts, tokenizer) for _ in range(3))
    await turns()
    second.cancel()
    await turns()
    tokenizer.may_answer.set()
    assert [*await asyncio.gather(first, third)] == [[1], [1]]


async def test_a_failure_is_that_of_all_who_wait_for_it_and_of_nobody_later() -> None:
    """Each would else wait for as long as the first did, one behind the other."""
    prompts, tokenizer = EncodedPrompts(10), Tokenizer()
    group = [asked(prompts, tokenizer) for _ in range(8)]
    await turns()
    tokenizer.failure = EngineUnavailableError("it does not answer")
    tokenizer.may_answer.set()
    outcomes = await asyncio.gather(*group, return_exceptions=True)
    assert [str(outcome) for outcome in outcomes] == ["it does not answer"] * 8
    assert len({id(outcome) for outcome in outcomes}) == 8
    tokenizer.failure = None
    assert await prompts.of(b"a", tokenizer) == [2]


async def test_who_asks_after_a_change_is_not_given_what_was_asked_before_it() -> None:
    prompts, tokenizer = EncodedPrompts(10), Tokenizer()
    before = asked(prompts, tokenizer)
    await turns()
    prompts.forget()
    after = asked(prompts, tokenizer)
    await turns()
    tokenizer.may_answer.set()
    assert [*await asyncio.gather(before, after)] == [[1], [2]]
    assert await prompts.of(b"a", tokenizer) == [2]
    prompts.forget()
    assert await prompts.of(b"a", tokenizer) == [3]


async def test_an_answer_is_as_old_as_its_question() -> None:
    now = 100.0
    prompts, tokenizer = EncodedPrompts(10, now=lambda: now), Tokenizer()
    early = asked(prompts, tokenizer, b"early")
    await turns()
    now = 109.0
    tokenizer.may_answer.set()
    assert await prompts.of(b"late", tokenizer) == [2]
    assert await early == [1]
    now = 110.5
    assert await prompts.of(b"late", tokenizer) == [2]
    assert await prompts.of(b"early", tokenizer) == [3]


async def test_without_seconds_each_is_asked() -> None:
    prompts, tokenizer = EncodedPrompts(0), Tokenizer()
    tokenizer.may_answer.set()
    assert [await prompts.of(b"a", tokenizer) for _ in range(3)] == [[1], [2], [3]]


async def test_the_oldest_go_first_and_what_is_too_long_is_not_kept() -> None:
    prompts, tokenizer = EncodedPrompts(10, max_bytes=2_000), Tokenizer()
    tokenizer.may_answer.set()
    bodies = [bytes([number]) * 500 for number in range(3)]
    for body in bodies:
        await prompts.of(body, tokenizer)
    assert await prompts.of(bodies[2], tokenizer) == [3]
    assert await prompts.of(bodies[0], tokenizer) == [4]
    assert await prompts.of(b"x" * 2_001, tokenizer) == [5]
    assert await prompts.of(bodies[0], tokenizer) == [4]


def one_server(url: str) -> SglangBackend:
    return SglangBackend(url, settings=QUICK)


def fleet_of_one(url: str) -> SglangFleet:
    return SglangFleet([url], settings=QUICK)


@pytest.mark.parametrize("make", [one_server, fleet_of_one])
async def test_a_server_that_comes_back_with_another_template_is_asked_again(
    make: Callable[[str], SglangBackend | SglangFleet],
) -> None:
    """Nobody was told that it was away: only the first generation there finds its connection dead, and goes on."""
    async with ScriptedSglang() as server, closing(make(server.base_url)) as backend:
        await backend.start()
        assert [await backend.encode_chat(CHAT) for _ in range(3)] == [[60, 117, 62, 97]] * 3
        assert server.tokenize_questions == 1
        server.opening = "!"
        server.scripts.append(Script(disconnect_before=True))
        assert len((await backend.generate(request("a"))).token_ids) == 8
        assert await backend.encode_chat(CHAT) == [60, 117, 62, 97, 33]


@pytest.mark.parametrize("make", [one_server, fleet_of_one])
async def test_weights_that_are_news_may_come_with_another_template(
    make: Callable[[str], SglangBackend | SglangFleet],
) -> None:
    async with ScriptedSglang() as server, closing(make(server.base_url)) as backend:
        await backend.start()
        assert await backend.encode("a") == [97]
        await backend.generate(request("a"))
        assert await backend.encode("a") == [97]
        assert server.tokenize_questions == 1
        server.scripts.append(Script(weight_versions=[{"version": "v1", "start": 0, "end": 8}]))
        await backend.generate(request("b"))
        assert await backend.encode("a") == [97]
        assert server.tokenize_questions == 2


async def test_a_fleet_of_other_servers_is_asked_again() -> None:
    async with (
        ScriptedSglang() as first,
        ScriptedSglang(opening="!") as second,
        closing(fleet_of_one(first.base_url)) as fleet,
    ):
        await fleet.start()
        assert await fleet.encode_chat(CHAT) == [60, 117, 62, 97]
        fleet.set_endpoints(Endpoints(urls=(second.base_url,)))
        assert await fleet.encode_chat(CHAT) == [60, 117, 62, 97, 33]
