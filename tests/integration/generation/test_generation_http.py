"""Episodes whose agents speak OpenAI's API: what is recorded, what is answered, and what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.config import GatewaySettings
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.results import Outcome
from py_scheduler.errors import FailedPreconditionError
from tests.support.agents.chat_client import ChatClient, says
from tests.support.agents.chat_handlers import ChildAgent, InlineAgent, LendingAgent, TokenAgent
from tests.support.agents.lent_episodes import HELLO, lent, play, playing, sglang
from tests.support.handlers import spec_of
from tests.support.harness import running_engine, task_of
from tests.support.models.scripted_model import ScriptedModel
from tests.support.models.scripted_sglang import Script

if TYPE_CHECKING:
    pass


# What is recorded


@pytest.mark.parametrize("agent", [InlineAgent, ChildAgent])
async def test_the_record_is_that_of_an_agent_that_says_the_same_token_by_token(agent: type[TokenAgent]) -> None:
    replies = ("5", "Yes, quite sure.", "")
    samples = [await play(each(), ScriptedModel(*replies)) for each in (TokenAgent, agent)]
    assert [sample.outcome for sample in samples] == [Outcome.SOLVED] * 2, samples[1].error
    expected, found = (sample.trajectory for sample in samples)
    assert found == expected
    assert len(found.turns) == 6
    assert found.generated_tokens == sum(len(reply) + 1 for reply in replies)


async def test_against_sglang_the_record_is_the_same_too() -> None:
    trajectories = []
    for agent in (TokenAgent(), InlineAgent()):
        async with sglang() as (server, student):
            trajectories.append((await play(agent, student)).trajectory)
            assert [len(body["input_ids"]) for body in server.bodies] == [
                turn.start for turn in trajectories[-1].turns if turn.source == "student"
            ]
    assert trajectories[0] == trajectories[1]
    assert trajectories[0].generated_tokens == 24


async def test_what_the_model_wrote_is_never_tokenised_again() -> None:
    """The answer's tokens are not those of its text: the next request holds them as they were made."""
    async with sglang() as (server, student), lent(student) as episode:
        _, body = await episode.client.ask(HELLO)
        conversation = [*HELLO, body["choices"][0]["message"], says("user", "Again")]
        assert (await episode.client.ask(conversation))[0] == 200
        first, second = (request["input_ids"] for request in server.bodies)
        made = list(range(100, 108))
        assert second == [*first, *made, *map(ord, "<user>Again<assistant>")]
        assert (await episode.sample()).trajectory.token_ids.tolist() == [*second, *made]


# What is answered


async def test_an_answer_has_the_shape_that_clients_know() -> None:
    versions = [{"version": "w7", "start": 0, "end": 2}]
    async with sglang(Script(weight_versions=versions)) as (_, student), lent(student) as episode:
        status, body = await episode.client.ask(HELLO, max_completion_tokens=2, logprobs=True)
        sample = episode.episode.sample
    assert status == 200
    assert body.pop("created") > 1_700_000_000
    tokens: list[dict[str, Any]] = [
        {"token": f"token_id:{100 + i}", "logprob": -i / 128, "bytes": None, "top_logprobs": []} for i in range(2)
    ]
    prompt = len("<system>Be brief.<user>Hello<assistant>")
    assert body == {
        "id": f"chatcmpl-{sample.task_id}-0-1-0",
        "object": "chat.completion",
        "model": "tiny",
        "system_fingerprint": "w7",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "t0t1", "refusal": None},
                "finish_reason": "length",
                "logprobs": {"content": tokens, "refusal": None},
            }
        ],
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": 2,
            "total_tokens": prompt + 2,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }


async def test_an_answer_that_ended_by_itself_says_stop_and_keeps_its_log_probs() -> None:
    async with lent(ScriptedModel("5")) as episode:
        _, body = await episode.client.ask(HELLO)
    (choice,) = body["choices"]
    assert (choice["finish_reason"], choice["logprobs"]) == ("stop", None)


async def test_the_models_are_the_roles_and_what_they_serve() -> None:
    async with lent(ScriptedModel("5", "6")) as episode:
        status, body = await episode.client.get("/models")
        assert (status, [model["id"] for model in body["data"]]) == (200, ["student", "scripted"])
        assert (await episode.client.ask(HELLO, model="scripted"))[0] == 200
        refused = episode.refusal_of(await episode.client.ask(HELLO, model="gpt-5"))
        assert refused[:2] == (404, "model_not_found")
        assert "student, scripted" in refused[2]


async def test_a_client_chooses_within_what_the_cascade_allows() -> None:
    model = ScriptedModel("a long answer")
    ours = SamplingParams(max_new_tokens=5, temperature=0.5, stop=("END",), top_k=7)
    async with lent(model, default_sampling=ours, default_stopping=StoppingCriteria(max_context_len=80)) as episode:
        said = {"max_tokens": 100, "temperature": 0.25, "top_p": 0.5, "stop": "X", "seed": 3, "presence_penalty": 1}
        status, body = await episode.client.ask(HELLO, frequency_penalty=-1, user="me", **said)
        assert (status, body["choices"][0]["finish_reason"]) == (200, "length")
        assert body["usage"]["completion_tokens"] == 5
    assert model.requests[0].sampling == SamplingParams(
        max_new_tokens=5,
        temperature=0.25,
        top_p=0.5,
        top_k=7,
        stop=("END", "X"),
        sampling_seed=3,
        presence_penalty=1.0,
        frequency_penalty=-1.0,
    )


# What is refused


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {0: says("system", "Be long.")},
            "messages[0].content: differs from what was recorded at character 3: 'long.'",
        ),
        ({1: says("user", "Hello!")}, "messages[1].content: differs from what was recorded at character 5: '!'"),
        ({2: says("assistant", "6")}, "messages[2].content: differs from what the model wrote at character 0: '6'"),
        ({2: says("user", "5")}, "messages[2].role: is the user's, where the assistant's is recorded"),
        ({2: None, 3: None}, "messages: ends after 2 of 3 recorded messages; the next one is the assistant's '5'"),
    ],
)
async def test_another_conversation_than_the_recorded_one_is_refused(
    changed: dict[int, dict[str, Any] | None], said: str
) -> None:
    async with lent(ScriptedModel("5")) as episode:
        await episode.client.ask(HELLO)
        before = list(episode.episode.token_ids)
        whole = [*HELLO, says("assistant", "5"), says("user", "Sure?")]
        other = [changed.get(number, message) for number, message in enumerate(whole)]
        refused = episode.refusal_of(await episode.client.ask([message for message in other if message is not None]))
        assert refused[:2] == (409, "conversation_differs")
        assert said in refused[2]
        assert list(episode.episode.token_ids) == before
        assert (await episode.client.ask(whole))[0] == 200, "the recorded one goes on"


async def test_a_handler_that_adds_tokens_itself_has_left_the_conversation() -> None:
    async with lent(ScriptedModel("5")) as episode:
        await episode.client.ask(HELLO)
        episode.episode.observe([7], "unseen")
        whole = [*HELLO, says("assistant", "5"), says("user", "Sure?")]
        refused = episode.refusal_of(await episode.client.ask(whole))
        assert refused[:2] == (409, "conversation_differs")
        assert "the handler itself has added" in refused[2]


async def test_only_the_key_of_an_episode_that_runs_opens_anything() -> None:
    async with lent(ScriptedModel("5")) as episode:
        base_url, key = episode.episode.api_base_url, episode.episode.api_key
        for wrong in ("", "sk-episode-", key[:-1], key + "x", "\u00fc"):
            async with ChatClient(base_url, wrong) as stranger:
                for answer in (await stranger.ask(HELLO), await stranger.get("/models")):
                    assert episode.refusal_of(answer)[:2] == (401, "invalid_api_key")
        await episode.sample()
        refused = episode.refusal_of(await episode.client.ask(HELLO))
        assert refused[:2] == (401, "invalid_api_key")
        assert "dead as soon as its episode is over" in refused[2]
        with pytest.raises(FailedPreconditionError):
            episode.episode.observe([1])


async def test_two_episodes_have_a_conversation_each() -> None:
    agent = LendingAgent()
    async with playing(agent, ScriptedModel("5")) as harness:
        reply = await harness.submit([task_of(repeat_times=2)])
        for word in ("one", "two"):
            async with ChatClient.of(await agent.lent.get()) as client:
                assert (await client.ask([says("user", word)]))[0] == 200
        agent.may_end.set()
        samples = await harness.samples(reply)
    assert sorted(sample.trajectory.turns[0].text for sample in samples) == ["user: one", "user: two"]


async def test_limits_of_the_episode_are_refused_by_their_names() -> None:
    limits = StoppingCriteria(max_turns=1)
    async with lent(ScriptedModel("5"), default_stopping=limits) as episode:
        await episode.client.ask(HELLO)
        more = [*HELLO, says("assistant", "5"), says("user", "Sure?")]
        refused = episode.refusal_of(await episode.client.ask(more))
        assert refused == (400, "max_turns_reached", "max_turns is 1, and as many were generated")
    for options in (
        {"student": ScriptedModel("5", context_length=20)},
        {"student": ScriptedModel("5"), "default_stopping": StoppingCriteria(max_context_len=20)},
    ):
        async with lent(**options) as episode:
            refused = episode.refusal_of(await episode.client.ask(HELLO, max_tokens=10))
            assert refused[:2] == (400, "context_length_exceeded")


async def test_bodies_and_paths_that_are_none() -> None:
    settings = GatewaySettings(listen="127.0.0.1:0", max_body_bytes=2_000)
    async with lent(ScriptedModel("5"), gateway=settings) as episode:
        client = episode.client
        assert episode.refusal_of(await client.ask([says("user", "x" * 2_000)]))[:2] == (413, "too_large")
        assert episode.refusal_of(await client.post("/chat/completions", data=b"{"))[:2] == (400, "invalid_json")
        unpacked = await client.post("/chat/completions", data=b"plain", headers={"Content-Encoding": "gzip"})
        assert episode.refusal_of(unpacked)[:2] == (400, "invalid_body")
        assert episode.refusal_of(await client.post("/completions", json={}))[:2] == (404, "unknown_url")
        assert episode.refusal_of(await client.get("/chat/completions"))[0] == 405
        refused = episode.refusal_of(await client.ask(HELLO, stream=True))
        assert refused == (400, "unsupported_parameter", "stream: streaming is not there yet: leave it out")


async def test_without_a_front_a_handler_is_told_what_to_set() -> None:
    async with running_engine(spec_of(InlineAgent()), generation_backends={"student": ScriptedModel("5")}) as harness:
        (sample,) = await harness.samples(await harness.submit([task_of()]))
    assert sample.outcome is Outcome.INFRA_OTHER
    assert "under [gateway]" in sample.error
