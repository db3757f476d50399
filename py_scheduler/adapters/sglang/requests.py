"""What is sent to SGLang's /generate, and what a refusal of it means."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.adapters.http_client import REFUSING_STATUSES
from py_scheduler.adapters.http_server.attempt import AttemptFailedError
from py_scheduler.adapters.sglang.streaming import Streaming, stream_interval
from py_scheduler.domain.prompt import Prompt
from py_scheduler.errors import ContextOverflowError, EngineRejectedError

if TYPE_CHECKING:
    from py_scheduler.adapters.sglang.settings import SglangSettings
    from py_scheduler.domain.generation import GenerationRequest

CONTEXT_OVERFLOW = re.compile(
    r"Requested token count exceeds|longer than the model's context length|exceeds the maximum allowed length"
)

DUPLICATE_RID = re.compile("Duplicate request ID")


def generate_body(request: GenerationRequest, settings: SglangSettings, streaming: Streaming) -> dict[str, Any]:
    """The body of /generate, without rid. What the request leaves unsaid is left to the server, but for the length."""
    sampling = msgspec.to_builtins(request.sampling)  # What is said of it: it omits the rest.
    sampling.setdefault("max_new_tokens", settings.default_max_new_tokens)
    is_stream = streaming is not Streaming.PLAIN
    interval = stream_interval(streaming, sampling["max_new_tokens"], settings)
    if is_stream and interval is not None:
        sampling["stream_interval"] = interval
    body = {
        "input_ids": msgspec.Raw(Prompt.of(request.token_ids).json()),
        "sampling_params": sampling,
        "return_logprob": True,
        "stream": is_stream,
    }
    return body | {"session_id": request.session_id} if request.session_id else body


def refusal(status: int, message: str, *, of_router: bool) -> AttemptFailedError | EngineRejectedError:
    """What it means for the request that the server says so in its own form."""
    if of_router and DUPLICATE_RID.search(message):
        # The router has sent the request twice, to a worker that it thought had lost it.
        return AttemptFailedError(message)
    if status not in REFUSING_STATUSES:
        return AttemptFailedError(f"status {status}: {message}")
    if CONTEXT_OVERFLOW.search(message):
        return ContextOverflowError(f"SGLang refused the request: {message}")
    return EngineRejectedError(f"SGLang refused the request ({status}): {message}")
