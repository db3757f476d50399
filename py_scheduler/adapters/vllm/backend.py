"""Generation by one vLLM server over its token-level API; written against what 0.32.0 was seen to do on a CPU.

Generations are streamed in increments, so that a closed connection frees the request at once and tokens received are
kept. The matched stop token is part of the ids that come back (a matched stop string is in the ids, not in the text).
What the log-probs are of depends on the server's --logprobs-mode (see `model.py`): the distribution that was sampled
from, after temperature, penalties, top_k, top_p and min_p, or the model's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.adapters.http_client import read_as
from py_scheduler.adapters.http_server.attempt import Attempt, AttemptFailedError, Silence
from py_scheduler.adapters.http_server.backend import HttpBackend
from py_scheduler.adapters.http_server.settings import ServerSettings
from py_scheduler.adapters.vllm.answers import Load
from py_scheduler.adapters.vllm.control import VllmControl
from py_scheduler.adapters.vllm.model import ServedVllm
from py_scheduler.adapters.vllm.output import VllmOutput
from py_scheduler.adapters.vllm.requests import ABORT, GENERATE, generate_body, known_there_as, refusal
from py_scheduler.errors import EngineUnavailableError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.http_client import HttpClient
    from py_scheduler.adapters.http_server.encoded import EncodedPrompts
    from py_scheduler.adapters.in_flight import Flight
    from py_scheduler.domain.generation import GenerationRequest, ModelInfo
    from py_scheduler.errors import EngineRejectedError


class VllmBackend(VllmControl, HttpBackend):
    """A GenerationBackend, with GenerationControl, on the vLLM server, or the router, at `base_url`."""

    def __init__(
        self,
        base_url: str,
        *,
        control_urls: Sequence[str] = (),
        settings: ServerSettings | None = None,
        encoded: EncodedPrompts | None = None,
    ) -> None:
        """See HttpBackend."""
        self._settings = settings or ServerSettings()
        super().__init__(base_url, control_urls=control_urls, settings=self._settings, encoded=encoded)
        self._served = self._model = ServedVllm(self.base_url, self._controls, self._settings, self._encoded)

    async def refresh_model_info(self) -> ModelInfo:
        await self.end_own_pause()
        return await super().refresh_model_info()

    async def ask_requests(self) -> int:
        """0 where the server was not told to count them."""
        answer = await self._controls[0].get_json("/load", timeout_seconds=self._settings.control_timeout_seconds)
        return read_as(Load, answer, self.base_url + "/load").server_load

    def _attempt_of(self, rid: str, request: GenerationRequest) -> Attempt:
        info = self._model.info
        assert info is not None
        body = generate_body(rid, request, self._settings)
        sampling = body["sampling_params"]
        between = min(sampling["max_tokens"], sampling.get("stream_interval", 1))
        output = VllmOutput(info.log_prob_kind)
        return Attempt(GENERATE, body, True, Silence.of(0, between, self._settings), output)

    async def _until_known(self, _request: GenerationRequest, flight: Flight) -> None:
        """A server that was paused when it was met tells what its log-probs are of, and generates, once it goes on."""
        if self._model.is_certain:
            return
        try:
            async with flight.watched(self._settings.first_token_timeout_seconds):
                await self._model.make_certain()
        except (TimeoutError, EngineUnavailableError) as error:
            raise AttemptFailedError(str(error) or "no answer in time") from error

    def _refusal(self, status: int, message: str) -> AttemptFailedError | EngineRejectedError:
        return refusal(status, message)

    async def _abort_at(self, client: HttpClient, rid: str) -> None:
        body, timeout = {"request_ids": [known_there_as(rid)]}, self._settings.control_timeout_seconds
        try:
            await client.post_json(ABORT, body, timeout_seconds=timeout)
        except EngineUnavailableError:
            pass
