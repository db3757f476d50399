"""Bodies of /v1/chat/completions: what is taken, what says nothing, and which field is at fault."""

from __future__ import annotations

import json
from typing import Any

import pytest

from py_scheduler.api.generation_http.chat import ChatAsked, read_chat
from py_scheduler.api.generation_http.refusals import RefusedError
from py_scheduler.domain.generation import ChatMessage, SamplingParams

PLAIN: dict[str, Any] = {"model": "student", "messages": [{"role": "user", "content": "Hello"}]}
SAID = (ChatMessage("user", "Hello"),)


def read(**said: Any) -> ChatAsked:
    return read_chat(json.dumps(PLAIN | said).encode())


def test_what_says_nothing_changes_nothing() -> None:
    silent: dict[str, Any] = {
        "n": 1,
        "stream": False,
        "stream_options": None,
        "stop": [],
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "logit_bias": {},
        "functions": None,
        "top_logprobs": 0,
        "user": "me",
        "metadata": {"run": "7"},
        "store": False,
        "temperature": None,
        "logprobs": None,
    }
    assert read(**silent) == read() == ChatAsked("student", SAID, SamplingParams(), wants_log_probs=False)


def test_everything_that_can_be_said_of_sampling() -> None:
    asked = read(
        max_tokens=9,
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        stop=["a", "b"],
        seed=3,
        presence_penalty=1.5,
        frequency_penalty=-1,
        logprobs=True,
        top_k=4,
        min_p=0.1,
        min_tokens=2,
        repetition_penalty=1.1,
        ignore_eos=True,
        stop_token_ids=[5],
    )
    assert asked.wants_log_probs
    assert asked.sampling == SamplingParams(
        max_new_tokens=7,
        temperature=0.0,
        top_p=0.5,
        stop=("a", "b"),
        sampling_seed=3,
        presence_penalty=1.5,
        frequency_penalty=-1.0,
        top_k=4,
        min_p=0.1,
        min_new_tokens=2,
        repetition_penalty=1.1,
        ignore_eos=True,
        stop_token_ids=(5,),
    )
    assert read(stop="a").sampling.stop == ("a",)


def test_messages_as_clients_write_them() -> None:
    asked = read(
        messages=[
            {"role": "developer", "content": "Be brief."},
            {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
            # An answer as OpenAI's client dumps it.
            {"role": "assistant", "content": None, "refusal": None, "tool_calls": [], "annotations": []},
            {"role": "user", "content": ""},
        ]
    )
    assert asked.messages == (
        ChatMessage("system", "Be brief."),
        ChatMessage("user", "Hello"),
        ChatMessage("assistant", ""),
        ChatMessage("user", ""),
    )


@pytest.mark.parametrize(
    ("said", "field", "code"),
    [
        ({"tools": [{"type": "function"}]}, "tools", "unsupported_parameter"),
        ({"response_format": {"type": "json_object"}}, "response_format", "unsupported_parameter"),
        ({"n": 2}, "n", "unsupported_parameter"),
        ({"stream": True}, "stream", "unsupported_parameter"),
        ({"top_logprobs": 5}, "top_logprobs", "unsupported_parameter"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "unsupported_parameter"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "unsupported_parameter"),
        ({"model": 5}, "model", "invalid_value"),
        ({"temperature": "hot"}, "temperature", "invalid_value"),
        ({"temperature": 101}, "temperature", "invalid_value"),
        ({"max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"max_completion_tokens": 1.5}, "max_completion_tokens", "invalid_value"),
        ({"top_p": 0}, "top_p", "invalid_value"),
        ({"seed": 1 << 70}, "seed", "invalid_value"),
        ({"stop": [1]}, "stop[0]", "invalid_value"),
        ({"messages": []}, "messages", "invalid_value"),
        ({"messages": "Hello"}, "messages", "invalid_value"),
        ({"messages": ["Hello"]}, "messages[0]", "invalid_value"),
        ({"messages": [{"role": "tool", "content": "5"}]}, "messages[0].role", "invalid_value"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "invalid_value"),
        ({"messages": [{"role": "user", "name": "me"}]}, "messages[0].name", "unsupported_parameter"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "text": ""}]}]},
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "5"}]},
            "messages[1].role",
            "invalid_value",
        ),
    ],
)
def test_a_faulty_field_is_named(said: dict[str, Any], field: str, code: str) -> None:
    with pytest.raises(RefusedError) as refused:
        read(**said)
    assert (refused.value.status, refused.value.param, refused.value.code) == (400, field, code)
    assert str(refused.value).startswith(f"{field}: ")
    assert refused.value.headers == {"x-should-retry": "false"}


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b'"\\ud800"', b"[" * 100_000])
def test_what_is_no_request_at_all(content: bytes) -> None:
    with pytest.raises(RefusedError) as refused:
        read_chat(content)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")


def test_a_request_without_a_model_says_so() -> None:
    with pytest.raises(RefusedError, match="model"):
        read_chat(json.dumps({"messages": PLAIN["messages"]}).encode())
