"""Generation by one SGLang server over its HTTP API; written against what 0.5.23 was seen to do.

Invariants:

- Every attempt has an engine rid of its own that is never used again: two seconds after a stream's end the server
  aborts its rid once more, whoever has it then. An attempt that may have reached the server and did not end there is
  aborted there before anything else happens: nothing decodes on for nobody.
- An attempt is repeated only while not one token of it was received. After that a lost or silent connection raises
  EngineUnavailableError with the tokens so far as `partial`, whose finish reason is ABORT: never taken for complete.
- Nothing is sent that `check_request` has not passed.

Generations are streamed, so that a closed connection frees the request at once and tokens received are kept. Each event
repeats the whole output so far; only the newest is decoded. The matched stop token is part of the ids that come back (a
matched stop string is in the ids, not in the text), and log-probs are scaled by temperature.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
import secrets
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec

from py_scheduler.adapters._checks import check_request
from py_scheduler.adapters._http import (
    HTTP_OK,
    LOST_CONNECTION,
    HttpClient,
    RetrySettings,
    error_message,
    sse_payloads,
)
from py_scheduler.adapters._in_flight import Flight, Flights
from py_scheduler.adapters._sglang_control import SglangControl
from py_scheduler.adapters._sglang_events import (
    NOTHING,
    SERVER_ERRORS,
    UNSAID,
    decode_event,
    read_generation,
    read_partial,
)
from py_scheduler.adapters._sglang_requests import BAD_REQUEST, AttemptFailedError, generate_body, refusal
from py_scheduler.domain.generation import (
    FinishReason,
    Generation,
    GenerationRequest,
    LogProbKind,
    ModelInfo,
)
from py_scheduler.errors import (
    EngineUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.generation import ChatMessage

logger = logging.getLogger(__name__)

DONE = b"[DONE]"
INPUT_MARGIN = 4
"""Tokens that fit beside the longest input: two less than the model's context has, and the server silently generates
fewer than asked for rather than use those two."""
ABORT_REPEAT_SECONDS = 0.25
VALID_IDS = re.compile(r"valid range is \[0, (\d+)\)")


class SglangSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a server is spoken to. Times in seconds; `None` means "ask the server" or "leave to the server"."""

    default_max_new_tokens: int = 256
    """For a request that says none; the server's own default is 128."""
    stream_interval: int | None = 16
    """Tokens between two events: lost at most when a connection breaks, sent anyway when a request is aborted."""
    first_token_timeout_seconds: float = 600.0
    """Queueing and pauses of the server included: it holds new requests while it is paused."""
    idle_read_timeout_seconds: float = 120.0
    """Silence after the first event."""
    connect_timeout_seconds: float = 5.0
    control_timeout_seconds: float = 10.0
    pause_timeout_seconds: float = 60.0
    """A pause that aborts waits for the last request to end."""
    weight_update_timeout_seconds: float = 600.0
    abort_grace_seconds: float = 2.0
    """How long an aborted request may take to end by itself, with all its tokens, before its connection is closed."""
    keepalive_seconds: float = 3.0
    """The server closes idle connections after 5."""
    retry: RetrySettings = RetrySettings()
    vocab_size: int | None = None
    context_length: int | None = None


class SglangEngine(SglangControl):
    """A GenerationEngine, with GenerationControl, on the SGLang server at `base_url`.

    With `control_urls` that is a router, which forwards generations and knows no other call: everything else goes to
    the workers behind it, an abort to each, since only the router knows which has the rid.
    """

    def __init__(
        self, base_url: str, *, control_urls: Sequence[str] = (), settings: SglangSettings | None = None
    ) -> None:
        self._settings = settings or SglangSettings()
        self._http = self._client(base_url)
        self._controls = [self._client(url) for url in control_urls] or [self._http]
        self._flights = Flights()
        self._info: ModelInfo | None = None
        self._info_lock = asyncio.Lock()
        self._nonce = secrets.token_hex(4)
        self._attempt_numbers = itertools.count()
        self._ignores_seeds = False

    @property
    def base_url(self) -> str:
        return self._http.base_url

    @property
    def known_model(self) -> ModelInfo | None:
        """What `model_info` would answer, once it was asked."""
        return self._info

    async def start(self) -> None:
        for client in (self._http, *self._controls):
            await client.start()
        try:
            await self.model_info()
        except BaseException:
            await self._close_clients()
            raise

    async def close(self) -> None:
        """Ends what is in flight with EngineUnavailableError, aborts it at the server, and closes the connections."""
        await self._flights.close(self._settings.control_timeout_seconds)
        await self._close_clients()

    async def model_info(self) -> ModelInfo:
        """Asked once; the weight version follows what generations report."""
        if self._info is None:
            async with self._info_lock:
                if self._info is None:
                    self._info = await self._ask_model_info()
        return self._info

    async def refresh_model_info(self) -> ModelInfo:
        """Asks anew: a server that was away may have come back with other weights."""
        async with self._info_lock:
            self._info = await self._ask_model_info()
        return self._info

    async def ask_requests(self) -> int:
        """Requests that run or wait at the server, whoever sent them. Asked once. Raises EngineUnavailableError."""
        path = "/v1/loads?include=core"
        answer = await self._controls[0].get_json(path, timeout_seconds=self._settings.control_timeout_seconds)
        try:
            return sum(int(rank["num_running_reqs"]) + int(rank["num_waiting_reqs"]) for rank in answer["loads"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineUnavailableError(f"{self.base_url}{path} cannot be read: {error!r}") from error

    async def encode(self, text: str) -> list[int]:
        return await self._tokenize({"prompt": text, "add_special_tokens": False})

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """By the server's own tokenizer and chat template."""
        return await self._tokenize({"messages": [{"role": m.role, "content": m.content} for m in messages]})

    async def generate(self, request: GenerationRequest) -> Generation:
        """See GenerationEngine. EngineUnavailableError carries tokens that were received as `partial`."""
        body = generate_body(request, self._settings)
        check_request(request, await self.model_info(), body["sampling_params"]["max_new_tokens"])
        self._warn_of_ignored_seed(request)
        retry = self._settings.retry
        with self._flights.enter(request.rid) as flight:
            failed = 0
            while True:
                try:
                    return await self._attempt(body, flight, fresh=failed > 0)
                except AttemptFailedError as failure:
                    failed += 1
                    if failed >= retry.attempts:
                        raise EngineUnavailableError(
                            f"{self._http.base_url} failed {failed} times in a row, last: {failure}"
                        ) from failure
                try:
                    async with flight.watched():
                        await asyncio.sleep(retry.wait_seconds(failed))
                except TimeoutError:
                    return self._cut_short(flight, None, "closed while waiting for a retry")

    async def abort(self, rid: str) -> None:
        """Returns when the generation has ended or, after `abort_grace_seconds`, its connection is being closed.

        An abort that overtakes its request is lost at the server, so it is repeated; when that does not end the
        request (a paused server acts on it only later), the connection is closed, which frees it too.
        """
        flight = self._flights.get(rid)
        if flight is None:
            return
        flight.abort_requested = True
        try:
            async with asyncio.timeout(self._settings.abort_grace_seconds):
                while flight.engine_rid:
                    await self._abort_at_server(flight.engine_rid)
                    try:
                        async with asyncio.timeout(ABORT_REPEAT_SECONDS):
                            await flight.finished.wait()
                            return
                    except TimeoutError:
                        continue
        except TimeoutError:
            pass
        finally:
            flight.cut()

    # -- one attempt

    async def _attempt(self, body: dict[str, Any], flight: Flight, *, fresh: bool) -> Generation:
        rid = f"{flight.rid}~{self._nonce}{next(self._attempt_numbers)}"
        newest: bytes | None = None
        over = False
        try:
            async with flight.watched(self._settings.first_token_timeout_seconds):
                flight.engine_rid = rid
                async with self._http.post("/generate", body | {"rid": rid}, fresh=fresh) as response:
                    if response.status != HTTP_OK:
                        content = await response.read()
                        over = True
                        raise refusal(response.status, error_message(content))
                    async for payload in sse_payloads(response.content):
                        if payload == DONE:
                            over = True  # Read on to the end of the body: only then can the connection be used again.
                        else:
                            newest = payload
                        flight.allow(self._settings.idle_read_timeout_seconds)
            if not over:
                raise aiohttp.ClientPayloadError("the stream ended before the generation did")
        except aiohttp.ClientConnectorError as error:
            over = True  # It never reached the server.
            return self._cut_short(flight, newest, str(error))
        except LOST_CONNECTION as error:
            if not over:
                over = True
                await asyncio.wait({self._flights.clean_up(self._abort_at_server(rid))})
                return self._cut_short(flight, newest, str(error) or "no answer in time")
        finally:
            flight.engine_rid = ""
            if not over:
                self._flights.clean_up(self._abort_at_server(rid))  # type: ignore[unused-awaitable]
        return self._finished(flight, newest)

    def _finished(self, flight: Flight, payload: bytes | None) -> Generation:
        """What the last event of a stream that ended properly says."""
        if payload is None:
            return self._cut_short(flight, None, "the stream was empty")
        event = decode_event(payload)
        if "error" in event:
            error = event["error"]
            raise refusal(int(error.get("code") or BAD_REQUEST), str(error.get("message", error)))
        reason = event.get("meta_info", {}).get("finish_reason") or UNSAID
        status = reason.get("status_code")
        if reason["type"] == FinishReason.ABORT and status is not None and not flight.abort_requested:
            # Not somebody's abort but the server's own failure or refusal.
            if int(status) >= SERVER_ERRORS:
                return self._cut_short(flight, payload, str(reason.get("message")))
            raise refusal(int(status), str(reason.get("message")))
        generation = read_generation(event)
        self._note_weight_version(generation)
        return generation

    def _cut_short(self, flight: Flight, payload: bytes | None, reason: str) -> Generation:
        """The outcome of an attempt that did not end properly: what it brought so far, if an abort was wanted."""
        partial = NOTHING
        if payload is not None:
            event = decode_event(payload)
            if "error" not in event:
                partial = read_partial(event)
        if flight.abort_requested:
            return partial
        if not partial.token_ids and not flight.was_cut:
            raise AttemptFailedError(reason)
        if flight.was_cut:
            reason = "the engine was closed"
        raise EngineUnavailableError(
            f"{self._http.base_url}: {reason}; {len(partial.token_ids)} tokens were received", partial
        )

    async def _abort_at_server(self, rid: str) -> None:
        await asyncio.gather(*(self._abort_at(client, rid) for client in self._controls))

    async def _abort_at(self, client: HttpClient, rid: str) -> None:
        try:
            await client.post_json(
                "/abort_request", {"rid": rid}, timeout_seconds=self._settings.control_timeout_seconds
            )
        except EngineUnavailableError:
            # A server that does not answer does not generate either, or notices the closed connection.
            pass

    # -- what the server is

    def _client(self, base_url: str) -> HttpClient:
        return HttpClient(
            base_url,
            keepalive_seconds=self._settings.keepalive_seconds,
            connect_timeout_seconds=self._settings.connect_timeout_seconds,
        )

    async def _close_clients(self) -> None:
        for client in (self._http, *self._controls):
            await client.close()

    async def _tokenize(self, body: dict[str, Any]) -> list[int]:
        answer = await self._control("/v1/tokenize", body)
        return [int(token_id) for token_id in answer["tokens"]]

    async def _control(self, path: str, body: Any = None) -> Any:
        """An idempotent call, with retries, by one worker after another. Raises EngineUnavailableError."""
        retry, timeout = self._settings.retry, self._settings.control_timeout_seconds
        failed = 0
        while True:
            client = self._controls[failed % len(self._controls)]
            try:
                if body is None:
                    return await client.get_json(path, timeout_seconds=timeout)
                return await client.post_json(path, body, timeout_seconds=timeout)
            except EngineUnavailableError:
                failed += 1
                if failed >= retry.attempts:
                    raise
            await asyncio.sleep(retry.wait_seconds(failed))

    async def _ask_model_info(self) -> ModelInfo:
        model, server = await self._control("/model_info"), await self._control("/server_info")
        if server.get("incremental_streaming_output"):
            raise EngineUnavailableError(
                f"{self._http.base_url} streams increments: start it without --incremental-streaming-output"
            )
        context_length = self._settings.context_length
        if context_length is None and server.get("max_req_input_len") is not None:
            # Not the model's context: the server may have memory for less than that.
            context_length = int(server["max_req_input_len"]) + INPUT_MARGIN
        if context_length is None:
            raise EngineUnavailableError(f"{self._http.base_url} does not tell its context: set context_length")
        self._ignores_seeds = not server.get("enable_deterministic_inference")
        name = str(model.get("served_model_name") or model["model_path"])
        return ModelInfo(
            name=name,
            vocab_size=self._settings.vocab_size or self._known_vocab_size(name) or await self._ask_vocab_size(),
            context_length=int(context_length),
            weight_version=str(model.get("weight_version") or "default"),
            log_prob_kind=LogProbKind.SAMPLED,
            default_max_new_tokens=self._settings.default_max_new_tokens,
        )

    def _known_vocab_size(self, name: str) -> int | None:
        """Of the same model as before: while a server is paused the question below gets no answer."""
        return self._info.vocab_size if self._info is not None and self._info.name == name else None

    async def _ask_vocab_size(self) -> int:
        """No endpoint tells it, but the refusal of an impossible log-prob question does. Nothing is generated."""
        question = {
            "input_ids": [0],
            "return_logprob": True,
            "token_ids_logprob": [-1],
            "sampling_params": {"max_new_tokens": 1},
        }
        try:
            async with (
                asyncio.timeout(self._settings.control_timeout_seconds),
                self._controls[0].post("/generate", question) as response,
            ):
                said = VALID_IDS.search(error_message(await response.read()))
        except LOST_CONNECTION as error:
            raise EngineUnavailableError(f"{self._http.base_url}: {error}") from error
        if said is None:
            raise EngineUnavailableError(
                f"{self._http.base_url} does not tell the size of its vocabulary: set vocab_size, "
                "which stands in the model's config.json"
            )
        return int(said[1])

    def _warn_of_ignored_seed(self, request: GenerationRequest) -> None:
        """Once: the server takes a seed without a word and draws as it likes."""
        if self._ignores_seeds and request.sampling.sampling_seed is not None:
            self._ignores_seeds = False
            logger.warning(
                "%s ignores sampling_seed: start it with --enable-deterministic-inference", self._http.base_url
            )

    def _note_weight_version(self, generation: Generation) -> None:
        info, spans = self._info, generation.weight_spans
        if info is not None and spans and spans[-1].version != info.weight_version:
            self._info = msgspec.structs.replace(info, weight_version=spans[-1].version)
