"""Generation by one inference server over its HTTP API; what is that server's own, each kind of server says.

Invariants:

- Every attempt has a backend rid of its own that is never used again: a server may abort what has ended once more,
  whoever has its rid then. An attempt that may have reached the server and did not end there is aborted there before
  anything else happens: nothing decodes on for nobody.
- An attempt is repeated only while not one token of it was received. After that a lost or silent connection, or an
  error of the server's, raises EngineUnavailableError with the tokens so far as `partial`, whose finish reason is
  ABORT: never taken for complete.
- Nothing is sent that `check_request` has not passed.
- After a connection that broke the server is asked what it serves before the next attempt. Tokens of which nobody told
  the weights are of those that it had, if it still has them; else their weights have no name.
- The request is at fault only where the server refuses it in its own form. Whatever else answers, answers for it no
  more than a broken connection would.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from typing import TYPE_CHECKING

import aiohttp
import msgspec

from py_scheduler.adapters.http_client import (
    HTTP_OK,
    LOST_CONNECTION,
    HttpClient,
    body_of,
    error_message,
    is_away,
    is_refusal,
    sse_payloads,
)
from py_scheduler.adapters.http_server.attempt import AttemptFailedError
from py_scheduler.adapters.http_server.control import HttpControl
from py_scheduler.adapters.http_server.encoded import EncodedPrompts, chat_body, text_body
from py_scheduler.adapters.http_server.values import NOTHING
from py_scheduler.adapters.in_flight import Flight, Flights
from py_scheduler.adapters.request_checks import check_request
from py_scheduler.domain.generation import Generation, WeightSpan
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.http_server.attempt import Attempt, Output
    from py_scheduler.adapters.http_server.settings import ServerSettings
    from py_scheduler.domain.generation import ChatMessage, GenerationRequest, ModelInfo

DONE = b"[DONE]"
ABORT_REPEAT_SECONDS = 0.25


class HttpBackend(HttpControl):
    """A GenerationBackend, with GenerationControl, on the server at `base_url`. A subclass sets `_served` as well.

    With `control_urls` that is a router, which forwards generations and knows no other call: everything else goes to
    the workers behind it, an abort to each, since only the router knows which has the rid.
    """

    def __init__(
        self,
        base_url: str,
        *,
        control_urls: Sequence[str],
        settings: ServerSettings,
        encoded: EncodedPrompts | None,
    ) -> None:
        """encoded: what servers of its model were asked to encode; None: what this one is asked."""
        self._limits = settings
        self._http = self._client(base_url)
        self._controls = [self._client(url) for url in control_urls] or [self._http]
        self._is_behind_router = bool(control_urls)
        self._flights = Flights()
        self._encoded = encoded or EncodedPrompts(settings.encoded_seconds)
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
        return self._served.info

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
        await self._flights.close(self._limits.control_timeout_seconds)
        await self._close_clients()

    async def model_info(self) -> ModelInfo:
        """Asked once; the weight version follows what generations report."""
        return await self._served.known()

    async def refresh_model_info(self) -> ModelInfo:
        """Asks anew: a server that was away may have come back with other weights."""
        return await self._served.refresh()

    async def ask_requests(self) -> int:
        """Requests that run or wait at the server, whoever sent them. Asked once. Raises EngineUnavailableError."""
        raise NotImplementedError

    async def encode(self, text: str) -> list[int]:
        return await self._encoded.of(text_body(text), self.tokenize)

    async def encode_chat(self, messages: Sequence[ChatMessage]) -> list[int]:
        """By the server's own tokenizer and chat template."""
        return await self._encoded.of(chat_body(messages), self.tokenize)

    async def tokenize(self, body: bytes) -> list[int]:
        """Asks the server, whatever it has answered before. See `encoded.py`."""
        return await self._served.tokenize(body)

    async def generate(self, request: GenerationRequest) -> Generation:
        """See GenerationBackend. EngineUnavailableError carries tokens that were received as `partial`."""
        retry, wanted = self._limits.retry, request.sampling.max_new_tokens
        with self._flights.enter(request.rid) as flight:
            info = await self.model_info()
            most = self._limits.default_max_new_tokens if wanted is None else wanted
            check_request(request, info, most)
            failed = 0
            while True:
                rid = f"{request.rid}~{self._nonce}{next(self._attempt_numbers)}"
                try:
                    info = await self._met(request, most, flight)
                    return await self._told(info, await self._attempt(rid, request, flight, fresh=failed > 0))
                except GenerationError as error:
                    if isinstance(error.partial, Generation):
                        error.partial = await self._told(info, error.partial)
                    raise
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
                    return self._cut_short(flight, NOTHING, "closed while waiting for a retry")

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
            async with asyncio.timeout(self._limits.abort_grace_seconds):
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

    async def _met(self, request: GenerationRequest, most: int, flight: Flight) -> ModelInfo:
        """What the server is now. most: tokens that are asked for. Raises AttemptFailedError, EngineRejectedError."""
        if self._served.is_doubted:
            try:
                async with flight.watched(self._limits.first_token_timeout_seconds):
                    await self._served.meet_again(self.refresh_model_info)
            except (TimeoutError, EngineUnavailableError) as error:
                raise AttemptFailedError(str(error) or "no answer in time") from error
            check_request(request, await self.model_info(), most)
        await self._until_known(request, flight)
        return await self.model_info()

    async def _told(self, before: ModelInfo, made: Generation) -> Generation:
        """With the weights, where the server has not told them. before: what it was when the attempt began."""
        if made.weight_spans or not made.token_count:
            return made
        try:
            now = await self.weight_version()
        except GenerationError:
            now = ""
        version = now if now == before.weight_version else ""
        return msgspec.structs.replace(made, weight_spans=(WeightSpan(version, 0, made.token_count),))

    async def _attempt(self, rid: str, request: GenerationRequest, flight: Flight, *, fresh: bool) -> Generation:
        path, body, is_stream, silence, output = self._attempt_of(rid, request)
        over = False
        try:
            async with flight.watched(silence.first_seconds):
                flight.backend_rid = rid
                async with self._http.post(path, body, fresh=fresh) as response:
                    if response.status != HTTP_OK:
                        content = await body_of(response)
                        over = True
                        return self._not_done(flight, output, response.status, content)
                    if not is_stream:
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
            self._served.was_away()
            return self._cut_short(flight, output.partial(), str(error))
        except LOST_CONNECTION as error:
            if is_away(error):
                self._served.was_away()
            if not over:
                over = True
                await asyncio.wait({self._flights.clean_up(self._abort_at_server(rid))})
                return self._cut_short(flight, output.partial(), str(error) or "no answer in time")
        finally:
            flight.backend_rid = ""
            if not over:
                self._flights.clean_up(self._abort_at_server(rid))  # type: ignore[unused-awaitable]
        return self._finished(flight, output)

    def _finished(self, flight: Flight, output: Output) -> Generation:
        """What the last event of a stream that ended properly says."""
        if not output.settle():
            return self._cut_short(flight, NOTHING, "the stream was empty")
        self._has_read(output)
        if output.failure is not None and not flight.abort_requested:
            return self._refused(flight, output, *output.failure)
        generation = output.whole()
        if generation.weight_spans:
            self._served.has_weights(generation.weight_spans[-1].version)
        return generation

    def _not_done(self, flight: Flight, output: Output, status: int, content: bytes) -> Generation:
        """The outcome of an attempt that was answered with another status than 200."""
        message = error_message(content)
        if is_refusal(status, content):
            return self._refused(flight, output, status, message)
        return self._cut_short(flight, NOTHING, f"status {status}: {message}")

    def _refused(self, flight: Flight, output: Output, status: int, message: str) -> Generation:
        """The outcome of an attempt that the server gave up or would not begin."""
        error, partial = self._refusal(status, message), output.partial()
        if isinstance(error, AttemptFailedError):
            return self._cut_short(flight, partial, str(error))
        error.partial = partial if partial.token_count else None
        raise error

    def _cut_short(self, flight: Flight, partial: Generation, reason: str) -> Generation:
        """The outcome of an attempt that did not end properly: what it brought so far, if an abort was wanted."""
        self._encoded.forget()  # Who answers next may be another server.
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

    # -- what each kind of server says

    def _attempt_of(self, rid: str, request: GenerationRequest) -> Attempt:
        raise NotImplementedError

    async def _until_known(self, _request: GenerationRequest, flight: Flight) -> None:
        """Before an attempt, where the server has to tell more than it did when it was met.

        Raises AttemptFailedError, EngineRejectedError.
        """

    def _has_read(self, output: Output) -> None:
        """A stream that ended properly may have shown how the server streams."""

    def _refusal(self, status: int, message: str) -> AttemptFailedError | EngineRejectedError:
        """What it means for the request that the server says so in its own form."""
        raise NotImplementedError

    async def _abort_at(self, client: HttpClient, rid: str) -> None:
        """Raises nothing: a server that does not answer does not generate either, or notices the closed connection."""
        raise NotImplementedError

    # -- what the server is

    def _client(self, base_url: str) -> HttpClient:
        return HttpClient(
            base_url,
            keepalive_seconds=self._limits.keepalive_seconds,
            connect_timeout_seconds=self._limits.connect_timeout_seconds,
        )

    async def _close_clients(self) -> None:
        for client in (self._http, *self._controls):
            await client.close()
