"""What is known of one backend, whichever roles it serves: its weights, its pause, and the servers that were set."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING, Protocol, TypeVar

from py_scheduler.domain.episodes.weight_history import WeightHistory
from py_scheduler.domain.ports import GenerationControl
from py_scheduler.errors import EngineUnavailableError, GenerationError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Iterable

    from py_scheduler.domain.generation import Endpoints, PauseMode, WeightSpan, WeightUpdate
    from py_scheduler.domain.ports import GenerationBackend

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 3.0
AnswerT = TypeVar("AnswerT")


class BackendLog(Protocol):
    """Where weights and endpoints become facts. `roles` are always all those that rest on one backend."""

    def history(self, roles: tuple[str, ...]) -> WeightHistory: ...

    def has(self, roles: tuple[str, ...], version: str, *, is_confirmed: bool) -> None:
        """The backend has these weights, which may be no news. is_confirmed: an update is known to have loaded them."""
        ...

    def endpoints(self, roles: tuple[str, ...]) -> Endpoints | None:
        """Those that were set; None: those of the configuration count."""
        ...

    def endpoints_are(self, roles: tuple[str, ...], endpoints: Endpoints | None) -> None: ...

    async def committed(self) -> None:
        """Returns once every change before this call survives a crash, as far as anything does."""
        ...


class ForgetfulBackendLog:
    """Keeps the changes in memory only."""

    def __init__(self) -> None:
        self._histories: dict[tuple[str, ...], WeightHistory] = {}
        self._endpoints: dict[tuple[str, ...], Endpoints | None] = {}

    def history(self, roles: tuple[str, ...]) -> WeightHistory:
        return self._histories.setdefault(roles, WeightHistory())

    def has(self, roles: tuple[str, ...], version: str, *, is_confirmed: bool) -> None:
        history = self.history(roles)
        epoch = history.next_epoch(version, is_confirmed=is_confirmed)
        if epoch is not None:
            history.became(version, epoch)

    def endpoints(self, roles: tuple[str, ...]) -> Endpoints | None:
        return self._endpoints.get(roles)

    def endpoints_are(self, roles: tuple[str, ...], endpoints: Endpoints | None) -> None:
        self._endpoints[roles] = endpoints

    async def committed(self) -> None: ...


class KnownBackend:
    """What the gateway knows of one backend.

    confirmed: the last update that the backend is known to have loaded; None when the last try did not end well.
    changing: held during each pause, resume and update. was_heard: whether the backend itself has said since the start
    which weights it has; what was known before a restart may no longer hold.
    """

    def __init__(self, backend: GenerationBackend, roles: tuple[str, ...], log: BackendLog) -> None:
        self.backend = backend
        self.pause_mode: PauseMode | None = None
        self.confirmed: WeightUpdate | None = None
        self.changing = asyncio.Lock()
        self.was_heard = False
        self.log = log
        self._roles = roles

    @property
    def history(self) -> WeightHistory:
        return self.log.history(self._roles)

    async def look(self) -> None:
        """Asks the backend which weights it has, if it can say. One that does not answer in time has told nothing."""
        if not isinstance(self.backend, GenerationControl):
            return
        try:
            async with asyncio.timeout(_LOOK_SECONDS):
                self.saw(await self.backend.weight_version())
        except (GenerationError, TimeoutError) as error:
            logger.warning("an engine does not say which weights it has: %r", error)

    def observe(self, spans: Iterable[WeightSpan]) -> None:
        """A generation came from these weights."""
        for span in spans:
            self.saw(span.version)

    def saw(self, version: str) -> None:
        """The backend names this version as its own; empty: it names none."""
        if version:
            self.was_heard = True
            self.log.has(self._roles, version, is_confirmed=False)

    def pushed(self, version: str) -> None:
        """Its trainer has put these weights there."""
        self.was_heard = True
        self.log.has(self._roles, version, is_confirmed=True)

    def endpoints_were_set(self, endpoints: Endpoints | None) -> None:
        self.log.endpoints_are(self._roles, endpoints)

    @property
    def endpoints_set(self) -> Endpoints | None:
        """As of its log: those that were set in place of the configuration's."""
        return self.log.endpoints(self._roles)

    def loaded(self, update: WeightUpdate) -> None:
        self.confirmed = update
        self.log.has(self._roles, update.weight_version, is_confirmed=True)


async def asked(answer: Awaitable[AnswerT], role: str, what: str) -> AnswerT:
    """What the backend answered. Its address is none of a client's business; the log has it."""
    try:
        return await answer
    except EngineUnavailableError as error:
        logger.warning("the engine in role %s did not %s: %s", role, what, error)
        raise EngineUnavailableError(f"the engine in role {role!r} did not {what}: the log says why") from error
