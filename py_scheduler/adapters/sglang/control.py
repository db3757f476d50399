"""Pauses and weights of an SGLang server, or of all the workers behind a router.

What 0.5.23 was seen to do, and what follows from it here:

- A pause in mode abort waits for all requests to end and answers nothing else until then. Those of a server that stands
  still in another mode never end, so whatever pause somebody left behind is ended first.
- In mode in_place the cache cannot be flushed, and asking for it is answered 400 although the weights were changed: it
  is asked for in every other mode.
- `abort_all_requests` of an update is answered 400 likewise, so it is never used: a pause does the same.
- An abort of a request that a pause holds is lost: only the end of its connection frees it, which `abort` brings about.
- While it is paused nothing comes from the server, for as long as that takes: no silence counts as a fault.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.http_client import (
    HTTP_OK,
    LOST_CONNECTION,
    HttpClient,
    body_of,
    decode_json,
    error_message,
    read_as,
)
from py_scheduler.adapters.sglang.answers import Obeyed, ServedWeights
from py_scheduler.domain.generation import PauseMode
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.in_flight import Flights
    from py_scheduler.adapters.sglang.model import ServedModel
    from py_scheduler.adapters.sglang.settings import SglangSettings
    from py_scheduler.domain.generation import WeightUpdate

logger = logging.getLogger(__name__)

_SERVER_ERRORS = 500


class SglangControl:
    """The GenerationControl that is part of SglangBackend, which owns the attributes."""

    _controls: Sequence[HttpClient]
    _settings: SglangSettings
    _flights: Flights
    _model: ServedModel
    _paused_in: PauseMode | None = None

    async def pause(self, mode: PauseMode) -> None:
        was_paused_in, timeout = self._paused_in, self._settings.pause_timeout_seconds
        if mode is PauseMode.ABORT and was_paused_in is None:
            await self._command("/continue_generation", {}, timeout)
        self._flights.stand_still()
        # Before it is told: whoever gives up on the call leaves a server behind of which nobody knows, to be resumed.
        self._paused_in = mode
        try:
            await self._command("/pause_generation", {"mode": str(mode)}, timeout)
        except GenerationError:
            self._paused_in = was_paused_in
            if was_paused_in is None:
                await self._undo_pause()
            raise

    async def _undo_pause(self) -> None:
        """Some workers may have obeyed, also one whose answer was lost: they would hold what they are sent for ever."""
        try:
            await self._command("/continue_generation", {}, self._settings.control_timeout_seconds)
        except GenerationError as error:
            logger.warning("a pause that failed may last until somebody continues: %s", error)
        finally:
            self._flights.go_on()

    async def resume(self) -> None:
        await self._command("/continue_generation", {}, self._settings.pause_timeout_seconds)
        self._paused_in = None
        self._flights.go_on()

    async def update_weights(self, update: WeightUpdate) -> None:
        body = {
            "model_path": update.model_path,
            "weight_version": update.weight_version,
            "flush_cache": self._paused_in is not PauseMode.IN_PLACE,
            "keep_pause": self._paused_in is not None,
        }
        await self._command("/update_weights_from_disk", body, self._settings.weight_update_timeout_seconds)
        self._model.has_weights(update.weight_version)

    async def name_weights(self, version: str) -> None:
        if await self.weight_version() != version:
            # By default the server aborts all that it runs, which a pause in another mode than abort keeps.
            body = {"new_version": version, "abort_all_requests": False}
            await self._command("/update_weight_version", body, self._settings.control_timeout_seconds)
        self._model.has_weights(version)

    async def weight_version(self) -> str:
        timeout = self._settings.control_timeout_seconds
        answers = await asyncio.gather(
            *(client.get_json("/model_info", timeout_seconds=timeout) for client in self._controls)
        )
        told = [read_as(ServedWeights, answer, "/model_info") for answer in answers]
        versions = {each.weight_version or "default" for each in told}
        return versions.pop() if len(versions) == 1 else ""

    async def _command(self, path: str, body: dict[str, Any], timeout_seconds: float) -> None:
        """To every worker at once. Each may be sent again, and is when its connection breaks."""
        retry = self._settings.retry

        async def send(client: HttpClient) -> None:
            for failed in range(1, retry.attempts + 1):
                try:
                    return await _post(client, path, body, timeout_seconds)
                except TimeoutError as error:
                    message = f"{client.base_url}{path}: no answer within {timeout_seconds:g} s"
                    raise EngineUnavailableError(message) from error
                except LOST_CONNECTION as error:
                    if failed == retry.attempts:
                        raise EngineUnavailableError(f"{client.base_url}{path}: {error}") from error
                await asyncio.sleep(retry.wait_seconds(failed))
            return None

        answers = await asyncio.gather(*map(send, self._controls), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer


async def _post(client: HttpClient, path: str, body: dict[str, Any], timeout_seconds: float) -> None:
    async with asyncio.timeout(timeout_seconds), client.post(path, body) as response:
        content = await body_of(response)
        if response.status >= _SERVER_ERRORS:
            message = f"{client.base_url}{path} answered {response.status}: {error_message(content)}"
            raise EngineUnavailableError(message)
        is_obeyed = response.status == HTTP_OK
        if is_obeyed:
            is_obeyed = read_as(Obeyed, decode_json(content), client.base_url + path).success
        if not is_obeyed:
            raise EngineRejectedError(f"SGLang refused {path.removeprefix('/')}: {error_message(content)}")
