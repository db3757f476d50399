"""Generation by one SGLang server over its HTTP API; written against what 0.5.23 was seen to do.

Invariants:

- Every attempt has a backend rid of its own that is never used again: two seconds after a stream's end the server
  aborts its rid once more, whoever has it then. An attempt that may have reached the server and did not end there is
  aborted there before anything else happens: nothing decodes on for nobody.
- An attempt is repeated only while not one token of it was received. After that a lost or silent connection, or an
  error of the server's, raises EngineUnavailableError with the tokens so far as `partial`, whose finish reason is
  ABORT: never taken for complete.
- Nothing is sent that `check_request` has not passed.

Generations are streamed unless that is turned off, so that a closed connection frees the request at once (a plain one
after some three seconds) and tokens received are kept: in increments where the server has them, else in a few events
that repeat the output so far (see `streaming.py`). The matched stop token is part of the ids that come back (a matched
stop string is in the ids, not in the text), and log-probs are scaled by temperature.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import TYPE_CHECKING

import aiohttp

from py_scheduler.adapters.http_client import (
    HTTP_OK,
    LOST_CONNECTION,
    HttpClient,
    body_of,
    error_message,
    read_as,
    sse_payloads,
)
from py_scheduler.adapters.in_flight import Flight, Flights
from py_scheduler.adapters.request_checks import check_request
from py_scheduler.adapters.sglang.answers import Loads
from py_scheduler.adapters.sglang.control import SglangControl
from py_scheduler.adapters.sglang.encoded import EncodedPrompts, chat_body, text_body
from py_scheduler.adapters.sglang.model import ServedModel
from py_scheduler.adapters.sglang.output import Output
from py_scheduler.adapters.sglang.requests import AttemptFailedError, generate_body, refusal
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.adapters.sglang.streaming import Silence
from py_scheduler.domain.generation import (
    Generation,
    GenerationRequest,
)
from py_scheduler.errors import (
    EngineUnavailableError,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.generation import ChatMessage, ModelInfo

DONE = b"[DONE]"
ABORT_REPEAT_SECONDS = 0.25


class SglangBackend(SglangControl):
    """A GenerationBackend, with GenerationControl, on the SGLang server at `base_url`.

    With `control_urls` that is a router, which forwards generations and knows no other call: everything else goes to
    the workers behind it, an abort to each, since only the router knows which has the rid.
    """

    def __init__(
        self,
        base_url: str,
        *,
        control_urls: Sequence[str] = (),
        settings: SglangSettings | None = None,
        encoded: EncodedPrompts | None = None,
    ) -> None:
        """encoded: what servers of its model were asked to encode; None: what this one is asked."""
        self._settings = settings or SglangSettings()
        self._http = self._client(base_url)
        self._controls = [self._client(url) for url in control_urls] or [self._http]
        self._is_behind_router = bool(control_urls)
        self._flights = Flights()
        self._encoded = encoded or EncodedPrompts(self._settings.encoded_seconds)
        self._model = ServedModel(self._http.base_url, self._controls, self._settings, self._encoded)
        self._nonce = secrets.token_hex(4)
        self._attempt_numbers = itertools.count()

    @property
    def base_url(self) -> str:
        return self._http.base_url

    @property
    def control_urls(self) -> tuple[str, ...]:
        """Of the workers behind a router."""
        return tuple([client.base_url for client in self._controls]) if self._is_behind_router else ()

    @property
    def known_model(self) -> ModelInfo | None:
        """What `model_info` would answer, once it was asked."""
        return self._model.info

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
        return await self._model.known()

    async def refresh_model_info(self) -> ModelInfo:
        """Asks anew: a server that was away may have come back with other weights."""
        return await self._model.refresh()

    async def ask_requests(self) -> int:
        """Requests that run or wait at the server, whoever sent them. Asked once. Raises EngineUnavailableError."""
        path = "/v1/loads?include=core"
        answer = await self._controls[0].get_json(path, timeout_seconds=self._settings.control_timeout_seconds)
        loads = read_as(Loads, answer, self.base_url + path).loads
        return sum(rank.num_running_reqs + rank.num_waiting_reqs for rank in loads)

    async def encode(self, text: str) -> list[int]:
        return await self._encoded.of(text_body(text), self.tokenize)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """By the server's own tokenizer and chat template."""
        return await self._encoded.of(chat_body(messages), self.tokenize)

    async def tokenize(self, body: bytes) -> list[int]:
        """Asks the server, whatever it has answered before. See `encoded.py`."""
        return await self._model.tokenize(body)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See GenerationBackend. EngineUnavailableError carries tokens that were received as `partial`."""
        retry, wanted = self._settings.retry, request.sampling.max_new_tokens
        with self._flights.enter(request.rid) as flight:
            info = await self.model_info()
            check_request(request, info, self._settings.default_max_new_tokens if wanted is None else wanted)
            if request.sampling.sampling_seed is not None:
                self._model.warn_of_ignored_seed()
            failed = 0
            while True:
                rid = f"{request.rid}~{self._nonce}{next(self._attempt_numbers)}"
                try:
                    await self._check_vocabulary(request, flight)
                    return await self._attempt(rid, request, flight, fresh=failed > 0)
                except AttemptFailedError as failure:
                    failed += 1
                    if self._is_behind_router:
                        # What a router answers for a worker that it has lost says nothing of what goes on there.
                        await asyncio.wait({self._flights.clean_up(self._abort_at_server(rid))})
                    if failed >= retry.attempts and not flight.was_cut:
                        raise EngineUnavailableError(
                            f"{self._http.base_url} failed {failed} times in a row, last: {failure}"
                        ) from failure
                try:
                    async with flight.watched():
                        await asyncio.sleep(retry.wait_seconds(failed))
                except TimeoutError:
                    return self._cut_short(flight, Output(), "closed while waiting for a retry")

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
                while flight.backend_rid:
                    await self._abort_at_server(flight.backend_rid)
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

    async def _check_vocabulary(self, request: GenerationRequest, flight: Flight) -> None:
        """Of a server that was paused when it was met: it tells its vocabulary, and generates, once it goes on."""
        if (await self.model_info()).vocab_size:
            return
        try:
            async with flight.watched(self._settings.first_token_timeout_seconds):
                info = await self._model.with_vocabulary()
        except (TimeoutError, EngineUnavailableError) as error:
            raise AttemptFailedError(str(error) or "no answer in time") from error
        check_request(request, info, 1)

    async def _attempt(self, rid: str, request: GenerationRequest, flight: Flight, *, fresh: bool) -> Generation:
        body = generate_body(request, self._settings, self._model.streaming)
        silence, output, over = Silence.of(body, self._settings), Output(), False
        try:
            async with flight.watched(silence.first_seconds):
                flight.backend_rid = rid
                async with self._http.post("/generate", body | {"rid": rid}, fresh=fresh) as response:
                    if response.status != HTTP_OK:
                        content = await body_of(response)
                        over = True
                        return self._refused(flight, output, response.status, error_message(content))
                    if not body["stream"]:
                        content = await body_of(response)
                        over = True
                        output.add(content)
                    async for payload in sse_payloads(response.content):
                        flight.allow(silence.next_seconds)
                        if payload == DONE:
                            over = True  # Read on to the end of the body: only then can the connection be used again.
                        else:
                            output.add(payload)
            if not over:
                raise aiohttp.ClientPayloadError("the stream ended before the generation did")
        except aiohttp.ClientConnectorError as error:
            over = True  # It never reached the server.
            return self._cut_short(flight, output, str(error))
        except LOST_CONNECTION as error:
            if not over:
                over = True
                await asyncio.wait({self._flights.clean_up(self._abort_at_server(rid))})
                return self._cut_short(flight, output, str(error) or "no answer in time")
        finally:
            flight.backend_rid = ""
            if not over:
                self._flights.clean_up(self._abort_at_server(rid))  # type: ignore[unused-awaitable]
        return self._finished(flight, output)

    def _finished(self, flight: Flight, output: Output) -> Generation:
        """What the last event of a stream that ended properly says."""
        if not output.settle():
            return self._cut_short(flight, output, "the stream was empty")
        if output.streaming is not None:
            self._model.streams(output.streaming)
        if output.failure is not None and not flight.abort_requested:
            return self._refused(flight, output, *output.failure)
        generation = output.whole()
        if generation.weight_spans:
            self._model.has_weights(generation.weight_spans[-1].version)
        return generation

    def _refused(self, flight: Flight, output: Output, status: int, message: str) -> Generation:
        """The outcome of an attempt that the server gave up or would not begin."""
        error = refusal(status, message, of_router=self._is_behind_router)
        if isinstance(error, AttemptFailedError):
            return self._cut_short(flight, output, str(error))
        partial = output.partial()
        error.partial = partial if partial.token_count else None
        raise error

    def _cut_short(self, flight: Flight, output: Output, reason: str) -> Generation:
        """The outcome of an attempt that did not end properly: what it brought so far, if an abort was wanted."""
        self._encoded.forget()  # Who answers next may be another server.
        partial = output.partial()
        if flight.abort_requested:
            return partial
        if not partial.token_count and not flight.was_cut:
            raise AttemptFailedError(reason)
        if flight.was_cut:
            reason = "the engine was closed"
        raise EngineUnavailableError(
            f"{self._http.base_url}: {reason}; {partial.token_count} tokens were received", partial
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
