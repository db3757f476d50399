"""Pauses and weights of all the servers of a fleet.

Invariants

- Every endpoint that is up is told of a call. One that fails it is set aside, and the others go on.
- Before an endpoint is up, again or for the first time, it has what it missed: a pause or its end, and the weights that
  the fleet was given last. The same holds for all of them after an update that its caller gave up half-way. Weights
  that a trainer pushed itself nobody here can load: an endpoint without them stays aside.
- What the fleet was given is known as long as the process lives. A new one takes endpoints as they are: nobody could
  give them anything, and where all were started anew, holding them back would leave a trainer none to push to.
- A pause that fails leaves no endpoint paused that takes generations.
- A server that may be paused hears the end of the pause, however that comes: `_to_resume` has its endpoint until then.
  Outside a pause no endpoint in it is up, and one that was removed leaves only when it is out of it. After
  UNTOLD_SECONDS it leaves all the same, and `_left_paused` keeps the addresses for whoever is named there again.
- An endpoint that drains is paused and goes on with the others, and gets no other weights.
"""

from __future__ import annotations

import asyncio
import logging
import math
from contextlib import suppress
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.errors import EngineRejectedError, EngineUnavailableError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.adapters.fleet.endpoint import Endpoint
    from py_scheduler.adapters.http_server.backend import HttpBackend
    from py_scheduler.domain.generation import ModelInfo, PauseMode, WeightUpdate
    from py_scheduler.domain.ports import Clock

FIRST_LOOK_SECONDS = 20.0
"""One that does not answer its first question in that time is not up for whoever asks."""
UNTOLD_SECONDS = 600.0
"""How long a removed endpoint is asked to hear the end of a pause: its server may be gone for good."""

logger = logging.getLogger(__name__)


class FleetControl:
    """The GenerationControl that is part of Fleet, which owns `_endpoints` and `_clock`."""

    _endpoints: Sequence[Endpoint]
    _clock: Clock
    _update: WeightUpdate | None = None
    _wanted_version = ""
    """Of the update, or of what was pushed since; empty: nobody has said."""
    _paused_in: PauseMode | None = None

    def __init__(self) -> None:
        self._to_resume: dict[Endpoint, float] = {}
        """With the time since when each misses the end of a pause; infinite while it misses none."""
        self._left_paused: set[str] = set()
        """What was told to pause, and was let go of before it heard the end."""

    def _let_go_of_idle(self) -> None:
        """Endpoints that drain and had to hear of the end of a pause may leave now."""
        raise NotImplementedError

    async def pause(self, mode: PauseMode) -> None:
        """Where no endpoint was ever up nothing is generated; one that comes up meanwhile is paused first."""
        was_paused_in, self._paused_in = self._paused_in, mode
        for endpoint in self._endpoints:
            if endpoint.is_up:
                self._to_resume.setdefault(endpoint, math.inf)
        try:
            if self._was_any_up():
                await self._tell(self._up(), lambda backend: backend.pause(mode))
        except GenerationError:
            if was_paused_in is None:
                await self._undo_pause()
            raise

    async def _undo_pause(self) -> None:
        """Those that obeyed go on now or, where that fails too, before they are up again."""
        await self._end_pause()

    async def resume(self) -> None:
        """Also when no endpoint obeys, or is up: none comes up again that has not been told. Raises EngineRejectedError
        when one refuses.
        """
        refusals = [error for error in await self._end_pause() if isinstance(error, EngineRejectedError)]
        if refusals:
            raise refusals[0]

    async def _end_pause(self) -> list[GenerationError]:
        """What the endpoints answered that did not obey. These are set aside."""
        self._paused_in = None
        up, now = [each for each in self._endpoints if each.is_up], self._clock.monotonic()
        for endpoint in (*up, *self._to_resume):
            self._to_resume[endpoint] = min(now, self._to_resume.get(endpoint, math.inf))
        try:
            answers = await asyncio.gather(*map(self._tell_end_of_pause, up))
        finally:
            self._let_go_of_idle()
        return [answer for answer in answers if answer is not None]

    async def _tell_end_of_pause(self, endpoint: Endpoint) -> GenerationError | None:
        try:
            await endpoint.backend.resume()
        except GenerationError as error:
            endpoint.failed(f"has not heard the end of a pause: {error}")
            return error
        except asyncio.CancelledError:
            endpoint.failed("the end of a pause was broken off")
            raise
        if self._paused_in is None:
            self._to_resume.pop(endpoint, None)
        return None

    def _may_leave(self, endpoint: Endpoint) -> bool:
        """Of one that was removed."""
        missed_at = self._to_resume.get(endpoint)
        if missed_at is None:
            return True
        return self._clock.monotonic() - max(missed_at, endpoint.removed_at) >= UNTOLD_SECONDS

    def _has_left(self, endpoint: Endpoint) -> None:
        if self._to_resume.pop(endpoint, None) is not None:
            self._left_paused |= _told(endpoint)

    def _has_come(self, endpoint: Endpoint) -> None:
        """Servers that it is, or has behind it, may be paused since they were reached by another one."""
        untold = self._left_paused.union(*map(_told, self._to_resume))
        if not untold.isdisjoint(_told(endpoint)):
            self._to_resume[endpoint] = self._clock.monotonic()
            self._left_paused -= _told(endpoint)

    async def update_weights(self, update: WeightUpdate) -> None:
        before = self._update, self._wanted_version
        # Before it is told: whoever comes up meanwhile is held to it.
        self._update, self._wanted_version = update, update.weight_version
        try:
            await self._tell(await self._seen(), lambda backend: backend.update_weights(update))
        except EngineRejectedError:
            self._update, self._wanted_version = before
            raise
        except asyncio.CancelledError:
            # Nobody heard which of them has loaded it: each is asked, and told again if need be, before it comes up.
            for endpoint in tuple(self._endpoints):
                endpoint.failed("an update of its weights was broken off")
            raise

    async def name_weights(self, version: str) -> None:
        # Before any is held to the name: it is what those that are coming up have, too.
        endpoints = await self._seen()
        before = self._update, self._wanted_version
        self._update, self._wanted_version = None, version
        try:
            await self._tell(endpoints, lambda backend: backend.name_weights(version))
        except BaseException:
            # None of them is set aside for it: their weights were pushed, and the trainer says so again.
            self._update, self._wanted_version = before
            raise
        for endpoint in self._endpoints:
            endpoint.look_soon()

    async def weight_version(self) -> str:
        """As those say that answer; empty when they differ. Raises EngineUnavailableError when none does."""
        asked = (each.backend.weight_version() for each in self._up(draining=False))
        answers = await asyncio.gather(*asked, return_exceptions=True)
        versions = {answer for answer in answers if isinstance(answer, str)}
        for answer in answers:
            if isinstance(answer, BaseException) and not (versions and isinstance(answer, EngineUnavailableError)):
                raise answer
        return versions.pop() if len(versions) == 1 else ""

    async def _catch_up(self, endpoint: Endpoint, info: ModelInfo) -> ModelInfo:
        """Gives one that is about to come up what it missed, also what it misses meanwhile. Raises GenerationError when
        that fails.
        """
        while True:
            update = self._update
            info = await self._catch_up_once(endpoint, info)
            if update is self._update and not self._misses_pause(endpoint) and not self._misses_resume(endpoint):
                return info

    async def _catch_up_once(self, endpoint: Endpoint, info: ModelInfo) -> ModelInfo:
        backend, update = endpoint.backend, self._update
        info = await self._of_all_workers(endpoint, info)
        if update is not None and self._misses_weights(endpoint, info.weight_version):
            await backend.update_weights(update)
            info = await self._of_all_workers(endpoint, await backend.refresh_model_info())
        if (mode := self._paused_in) is not None:
            # Also one that has heard of this pause: its server may be another since.
            self._to_resume.setdefault(endpoint, math.inf)
            await backend.pause(mode)
            if self._paused_in is not None:
                self._to_resume[endpoint] = math.inf
        elif self._misses_resume(endpoint):
            await backend.resume()
            self._to_resume.pop(endpoint, None)
        return info

    async def _of_all_workers(self, endpoint: Endpoint, info: ModelInfo) -> ModelInfo:
        """One worker behind a router told of its weights, and the others may have others."""
        if not endpoint.backend.control_urls:
            return info
        return msgspec.structs.replace(info, weight_version=await endpoint.backend.weight_version())

    def _misses_pause(self, endpoint: Endpoint) -> bool:
        return self._paused_in is not None and endpoint not in self._to_resume

    def _misses_resume(self, endpoint: Endpoint) -> bool:
        return self._paused_in is None and endpoint in self._to_resume

    def _misses_weights(self, endpoint: Endpoint, version: str) -> bool:
        """version: what it has."""
        return not endpoint.is_draining and self._wanted_version not in ("", version)

    def _what_it_misses(self, endpoint: Endpoint, version: str) -> str:
        """In words; empty when it may be up."""
        if self._misses_weights(endpoint, version):
            if self._update is not None:
                return "has missed an update of the weights"
            return (
                f"has the weights {version!r}, and not {self._wanted_version!r}, which the trainer has pushed: push "
                "them there too, under that weight_version"
            )
        if self._misses_pause(endpoint):
            return "has missed a pause"
        return "has missed the end of a pause" if self._misses_resume(endpoint) else ""

    async def _tell(
        self, endpoints: Sequence[Endpoint], order: Callable[[HttpBackend], Awaitable[None]]
    ) -> set[Endpoint]:
        """Those that obeyed. Raises EngineUnavailableError when none did, EngineRejectedError when one refused."""
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

    async def _seen(self) -> list[Endpoint]:
        """Those that are up and do not drain, also of those that were named a moment ago. Raises EngineUnavailableError
        when there is none.
        """
        looks = [each.first_look.wait() for each in self._endpoints if not each.is_draining]
        with suppress(TimeoutError):
            async with asyncio.timeout(FIRST_LOOK_SECONDS):
                await asyncio.gather(*looks)
        return self._up(draining=False)

    def _was_any_up(self) -> bool:
        return any(each.info is not None for each in self._endpoints if each.is_up or not each.is_draining)

    def _up(self, *, draining: bool = True) -> list[Endpoint]:
        """draining: with those that drain. Raises EngineUnavailableError when there is none."""
        up = [endpoint for endpoint in self._endpoints if endpoint.takes or (draining and endpoint.is_up)]
        if not up:
            raise EngineUnavailableError("no endpoint is up")
        return up


def _told(endpoint: Endpoint) -> frozenset[str]:
    """The servers that hear what the endpoint is told."""
    return frozenset(endpoint.backend.control_urls or (endpoint.base_url,))
