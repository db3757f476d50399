"""One server of a fleet: whether it takes generations, and how loaded it is.

Invariants:

- Only a refused connection, a failed generation or a failed control call sets an endpoint aside, and only a probe
  brings it back. `/health` is not asked: it generates a token, which takes a second or two, and answers 503 while the
  server is paused, which is not dead. A load that is not told in time means silent: such an endpoint is chosen last.
- At most one question is on its way, and the next is timed by the clock: at the load interval while the endpoint is up
  or warming up, after the backoff while it is set aside.
- It takes generations only after the fleet has agreed to the model that it serves, and none while it drains.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

import aiohttp

from py_scheduler.adapters.http_client import RetrySettings
from py_scheduler.domain.generation import EndpointState, EndpointView
from py_scheduler.errors import GenerationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from py_scheduler.adapters.fleet.settings import FleetSettings
    from py_scheduler.adapters.http_server.backend import HttpBackend
    from py_scheduler.domain.generation import ModelInfo
    from py_scheduler.domain.ports import Clock, TimerHandle

logger = logging.getLogger(__name__)


class Endpoint:
    """`catch_up` gives it what it missed, and `admit` sees its model, before each time that it comes up.

    Either keeps it from that by a GenerationError. `on_change` is called after every change of state and a first look.
    """

    def __init__(
        self,
        backend: HttpBackend,
        settings: FleetSettings,
        clock: Clock,
        *,
        catch_up: Callable[[Endpoint, ModelInfo], Awaitable[ModelInfo]],
        admit: Callable[[Endpoint, ModelInfo], None],
        on_change: Callable[[], None],
    ) -> None:
        self.backend = backend
        self.state = EndpointState.WARMING_UP
        self.removed_at = math.inf
        """When; infinite while it is named."""
        self.info: ModelInfo | None = None
        """As it was when it last came up; None before it ever did."""
        self.in_flight = 0
        self.questions = 0
        """To its tokenizer, under way."""
        self.taken = 0
        """Generations given to it so far."""
        self.is_silent = False
        self.reason = "it was not asked yet"
        """Why it is not up."""
        self.first_look = asyncio.Event()
        self._settings = settings
        self._clock = clock
        self._catch_up = catch_up
        self._admit = admit
        self._on_change = on_change
        self._backoff = RetrySettings(
            base_seconds=settings.set_aside_base_seconds, max_seconds=settings.set_aside_max_seconds
        )
        self._deadline = 0.0
        self._failures = 0
        self._reported: tuple[int, int] | None = None
        self._timer: TimerHandle | None = None
        self._looking: asyncio.Task[None] | None = None
        self._is_closed = False

    def start(self) -> None:
        self._deadline = self._clock.monotonic() + self._settings.warm_up_seconds
        self._begin_look()

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.wait([self._looking])
        await self.backend.close()

    @property
    def base_url(self) -> str:
        return self.backend.base_url

    def set_named(self, is_named: bool) -> None:
        """Whether it is one of the fleet's, or was removed."""
        self.removed_at = math.inf if is_named else min(self.removed_at, self._clock.monotonic())

    @property
    def is_draining(self) -> bool:
        """It was removed from the fleet, and is closed once it is idle."""
        return self.removed_at < math.inf

    @property
    def is_up(self) -> bool:
        return self.state is EndpointState.UP

    @property
    def takes(self) -> bool:
        """Whether it may get something new."""
        return self.is_up and not self.is_draining

    @property
    def is_idle(self) -> bool:
        return self.in_flight == 0 and self.questions == 0

    @property
    def view(self) -> EndpointView:
        return EndpointView(
            url=self.base_url,
            state=EndpointState.DRAINING if self.is_draining else self.state,
            in_flight=self.in_flight,
            reason=self.reason,
            control_urls=self.backend.control_urls,
        )

    @property
    def weight_version(self) -> str:
        """As its generations reported last."""
        known = self.backend.known_model or self.info
        return known.weight_version if known is not None else ""

    @property
    def streaming(self) -> str:
        known = self.backend.known_model or self.info
        return known.streaming if known is not None else ""

    @property
    def has_room(self) -> bool:
        limit = self._settings.max_concurrency
        return self.takes and (limit is None or self.in_flight < limit)

    @property
    def load(self) -> int:
        """Requests at the server: what it said last, corrected by what was sent and ended here since it was asked."""
        if self._reported is None:
            return self.in_flight
        reported, own = self._reported
        return max(self.in_flight, reported + self.in_flight - own)

    def take(self) -> None:
        self.in_flight += 1
        self.taken += 1

    def succeeded(self) -> None:
        if self.is_up:
            self._failures = 0

    def failed(self, reason: str) -> None:
        """Many generations fail together when a server dies: that counts once."""
        if self.is_up and not self._is_closed:
            self._set_aside(reason)

    # -- looking

    def look_soon(self) -> None:
        """Something has changed there that may bring it up."""
        if not self.is_up:
            self._look_after(0)

    def _begin_look(self) -> None:
        self._timer = None
        if self._looking is None and not self._is_closed:
            self._looking = asyncio.get_running_loop().create_task(self._look())

    async def _look(self) -> None:
        before, own = self.state, self.in_flight
        try:
            if not self.is_up:
                await self.backend.start()
            requests = await self.backend.ask_requests()
            # Last, so that nothing can be missed between catching up and being admitted.
            info = None if self.is_up else await self._ask_model_info()
        except GenerationError as error:
            if self.state is before:
                self._was_not_seen(error)
        else:
            if self.state is before:
                self._was_seen(requests, own, info)
        finally:
            self._looking = None
            # Also one that drains may have had only this to wait for.
            if self.is_draining or not self.first_look.is_set():
                self.first_look.set()
                self._on_change()
            self._look_after(self._wait_seconds())

    async def _ask_model_info(self) -> ModelInfo:
        if self.state is EndpointState.WARMING_UP:
            info = await self.backend.model_info()
        else:
            info = await self.backend.refresh_model_info()
        return await self._catch_up(self, info)

    def _was_seen(self, requests: int, own: int, info: ModelInfo | None) -> None:
        """`own`: generations in flight from here when the question was asked."""
        if info is not None:
            try:
                self._admit(self, info)
            except GenerationError as error:
                self._set_aside(str(error))
                return
            if self.state is EndpointState.SET_ASIDE and not self.is_draining:
                logger.warning("%s is back and gets generations again", self.base_url)
            else:
                logger.info("%s is up and gets generations", self.base_url)
            self.info, self.state, self.reason = info, EndpointState.UP, ""
        self._reported = requests, own
        self.is_silent = False
        if info is not None:
            self._on_change()

    def _was_not_seen(self, error: GenerationError) -> None:
        self._reported = None
        if self.is_up:
            if isinstance(error.__cause__, aiohttp.ClientConnectorError):
                self._set_aside(str(error))
            else:
                self.is_silent = True
        elif self.state is EndpointState.WARMING_UP and self._clock.monotonic() < self._deadline:
            if self.reason != str(error):
                left = self._deadline - self._clock.monotonic()
                logger.info("%s is not up yet and has %.0f s more to come up: %s", self.base_url, left, error)
            self.reason = str(error)
        else:
            self._set_aside(str(error))

    def _set_aside(self, reason: str) -> None:
        if reason != self.reason or self.state is EndpointState.UP:
            logger.warning("%s is set aside and will be probed: %s", self.base_url, reason)
        self.state, self.reason = EndpointState.SET_ASIDE, reason
        self._reported = None
        self._failures += 1
        self._look_after(self._wait_seconds())
        self._on_change()

    def _wait_seconds(self) -> float:
        if self.state is EndpointState.SET_ASIDE:
            return self._backoff.wait_seconds(self._failures)
        return self._settings.load_interval_seconds

    def _look_after(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._is_closed:
            self._timer = self._clock.call_at(self._clock.monotonic() + seconds, self._begin_look)
