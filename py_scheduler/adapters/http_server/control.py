"""Pauses of an inference server, or of all the workers behind a router, and the calls that change its weights.

Invariants

- A call goes to every worker, and may be sent again: it is when its connection breaks.
- While it is paused nothing comes from the server, for as long as that takes: no silence counts as a fault.
- A pause that fails leaves no worker paused, as far as it can be reached.
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
)
from py_scheduler.adapters.http_server.values import SERVER_ERRORS
from py_scheduler.errors import EngineRejectedError, EngineUnavailableError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.adapters.http_server.model import ServedModel
    from py_scheduler.adapters.http_server.settings import ServerSettings
    from py_scheduler.adapters.in_flight import Flights
    from py_scheduler.domain.generation import PauseMode, WeightUpdate

logger = logging.getLogger(__name__)


class HttpControl:
    """The GenerationControl that is part of HttpBackend, which owns the attributes. Each server has its own calls."""

    _maker = ""
    """Of the server, as its users call it."""
    _controls: Sequence[HttpClient]
    _limits: ServerSettings
    _flights: Flights
    _served: ServedModel
    _paused_in: PauseMode | None = None

    async def pause(self, mode: PauseMode) -> None:
        was_paused_in = self._paused_in
        await self._prepare_pause(mode)
        self._flights.stand_still()
        # Before it is told: whoever gives up on the call leaves a server behind of which nobody knows, to be resumed.
        self._paused_in = mode
        try:
            await self._tell_pause(mode)
        except GenerationError:
            self._paused_in = was_paused_in
            if was_paused_in is None:
                await self._undo_pause()
            raise

    async def _undo_pause(self) -> None:
        """Some workers may have obeyed, also one whose answer was lost: they would hold what they are sent for ever."""
        try:
            await self._tell_resume(self._limits.control_timeout_seconds)
        except GenerationError as error:
            logger.warning("a pause that failed may last until somebody continues: %s", error)
        finally:
            self._flights.go_on()

    async def resume(self) -> None:
        await self._tell_resume(self._limits.pause_timeout_seconds)
        self._paused_in = None
        self._flights.go_on()

    async def update_weights(self, update: WeightUpdate) -> None:
        raise NotImplementedError

    async def name_weights(self, version: str) -> None:
        if await self.weight_version() != version:
            await self._tell_name(version)
        self._served.has_weights(version)

    async def weight_version(self) -> str:
        versions = set(await asyncio.gather(*map(self._version_at, self._controls)))
        return versions.pop() if len(versions) == 1 else ""

    # -- the calls of each server

    async def _prepare_pause(self, mode: PauseMode) -> None:
        """Before a pause, where it takes something to be safe."""

    async def _tell_pause(self, mode: PauseMode) -> None:
        raise NotImplementedError

    async def _tell_resume(self, timeout_seconds: float) -> None:
        raise NotImplementedError

    async def _tell_name(self, version: str) -> None:
        raise NotImplementedError

    async def _version_at(self, client: HttpClient) -> str:
        raise NotImplementedError

    def _has_obeyed(self, answer: Any, source: str) -> bool:
        """Whether an answer of status 200 says so. Raises EngineUnavailableError for one that is not the server's."""
        raise NotImplementedError

    async def _command(self, path: str, body: dict[str, Any], timeout_seconds: float) -> None:
        """To every worker at once. Raises EngineUnavailableError, EngineRejectedError."""
        retry = self._limits.retry

        async def send(client: HttpClient) -> None:
            for failed in range(1, retry.attempts + 1):
                try:
                    return await self._post(client, path, body, timeout_seconds)
                except TimeoutError as error:
                    message = f"{client.base_url}{path}: no answer within {timeout_seconds:g} s"
                    raise EngineUnavailableError(message) from error
                except LOST_CONNECTION as error:
                    self._served.was_away()
                    if failed == retry.attempts:
                        raise EngineUnavailableError(f"{client.base_url}{path}: {error}") from error
                await asyncio.sleep(retry.wait_seconds(failed))
            return None

        answers = await asyncio.gather(*map(send, self._controls), return_exceptions=True)
        for answer in answers:
            if answer is not None:
                raise answer

    async def _post(self, client: HttpClient, path: str, body: dict[str, Any], timeout_seconds: float) -> None:
        async with asyncio.timeout(timeout_seconds), client.post(path, body) as response:
            content = await body_of(response)
            if response.status >= SERVER_ERRORS:
                message = f"{client.base_url}{path} answered {response.status}: {error_message(content)}"
                raise EngineUnavailableError(message)
            is_obeyed = response.status == HTTP_OK
            if is_obeyed:
                is_obeyed = self._has_obeyed(decode_json(content), client.base_url + path)
            if not is_obeyed:
                called = path.partition("?")[0].removeprefix("/")
                raise EngineRejectedError(f"{self._maker} refused {called}: {error_message(content)}")
