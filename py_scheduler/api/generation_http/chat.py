"""The body of /v1/chat/completions, to what is asked of an episode; and what it generated, to the answer.

Invariant: nothing that was said is passed over. A field that would change the answer and is not heeded is refused by
its name; null, an empty collection and a field's own default say nothing.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from py_scheduler.api.generation_http.refusals import BAD_REQUEST, RefusedError, unsupported
from py_scheduler.domain.generation import ChatMessage, FinishReason, SamplingParams
from py_scheduler.domain.limits import check_sampling

if TYPE_CHECKING:
    from collections.abc import Mapping

    from py_scheduler.domain.generation import Generation

_LABELS = frozenset({"metadata", "prompt_cache_key", "safety_identifier", "user"})
"""For the provider's own books; they never change an answer."""
_DEFAULTS: dict[str, Any] = {
    "n": 1,
    "parallel_tool_calls": True,
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "store": False,
    "stream": False,
    "tool_choice": "none",
    "top_logprobs": 0,
}
_REASONS = {
    "n": "an episode has one context, so only 1 answer at a time",
    "stream": "streaming is not there yet: leave it out",
    "top_logprobs": "only the log-prob of each chosen token is known: leave it out",
}
_SAMPLING_NAMES = {
    "frequency_penalty": "frequency_penalty",
    "ignore_eos": "ignore_eos",
    "min_p": "min_p",
    "min_tokens": "min_new_tokens",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "seed": "sampling_seed",
    "stop_token_ids": "stop_token_ids",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
}
"""Fields of the body, those of SGLang and vLLM included, and what they are called here."""
_PLACE = re.compile(r" - at `\$\.?(.*)`$")
_FINISH_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}


class _Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: Literal["text"]
    text: str


class _Message(msgspec.Struct, frozen=True):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[_Part] | None = None

    @property
    def as_recorded(self) -> ChatMessage:
        content = self.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        # The same under its newer name, which chat templates do not know.
        return ChatMessage("system" if self.role == "developer" else self.role, text)


class _Body(msgspec.Struct, frozen=True, kw_only=True):
    model: str
    messages: list[_Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | tuple[str, ...] | None = None
    logprobs: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None


class ChatAsked(msgspec.Struct, frozen=True, gc=False):
    """One request. sampling: what it says itself, and nothing else."""

    model: str
    messages: tuple[ChatMessage, ...]
    sampling: SamplingParams
    wants_log_probs: bool


def read_chat(content: bytes) -> ChatAsked:
    """Raises RefusedError, which names the field."""
    try:
        said = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RefusedError(BAD_REQUEST, f"the body is no JSON: {error}", "invalid_json") from error
    if not isinstance(said, dict):
        raise RefusedError(BAD_REQUEST, "the body must be a JSON object", "invalid_json")
    body = _converted(said)
    messages = tuple(message.as_recorded for message in body.messages)
    _check_order(messages)
    sampling = _sampling(body)
    for fault in check_sampling(sampling):
        field = _name_of(fault.field, body)
        raise RefusedError(BAD_REQUEST, f"{field}: {fault.description}", "invalid_value", param=field)
    return ChatAsked(body.model, messages, sampling, body.logprobs)


def _converted(said: dict[str, Any]) -> _Body:
    told = _told(said, "", {*_Body.__struct_fields__, *_LABELS, *_DEFAULTS})
    for field, default in _DEFAULTS.items():
        value = told.pop(field, default)
        if value != default:
            raise unsupported(field, _REASONS.get(field, f"is not supported; {default!r} is what is done"))
    messages = told.get("messages")
    if isinstance(messages, list):
        told["messages"] = [
            _told(message, f"messages[{number}].", set(_Message.__struct_fields__))
            if isinstance(message, dict)
            else message
            for number, message in enumerate(messages)
        ]
    try:
        return msgspec.convert(told, _Body)
    except msgspec.ValidationError as error:
        found = _PLACE.search(str(error))
        place = found[1] if found is not None else None
        message = _PLACE.sub("", str(error))
        told_where = f"{place}: {message}" if place else message
        raise RefusedError(BAD_REQUEST, told_where, "invalid_value", param=place) from error


def _told(said: dict[str, Any], prefix: str, known: set[str]) -> dict[str, Any]:
    """Without what says nothing. Raises RefusedError for what nobody knows."""
    told = {field: value for field, value in said.items() if value is not None and value not in ({}, [])}
    # An empty conversation is one that is missing, and says so.
    if said.get("messages") == []:
        told["messages"] = []
    for field in told:
        if field not in known:
            raise unsupported(f"{prefix}{field}", "is not supported: leave it out")
    return told


def _check_order(messages: tuple[ChatMessage, ...]) -> None:
    if not messages:
        raise RefusedError(BAD_REQUEST, "messages: there are none", "invalid_value", param="messages")
    if messages[-1].role == "assistant":
        place = f"messages[{len(messages) - 1}].role"
        message = f"{place}: the last message is the assistant's own; what it began is not continued here"
        raise RefusedError(BAD_REQUEST, message, "invalid_value", param=place)


def _sampling(body: _Body) -> SamplingParams:
    lengths = [length for length in (body.max_tokens, body.max_completion_tokens) if length is not None]
    stop = (body.stop,) if isinstance(body.stop, str) else body.stop
    return SamplingParams(
        max_new_tokens=min(lengths, default=None),
        stop=stop or None,
        **{name: getattr(body, field) for field, name in _SAMPLING_NAMES.items()},
    )


def _name_of(name: str, body: _Body) -> str:
    """What the client calls a field of the sampling."""
    if name == "max_new_tokens":
        return "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return next((field for field, known in _SAMPLING_NAMES.items() if known == name), name)


def chat_completion(
    generation: Generation, *, completion_id: str, created: int, model: str, prompt_tokens: int, wants_log_probs: bool
) -> Mapping[str, Any]:
    """The body of the answer."""
    made = generation.token_count
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": generation.text, "refusal": None},
        "finish_reason": _FINISH_REASONS[generation.finish_reason],
        "logprobs": _log_probs(generation) if wants_log_probs else None,
    }
    return {
        "id": completion_id,
        "object": "chat.completion",
        "created": created,
        "model": model,
        # Which weights wrote it, as far as that can be one name.
        "system_fingerprint": generation.weight_spans[-1].version if generation.weight_spans else None,
        "choices": [choice],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": made,
            "total_tokens": prompt_tokens + made,
            "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        },
    }


class _ScoredToken(msgspec.Struct, frozen=True, gc=False):
    """Goes by its id: the text of a single token may be half a character."""

    token: str
    logprob: float
    bytes: None = None
    top_logprobs: tuple[()] = ()


def _log_probs(generation: Generation) -> dict[str, Any]:
    pairs = zip(generation.token_ids, generation.log_probs, strict=True)
    return {
        "content": [_ScoredToken(f"token_id:{token_id}", log_prob) for token_id, log_prob in pairs],
        "refusal": None,
    }
