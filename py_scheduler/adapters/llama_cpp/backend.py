"""The embedded backend: a GGUF model in llama.cpp on this machine's CPU; no GPU and no server to set up.

Invariants:

- At most `slots` generations are at the server; the others wait here, where an abort reaches them at once. So the
  server's threads are never all taken by generations, and encoding goes on beside them.
- Closing the connection is the abort: leaving a response before its end frees the slot.
- A child that died is started again by the next request, which waits for it: what was in flight fails, no more.
- Every sampling field is set, neutrally where the request says nothing: llama.cpp's own defaults are not neutral.

Log-probs are the model's own, before temperature and filters (LogProbKind.MODEL). The end-of-sequence token, when the
model gives it, is the last of the ids and has its log-prob. A character that `max_new_tokens` cuts in two is left out,
so that a generation may be some tokens shorter than asked. Penalties count the prompt's tokens too, unlike SGLang's,
and with `ignore_eos` the end token is never drawn instead of being passed over.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import random
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from py_scheduler.adapters.http_client import (
    HTTP_OK,
    LOST_CONNECTION,
    UNREADABLE,
    HttpClient,
    body_of,
    error_message,
    sse_payloads,
)
from py_scheduler.adapters.in_flight import Flight, Flights
from py_scheduler.adapters.llama_cpp.process import LlamaProcess
from py_scheduler.adapters.llama_cpp.stream import Candidate, Chunk, Received, fill_gaps
from py_scheduler.adapters.request_checks import check_request
from py_scheduler.adapters.settings_checks import check_numbers
from py_scheduler.domain.generation import Generation, GenerationRequest, LogProbKind, ModelInfo, SamplingParams
from py_scheduler.domain.prompt import Prompt
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.generation import ChatMessage

logger = logging.getLogger(__name__)

CONTROL_CONNECTIONS = 4
RESTART_SECONDS = 5.0
"""At least between two starts of the child."""
SPARE_HTTP_THREADS = 4
VERSION_DIGITS = 12
FEW_CANDIDATES = 256
SURE = 1e6
FIELDS = ["stop", "stop_type", "tokens_predicted", "tokens_evaluated", "timings/cache_n", "completion_probabilities"]
CHUNK = msgspec.json.Decoder(Chunk)


class LlamaCppSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the model is run. Times in seconds."""

    threads: int | None = None
    """Default: all usable cores but one, since llama.cpp crawls when something else keeps one of its cores busy."""
    slots: int = 8
    """Generations that run at once; more wait."""
    context_length: int = 2048
    """Token ids of prompt and output together, per slot."""
    prompt_cache_mib: int = 256
    """Of memory, for prompts that were read before."""
    default_max_new_tokens: int = 256
    """For a request that says none."""
    start_timeout_seconds: float = 120.0
    """For the child to load the model."""
    first_token_timeout_seconds: float = 600.0
    """From the slot on; long prompts of all slots may have to be read first."""
    idle_read_timeout_seconds: float = 120.0
    """Silence after the first event."""
    control_timeout_seconds: float = 60.0
    """For an answer to anything but a generation."""

    def __post_init__(self) -> None:
        check_numbers(self, may_be_zero=("prompt_cache_mib",))


class LlamaCppBackend:
    """A GenerationBackend on the GGUF file at `gguf_path`."""

    def __init__(self, gguf_path: str | Path, *, settings: LlamaCppSettings | None = None) -> None:
        self._gguf_path = Path(gguf_path)
        self._settings = settings or LlamaCppSettings()
        self._flights = Flights()
        self._slots = asyncio.Semaphore(self._settings.slots)
        self._process: LlamaProcess | None = None
        self._http: HttpClient | None = None
        self._info: ModelInfo | None = None
        self._end_token_id = 0
        self._launched_at = 0.0
        self._restarting = asyncio.Lock()
        self._is_closed = False

    async def start(self) -> None:
        """Loads the model in a child process. Raises EngineUnavailableError, with what llama.cpp said."""
        if not self._gguf_path.is_file():
            raise EngineUnavailableError(f"there is no model file {self._gguf_path}: fetch one or correct the path")
        try:
            await self._launch()
            self._info = await self._ask_model_info()
        except BaseException:
            await self.close()
            raise

    async def _launch(self) -> None:
        settings = self._settings
        self._process = LlamaProcess(
            {
                "gguf_path": str(self._gguf_path),
                "slots": settings.slots,
                "context_length": settings.context_length,
                "threads": settings.threads or max(1, len(os.sched_getaffinity(0)) - 1),
                "http_threads": settings.slots + CONTROL_CONNECTIONS + SPARE_HTTP_THREADS,
                "prompt_cache_mib": settings.prompt_cache_mib,
            }
        )
        self._launched_at = time.monotonic()
        address = await self._process.start(settings.start_timeout_seconds)
        self._http = HttpClient(
            address,
            # A connection holds one of the server's threads, an idle one too, and a stream ends with its closing.
            connections=settings.slots + CONTROL_CONNECTIONS,
            keepalive_seconds=None,
            connect_timeout_seconds=settings.control_timeout_seconds,
        )
        await self._http.start()

    async def _alive(self) -> HttpClient:
        """The client of a running process: one that died is started again, and whoever needs it waits.

        One that lives for less than a few seconds is not started again at once: what it dies of would kill the next.
        """
        if self._http is None or self._process is None or self._is_closed:
            raise EngineUnavailableError("the embedded engine is not started")
        async with self._restarting:
            if self._process.ended and not self._is_closed:
                wait = self._launched_at + RESTART_SECONDS - time.monotonic()
                if wait > 0:
                    await asyncio.sleep(wait)
                await self._http.close()
                await self._process.close()
                logger.warning("the embedded engine died and is started again: %s", self._process.last_words)
                await self._launch()
        return self._http

    async def close(self) -> None:
        """Ends what is in flight with EngineUnavailableError and frees the model."""
        self._is_closed = True
        await self._flights.close(self._settings.control_timeout_seconds)
        if self._http is not None:
            await self._http.close()
        if self._process is not None:
            await self._process.close()

    async def model_info(self) -> ModelInfo:
        if self._info is None:
            raise EngineUnavailableError("the embedded engine is not started")
        return self._info

    async def encode(self, text: str) -> list[int]:
        """Special tokens that are written out in `text` are recognised, as by SGLang's tokenizer."""
        answer = await self._call("/tokenize", {"content": text, "add_special": False, "parse_special": True})
        return [int(token_id) for token_id in answer["tokens"]]

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        body = {"messages": [{"role": message.role, "content": message.content} for message in messages]}
        return await self.encode((await self._call("/apply-template", body))["prompt"])

    async def generate(self, request: GenerationRequest) -> Generation:
        """See GenerationBackend; `min_new_tokens` is refused. A request beyond the slots waits for one, unbounded."""
        info = await self.model_info()
        body = completion_body(request.sampling, self._settings.default_max_new_tokens, info.context_length)
        check_request(request, info, body["n_predict"])
        prompt = Prompt.of(request.token_ids)
        body["prompt"] = msgspec.Raw(prompt.json())
        received = Received(request.sampling)
        with self._flights.enter(request.rid) as flight:
            try:
                async with flight.watched(), self._slots:
                    await self._receive(body, flight, received)
                    await fill_gaps(received, prompt, self._likeliest)
            except LOST_CONNECTION as error:
                partial = received.generation(info.weight_version, complete=False)
                if flight.abort_requested:
                    return partial
                raise EngineUnavailableError(self._what_happened(flight, error), partial) from error
            return received.generation(info.weight_version, complete=True)

    async def abort(self, rid: str) -> None:
        """Returns when the generation has ended; its slot is free with the token that is being computed."""
        flight = self._flights.get(rid)
        if flight is not None:
            flight.abort_requested = True
            flight.cut()
            await flight.finished.wait()

    async def _receive(self, body: dict[str, Any], flight: Flight, received: Received) -> None:
        client = await self._alive()
        flight.allow(self._settings.first_token_timeout_seconds)
        async with client.post("/completion", body) as response:
            if response.status != HTTP_OK:
                raise refusal(response.status, error_message(await body_of(response)))
            async for payload in sse_payloads(response.content):
                chunk = decode_chunk(payload)
                if chunk.error is not None:
                    raise refusal(int(str(chunk.error.get("code", 500))), str(chunk.error.get("message")))
                received.add(chunk)
                if received.finish_reason is not None and not chunk.stop:
                    return  # A stop of our own: closing the connection stops the server.
                flight.allow(self._settings.idle_read_timeout_seconds)
        if received.finish_reason is None:
            raise aiohttp.ClientPayloadError("the stream ended before the generation did")

    async def _likeliest(self, ids: list[int], text: bytes) -> list[Candidate]:
        """Tokens after `ids` whose bytes begin `text`, likeliest first, with the model's log-probs.

        The answer of one token carries the likeliest of all at its place; which one is drawn does not matter, but it
        must be a whole one, and the end token is.
        """
        info = await self.model_info()
        for count in (FEW_CANDIDATES, info.vocab_size):
            body = completion_body(SamplingParams(temperature=0.0), 1, info.context_length)
            body |= {"prompt": ids, "stream": False, "n_probs": count, "logit_bias": [[self._end_token_id, SURE]]}
            async with self._client().post("/completion", body) as response:
                content = await body_of(response)
                if response.status != HTTP_OK:
                    raise refusal(response.status, error_message(content))
            scored = decode_chunk(content).completion_probabilities
            found = [c for c in scored[0].top_logprobs if c.bytes and text.startswith(bytes(c.bytes))] if scored else []
            if found:
                return found
        return []

    async def _ask_model_info(self) -> ModelInfo:
        http = self._client()
        timeout = self._settings.control_timeout_seconds
        props = await http.get_json("/props", timeout_seconds=timeout)
        models = await http.get_json("/v1/models", timeout_seconds=timeout)
        self._end_token_id = (await self.encode(props["eos_token"]))[0]
        digest = await asyncio.to_thread(file_digest, self._gguf_path)
        return ModelInfo(
            name=self._gguf_path.stem,
            vocab_size=int(models["data"][0]["meta"]["n_vocab"]),
            context_length=int(props["default_generation_settings"]["n_ctx"]),
            weight_version=digest[:VERSION_DIGITS],
            log_prob_kind=LogProbKind.MODEL,
            default_max_new_tokens=self._settings.default_max_new_tokens,
        )

    async def _call(self, path: str, body: Any) -> Any:
        return await (await self._alive()).post_json(path, body, timeout_seconds=self._settings.control_timeout_seconds)

    def _client(self) -> HttpClient:
        if self._http is None:
            raise EngineUnavailableError("the embedded engine is not started")
        return self._http

    def _what_happened(self, flight: Flight, error: BaseException) -> str:
        if flight.was_cut:
            return "the embedded engine was closed"
        if self._process is not None and self._process.ended:
            return f"the embedded engine died: {self._process.last_words}"
        return f"the embedded engine did not deliver: {error or 'no token in time'}"


def completion_body(sampling: SamplingParams, default_max_new_tokens: int, context_length: int) -> dict[str, Any]:
    """The body of /completion, without the prompt. Raises EngineRejectedError for what llama.cpp cannot do.

    Stop strings and stop token ids are not in it; `Received` looks for them.
    """
    if sampling.min_new_tokens:
        raise EngineRejectedError("the embedded engine has no min_new_tokens: leave it out, or use ignore_eos")

    def said(value: float | None, neutral: float) -> float:
        return neutral if value is None else value

    return {
        "n_predict": default_max_new_tokens if sampling.max_new_tokens is None else sampling.max_new_tokens,
        "stream": True,
        "n_probs": 1,
        "return_tokens": False,
        "post_sampling_probs": False,
        "cache_prompt": True,
        "response_fields": FIELDS,
        # SGLang's order: temperature first, then the filters.
        "samplers": ["penalties", "temperature", "top_k", "top_p", "min_p"],
        "temperature": said(sampling.temperature, 1.0),
        "dynatemp_range": 0.0,
        "top_k": max(0, int(said(sampling.top_k, 0))),
        "top_p": said(sampling.top_p, 1.0),
        "min_p": said(sampling.min_p, 0.0),
        "repeat_penalty": said(sampling.repetition_penalty, 1.0),
        "repeat_last_n": context_length,
        "frequency_penalty": said(sampling.frequency_penalty, 0.0),
        "presence_penalty": said(sampling.presence_penalty, 0.0),
        "ignore_eos": bool(sampling.ignore_eos),
        "mirostat": 0,
        "logit_bias": [],
        "seed": random.getrandbits(31) if sampling.sampling_seed is None else sampling.sampling_seed & 0x7FFFFFFF,
    }


def decode_chunk(payload: bytes) -> Chunk:
    try:
        return CHUNK.decode(payload)
    except UNREADABLE as error:
        raise EngineUnavailableError(f"llama.cpp sent what cannot be read: {payload[:200]!r}") from error


def refusal(status: int, message: str) -> Exception:
    """What an answer other than 200 means; the context was checked before."""
    if status >= 500:  # noqa: PLR2004 - HTTP's own boundary
        return EngineUnavailableError(f"llama.cpp answered {status}: {message}")
    return EngineRejectedError(f"llama.cpp refused the request ({status}): {message}")


def file_digest(path: Path) -> str:
    """SHA-256 of a file, in hex. Blocks: for a thread."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
