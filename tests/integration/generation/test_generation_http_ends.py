"""How requests of episodes end before their answer: clients that leave, episodes that stop, engines that fail."""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, cast

import pytest

from py_scheduler.api.generation_http.chat import read_chat
from py_scheduler.api.generation_http.episode_api import EpisodeApi
from py_scheduler.api.generation_http.refusals import RefusedError
from py_scheduler.domain.generation import ChatMessage, StoppingCriteria
from py_scheduler.domain.results import Outcome
from tests.support.agents.chat_client import says
from tests.support.agents.chat_handlers import LendingAgent
from tests.support.agents.lent_episodes import HELLO, Lent, lent, sglang
from tests.support.models.scripted_model import ScriptedModel
from tests.support.models.scripted_sglang import Script

if TYPE_CHECKING:
    from py_scheduler.execution.episode import HandlerEpisode


async def test_a_second_request_meanwhile_is_told_to_wait() -> None:
    gate = asyncio.Event()
    async with sglang(Script(gate=gate)) as (server, student), lent(student) as episode:
        first = asyncio.create_task(episode.client.ask(HELLO))
        await server.until(lambda: bool(server.running))
        refused = episode.refusal_of(await episode.client.ask(HELLO))
        assert refused[:2] == (409, "episode_is_busy")
        gate.set()
        assert (await first)[0] == 200


async def test_a_client_that_leaves_ends_its_generation_and_its_tokens_are_kept() -> None:
    async with sglang(Script(stall_after=3)) as (server, student), lent(student) as episode:
        asking = asyncio.create_task(episode.client.ask(HELLO))
        await server.until(lambda: server.streamed == 3)
        asking.cancel()
        await server.until(lambda: not server.running)
        assert len(server.aborts) >= 1
        await _until_quiet(episode)
        refused = episode.refusal_of(await episode.client.ask(HELLO))
        assert refused[:2] == (409, "conversation_differs")
        assert "cut short" in refused[2]
        sample = await episode.sample()
    assert sample.trajectory.generated_tokens == 3


async def _until_quiet(episode: Lent) -> None:
    """The server has noticed that its client left, and has what was made until then."""
    async with asyncio.timeout(10):
        await cast("HandlerEpisode", episode.episode).wait_quiet()


@pytest.mark.parametrize("timeout", [None, 0.3])
async def test_an_episode_that_is_stopped_ends_its_requests_and_keeps_their_tokens(timeout: float | None) -> None:
    async with (
        sglang(Script(stall_after=3)) as (server, student),
        lent(student, run_timeout_seconds=timeout) as episode,
    ):
        asking = asyncio.create_task(episode.client.ask(HELLO))
        await server.until(lambda: server.streamed == 3)
        if timeout is None:
            await episode.abort()
        refused = episode.refusal_of(await asking)
        assert refused[:2] == (409, "episode_stopped")
        sample = await episode.sample()
        assert episode.refusal_of(await episode.client.ask(HELLO))[0] == 401
    assert sample.outcome is (Outcome.ABORTED if timeout is None else Outcome.AGENT_TIMEOUT)
    assert sample.trajectory.generated_tokens == 3
    assert sample.trajectory.turns[-1].finish_reason == "abort"


async def test_a_handler_that_returns_meanwhile_keeps_what_its_client_has_got() -> None:
    async with sglang(Script(stall_after=3)) as (server, student), lent(student) as episode:
        asking = asyncio.create_task(episode.client.ask(HELLO))
        await server.until(lambda: server.streamed == 3)
        sample = await episode.sample()
        assert (await asking)[0] == 409
    assert sample.outcome is Outcome.SOLVED
    assert sample.trajectory.generated_tokens == 3


async def test_an_engine_that_fails_is_the_infrastructures_fault_whatever_the_agent_makes_of_it() -> None:
    fails = RuntimeError("my agent has no answer")
    async with (
        sglang(Script(status=500), Script(status=500)) as (_, student),
        lent(student, LendingAgent(fails)) as episode,
    ):
        answer = await episode.client.ask(HELLO)
        assert episode.refusal_of(answer)[:2] == (503, "engine_unavailable")
        assert "127.0.0.1" not in answer[1]["error"]["message"]
        assert (await episode.sample()).outcome is Outcome.INFRA_CONN


async def test_what_was_not_answered_can_be_asked_again() -> None:
    async with sglang(Script(status=500), Script(status=500)) as (_, student), lent(student) as episode:
        assert (await episode.client.ask(HELLO))[0] == 503
        more = [*HELLO, says("user", "Hello?")]
        assert "still waits for its answer" in episode.refusal_of(await episode.client.ask(more))[2]
        assert (await episode.client.ask(HELLO))[0] == 200
        sample = await episode.sample()
    assert sample.outcome is Outcome.SOLVED
    assert sample.trajectory.turns[0].text == "system: Be brief.\nuser: Hello"
    assert len(sample.trajectory.turns) == 2


async def test_a_context_that_is_full_is_the_agents_limit_whatever_it_raises() -> None:
    async with lent(ScriptedModel("5", context_length=20), LendingAgent(RuntimeError("no answer"))) as episode:
        await episode.client.ask(HELLO, max_tokens=10)
        assert (await episode.sample()).outcome is Outcome.CONTEXT_OVERFLOW


async def test_turns_that_are_used_up_are_the_agents_limit_too() -> None:
    agent, limits = LendingAgent(RuntimeError("no answer")), StoppingCriteria(max_turns=1)
    async with lent(ScriptedModel("5"), agent, default_stopping=limits) as episode:
        await episode.client.ask(HELLO)
        await episode.client.ask([*HELLO, says("assistant", "5"), says("user", "Sure?")])
        assert (await episode.sample()).outcome is Outcome.MAX_TURNS


async def test_an_answer_that_breaks_off_is_not_worth_asking_for_again() -> None:
    fails = RuntimeError("no answer")
    async with sglang(Script(disconnect_after=3)) as (_, student), lent(student, LendingAgent(fails)) as episode:
        assert episode.refusal_of(await episode.client.ask(HELLO))[:2] == (503, "engine_unavailable")
        assert "cut short" in episode.refusal_of(await episode.client.ask(HELLO))[2]
        sample = await episode.sample()
    assert (sample.outcome, sample.trajectory.generated_tokens) == (Outcome.INFRA_CONN, 3)


async def test_a_request_that_was_let_in_before_the_end_does_not_begin_after_it() -> None:
    async with lent(ScriptedModel("5")) as episode:
        api = cast("HandlerEpisode", episode.episode)._api
        assert isinstance(api, EpisodeApi)
        api.end()
        with pytest.raises(RefusedError) as refused:
            await api.complete(read_chat(json.dumps({"model": "student", "messages": HELLO}).encode()), "student")
        assert refused.value.status == 401
        assert not episode.episode.token_ids


async def test_an_episode_is_one_record_however_it_is_asked() -> None:
    """A handler may speak for itself first, if its client then repeats nothing that it did not say."""
    async with lent(ScriptedModel("5")) as episode:
        await episode.episode.observe_chat([ChatMessage("user", "mine")])
        refused = episode.refusal_of(await episode.client.ask(HELLO))
        assert refused[:2] == (409, "conversation_differs")


async def test_a_handler_that_does_not_end_keeps_no_request_alive() -> None:
    """Its agent may well be what keeps it: a child process that waits for the answer."""
    agent = LendingAgent(is_deaf=True)
    async with sglang(Script(stall_after=3)) as (server, student), lent(student, agent) as episode:
        asking = asyncio.create_task(episode.client.ask(HELLO))
        await server.until(lambda: server.streamed == 3)
        stopping = asyncio.create_task(episode.abort())
        assert episode.refusal_of(await asking)[:2] == (409, "episode_stopped")
        assert not agent.may_end.is_set()
        sample = await episode.sample()
        await stopping
    assert (sample.outcome, sample.trajectory.generated_tokens) == (Outcome.ABORTED, 3)
