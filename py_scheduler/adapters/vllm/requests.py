"""What is sent to vLLM's /inference/v1/generate, and what a refusal of it means."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Final

import msgspec

from py_scheduler.adapters.http_client import REFUSING_STATUSES
from py_scheduler.adapters.http_server.attempt import AttemptFailedError
from py_scheduler.domain.prompt import Prompt
from py_scheduler.errors import ContextOverflowError, EngineRejectedError

if TYPE_CHECKING:
    from py_scheduler.adapters.http_server.settings import ServerSettings
    from py_scheduler.domain.generation import GenerationRequest

GENERATE: Final = "/inference/v1/generate"
ABORT: Final = "/inference/v1/abort_requests"
CONTEXT_OVERFLOW: Final = re.compile("longer than the maximum model length")
THEIR_NAMES: Final = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
"""Of sampling parameters that vLLM calls otherwise."""


def generate_body(rid: str, request: GenerationRequest, settings: ServerSettings) -> dict[str, Any]:
    """What the request leaves unsaid is left to the server, but for the length."""
    said = msgspec.to_builtins(request.sampling)  # It omits the rest.
    said.setdefault("max_new_tokens", settings.default_max_new_tokens)
    sampling = {THEIR_NAMES.get(field, field): value for field, value in said.items()}
    if settings.stream_interval is not None:
        sampling["stream_interval"] = settings.stream_interval
    return {
        "request_id": rid,
        "token_ids": msgspec.Raw(Prompt.of(request.token_ids).json()),
        # 0: of no other tokens than the sampled ones.
        "sampling_params": sampling | {"logprobs": 0},
        "output_mode": "text",
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def known_there_as(rid: str) -> str:
    """The server puts this in front of the request_id of a generation, and knows it by no other name."""
    return f"generate-tokens-{rid}"


def refusal(status: int, message: str) -> AttemptFailedError | EngineRejectedError:
    """What it means for the request that the server says so in its own form."""
    if status not in REFUSING_STATUSES:
        return AttemptFailedError(f"status {status}: {message}")
    if CONTEXT_OVERFLOW.search(message):
        return ContextOverflowError(f"vLLM refused the request: {message}")
    return EngineRejectedError(f"vLLM refused the request ({status}): {message}")
