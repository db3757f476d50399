"""Generation by one SGLang server over its HTTP API; written against what 0.5.23 was seen to do.

Two seconds after a stream's end the server aborts its rid once more. Generations are streamed unless that is turned
off, so that a closed connection frees the request at once (a plain one after some three seconds) and tokens received
are kept: in increments where the server has them, else in a few events that repeat the output so far (see
`streaming.py`). The matched stop token is part of the ids that come back (a matched stop string is in the ids, not in
the text), and log-probs are scaled by temperature.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.adapters.http_client import read_as
from py_scheduler.adapters.http_server.attempt import Attempt, AttemptFailedError
from py_scheduler.adapters.http_server.backend import HttpBackend
from py_scheduler.adapters.request_checks import check_request
from py_scheduler.adapters.sglang.answers import Loads
from py_scheduler.adapters.sglang.control import SglangControl
from py_scheduler.adapters.sglang.model import ServedSglang
from py_scheduler.adapters.sglang.output import SglangOutput
from py_scheduler.adapters.sglang.requests import generate_body, refusal
from py_scheduler.adapters.sglang.settings import SglangSettings
from py_scheduler.adapters.sglang.streaming import silence_of
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.http_client import HttpClient
    from py_scheduler.adapters.http_server.attempt import Output
    from py_scheduler.adapters.http_server.encoded import EncodedPrompts
    from py_scheduler.adapters.in_flight import Flight
    from py_scheduler.domain.generation import GenerationRequest
    from py_scheduler.errors import EngineRejectedError


class SglangBackend(SglangControl, HttpBackend):
    """A GenerationBackend, with GenerationControl, on the SGLang server, or the router, at `base_url`."""

    def __init__(
        self,
        base_url: str,
        *,
        control_urls: Sequence[str] = (),
        settings: SglangSettings | None = None,
        encoded: EncodedPrompts | None = None,
    ) -> None:
        """See HttpBackend."""
        self._settings = settings or SglangSettings()
        super().__init__(base_url, control_urls=control_urls, settings=self._settings, encoded=encoded)
        self._served = self._model = ServedSglang(self.base_url, self._controls, self._settings, self._encoded)

    async def ask_requests(self) -> int:
        path = "/v1/loads?include=core"
        answer = await self._controls[0].get_json(path, timeout_seconds=self._settings.control_timeout_seconds)
        loads = read_as(Loads, answer, self.base_url + path).loads
        return sum(rank.num_running_reqs + rank.num_waiting_reqs for rank in loads)

    def _attempt_of(self, rid: str, request: GenerationRequest) -> Attempt:
        body = generate_body(request, self._settings, self._model.streaming)
        silence = silence_of(body, self._settings)
        return Attempt("/generate", body | {"rid": rid}, body["stream"], silence, SglangOutput())

    async def _until_known(self, request: GenerationRequest, flight: Flight, /) -> None:
        """A server that was paused when it was met tells its vocabulary, and generates, once it goes on."""
        if request.sampling.sampling_seed is not None:
            self._model.warn_of_ignored_seed()
        if (await self.model_info()).vocab_size:
            return
        try:
            async with flight.watched(self._settings.first_token_timeout_seconds):
                info = await self._model.with_vocabulary()
        except (TimeoutError, EngineUnavailableError) as error:
            raise AttemptFailedError(str(error) or "no answer in time") from error
        check_request(request, info, 1)

    def _has_read(self, output: Output) -> None:
        if isinstance(output, SglangOutput) and output.streaming is not None:
            self._model.streams(output.streaming)

    def _refusal(self, status: int, message: str) -> AttemptFailedError | EngineRejectedError:
        return refusal(status, message, of_router=self._is_behind_router)

    async def _abort_at(self, client: HttpClient, rid: str) -> None:
        try:
            await client.post_json(
                "/abort_request", {"rid": rid}, timeout_seconds=self._settings.control_timeout_seconds
            )
        except EngineUnavailableError:
            pass
