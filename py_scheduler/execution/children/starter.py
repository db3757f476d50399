"""Brings children up and takes them down.

Invariants
  1. A child that was launched is known here until it has ended, also if nobody waits for it any more.
  2. At most `max_runners` children exist. A child that is ending counts too: it holds memory and GPUs until its end.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from py_scheduler.errors import RunnerStartError
from py_scheduler.execution.children.session import ChildSession

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from py_scheduler.domain.runners.runner import ChildHost, HandlerPlan, RunnerKey, RunnerSettings
    from py_scheduler.execution.children.session import Variables

_END_SECONDS = 5.0


class ChildStarter:
    """All children of one evaluator, `prepare_concurrency` of them on their way at once."""

    def __init__(
        self,
        host: ChildHost,
        settings: RunnerSettings,
        plan: HandlerPlan,
        variables: Variables,
        import_path: Sequence[str],
    ) -> None:
        self._host = host
        self._settings = settings
        self._plan = plan
        self._variables = variables
        self._import_path = import_path
        self._limit = asyncio.Semaphore(settings.prepare_concurrency)
        self._room = asyncio.Semaphore(settings.max_runners)
        self._sessions: set[ChildSession] = set()

    async def launch(self, key: RunnerKey, on_end: Callable[[ChildSession], None]) -> ChildSession:
        """A child that has made its handler. Raises RunnerStartError; then the child is killed."""
        start_seconds = self._settings.start_seconds
        async with self._limit:
            await self._take_room()
            try:
                async with asyncio.timeout(start_seconds):
                    return await self._prepared(key, on_end)
            except TimeoutError:
                raise RunnerStartError(f"not ready within start_seconds ({start_seconds:g})") from None
            except RunnerStartError:
                raise
            except Exception as error:  # whatever a host meets, the slot is tried again
                raise RunnerStartError(f"{type(error).__name__}: {error}") from error

    async def _take_room(self) -> None:
        start_seconds = self._settings.start_seconds
        try:
            async with asyncio.timeout(start_seconds):
                await self._room.acquire()
        except TimeoutError:
            why = f"the runner before it has not ended within start_seconds ({start_seconds:g})"
            raise RunnerStartError(why) from None

    async def _prepared(self, key: RunnerKey, on_end: Callable[[ChildSession], None]) -> ChildSession:
        """Gives the room back when the child has ended, or when none was launched."""

        def ended(session: ChildSession) -> None:
            self._sessions.discard(session)
            self._room.release()
            on_end(session)

        try:
            child = await self._host.launch(key, self._settings)
        except BaseException:
            self._room.release()
            raise
        session = ChildSession(child, self._variables, ended)
        if not session.over.is_set():
            self._sessions.add(session)
        try:
            await session.prepare(self._plan, self._import_path)
        except BaseException:
            session.kill("it was not ready")
            raise
        if not session.is_alive:  # It said that it was ready, and ended.
            raise RunnerStartError(f"the runner ended as soon as it was ready: {session.how_it_ended}")
        return session

    async def close(self) -> None:
        """Ends all of them, and waits a while until they have ended."""
        for session in [*self._sessions]:
            session.kill("the server is ending")
        ends = [asyncio.ensure_future(session.over.wait()) for session in self._sessions]
        if ends:
            _done, late = await asyncio.wait(ends, timeout=_END_SECONDS)
            for end in late:
                end.cancel()
