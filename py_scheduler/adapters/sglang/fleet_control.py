"""Pauses and weights of all the servers of a fleet.

Invariants

- Every endpoint that is up is told of a call. One that fails it is set aside, and the others go on.
- Before such an endpoint is up again, it has what it missed: the end of a pause, and the weights that the fleet was
  given last. The same holds for all of them after an update that its caller gave up half-way.
- A pause that fails leaves no endpoint paused that takes generations.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from py_scheduler.errors import EngineRejectedError, EngineUnavailableError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.adapters.sglang.backend import SglangBackend
    from py_scheduler.adapters.sglang.endpoint import Endpoint
    from py_scheduler.domain.generation import ModelInfo, PauseMode, WeightUpdate

logger = logging.getLogger(__name__)


class FleetControl:
    """The GenerationControl that is part of SglangFleet, which owns `_endpoints`."""

    _endpoints: Sequence[Endpoint]
    _update: WeightUpdate | None = None
    _is_paused = False

    def __init__(self) -> None:
        self._to_resume: set[Endpoint] = set()

    async def pause(self, mode: PauseMode) -> None:
        was_paused, self._is_paused = self._is_paused, True
        self._to_resume.update(each for each in self._endpoints if each.is_up)
        try:
            await self._tell(lambda backend: backend.pause(mode))
        except GenerationError:
            if not was_paused:
                await self._undo_pause()
            raise

    async def _undo_pause(self) -> None:
        """Those that obeyed go on now or, where that fails too, before they are up again."""
        self._is_paused = False
        endpoints = [each for each in self._to_resume if each.is_up]
        answers = await asyncio.gather(*(each.backend.resume() for each in endpoints), return_exceptions=True)
        for endpoint, answer in zip(endpoints, answers, strict=True):
            if answer is None:
                self._to_resume.discard(endpoint)
            else:
                endpoint.failed(f"a pause that failed was not undone: {answer}")

    async def resume(self) -> None:
        """Also when no endpoint obeys, or is up: none comes up again that has not been told."""
        self._is_paused = False
        try:
            self._to_resume -= await self._tell(lambda backend: backend.resume())
        except EngineUnavailableError as error:
            logger.warning("the end of the pause reached no endpoint yet: %s", error)

    async def update_weights(self, update: WeightUpdate) -> None:
        # Before it is told: whoever comes up meanwhile is held to it.
        before, self._update = self._update, update
        try:
            await self._tell(lambda backend: backend.update_weights(update))
        except EngineRejectedError:
            self._update = before
            raise
        except asyncio.CancelledError:
            # Nobody heard which of them has loaded it: each is asked, and told again if need be, before it comes up.
            for endpoint in self._endpoints:
                endpoint.failed("an update of its weights was broken off")
            raise

    async def weight_version(self) -> str:
        """As those say that answer; empty when they differ. Raises EngineUnavailableError when none does."""
        asked = (each.backend.weight_version() for each in self._up())
        answers = await asyncio.gather(*asked, return_exceptions=True)
        versions = {answer for answer in answers if isinstance(answer, str)}
        for answer in answers:
            if isinstance(answer, BaseException) and not (versions and isinstance(answer, EngineUnavailableError)):
                raise answer
        return versions.pop() if len(versions) == 1 else ""

    async def _catch_up(self, endpoint: Endpoint, info: ModelInfo) -> ModelInfo:
        """Gives one that is about to come up what it missed. Raises GenerationError when that fails."""
        backend, update = endpoint.backend, self._update
        if update is not None and self._misses_update(info):
            await backend.update_weights(update)
            info = await backend.refresh_model_info()
        if self._misses_resume(endpoint):
            await backend.resume()
            self._to_resume.discard(endpoint)
        return info

    def _misses_resume(self, endpoint: Endpoint) -> bool:
        return not self._is_paused and endpoint in self._to_resume

    def _misses_update(self, info: ModelInfo) -> bool:
        return self._update is not None and info.weight_version != self._update.weight_version

    async def _tell(self, order: Callable[[SglangBackend], Awaitable[None]]) -> set[Endpoint]:
        """Those that obeyed. Raises EngineUnavailableError when none did, EngineRejectedError when one refused."""
        endpoints = self._up()
        answers = await asyncio.gather(*(order(each.backend) for each in endpoints), return_exceptions=True)
        failures = [answer for answer in answers if answer is not None]
        for endpoint, answer in zip(endpoints, answers, strict=True):
            if isinstance(answer, EngineUnavailableError):
                endpoint.failed(str(answer))
        refusals = [failure for failure in failures if not isinstance(failure, EngineUnavailableError)]
        if refusals:
            raise refusals[0]
        if len(failures) == len(endpoints):
            raise failures[0]
        return {endpoint for endpoint, answer in zip(endpoints, answers, strict=True) if answer is None}

    def _up(self) -> list[Endpoint]:
        """Raises EngineUnavailableError when there is none."""
        up = [endpoint for endpoint in self._endpoints if endpoint.is_up]
        if not up:
            raise EngineUnavailableError("no endpoint is up")
        return up
