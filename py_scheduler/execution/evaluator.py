"""Plays the samples of one batch, and is discarded.

A permit is one permit of `Resource.concurrency` together with one placement token of the batch's lease; a resident
worker takes a permit and plays one attempt after another with it. A sample holds its permit from run through eval. A
token that no waiting attempt can use goes back to the pool at once: stragglers hold only what they use. Where an
attempt is played, its runner knows (`execution/runner.py`); a handle at one is taken before the attempt is.

Invariants
  1. A token is released exactly once, at the end of the drain that took it, whatever ended it; so is a handle left.
  2. No attempt is begun without a handle, so that none is lost to a runner that does not live, unless none can be
     started.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from py_scheduler.execution.attempt import AttemptReport, PlannedAttempt, RunningAttempt
from py_scheduler.execution.episode import EpisodeServices
from py_scheduler.execution.runner import INLINE, RunnerGoneError, Runners

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.execution.runner import RunnerHandle
    from py_scheduler.execution.workers import Worker


class AttemptBoard(Protocol):
    """Where an evaluator says what it is about to do, and what came of it."""

    def begin(
        self, planned: PlannedAttempt, evaluator: Evaluator, token: PlacementToken | None, worker: Worker
    ) -> RunningAttempt | None:
        """None when the attempt is no longer to be run."""
        ...

    def end(self, running: RunningAttempt, report: AttemptReport) -> None: ...

    def permit_is_free(self, evaluator: Evaluator, token: PlacementToken | None, worker: Worker) -> None:
        """The worker is done with this permit; its token goes back to the pool."""
        ...


class Evaluator:
    """The samples of one batch that have not been started, and how many permits are at them.

    admitted_at: monotonic seconds. pending: what is next is the last.
    """

    __slots__ = (
        "_seeking",
        "active_permits",
        "admitted_at",
        "board",
        "namespace",
        "pending",
        "runners",
        "services",
        "spec",
    )

    def __init__(
        self,
        spec: EvaluatorSpec,
        attempts: Sequence[PlannedAttempt],
        services: EpisodeServices,
        board: AttemptBoard,
        admitted_at: float,
        runners: Runners = INLINE,
    ) -> None:
        self.spec = spec
        self.namespace = attempts[0].namespace
        self.admitted_at = admitted_at
        self.pending = list(reversed(attempts))
        self.active_permits = 0
        self.services = services
        self.board = board
        self.runners = runners
        self._seeking: set[asyncio.Future[RunnerHandle]] = set()

    async def drain(self, token: PlacementToken | None, worker: Worker) -> None:
        """Plays pending attempts with one permit until none is left or the worker was given up."""
        pending, board = self.pending, self.board
        handle = self.runners.standing_handle
        try:
            while pending and not worker.is_abandoned:
                if handle is None or not handle.is_usable:
                    if handle is not None:
                        handle.leave()
                        handle = None
                    handle = await self._seek_handle(token)
                    continue
                running = board.begin(pending.pop(), self, token, worker)
                if self._seeking and not pending:
                    self._end_seeking()
                if running is not None:
                    board.end(running, await handle.play(running))
                    if running.workdirs:
                        await self.services.workdirs.remove(running.workdirs)
                if pending and worker.turn_is_over():
                    await worker.give_way()
        except RunnerGoneError:
            handle = None  # What is left is placed anew, where there are runners.
        finally:
            if handle is not None:
                handle.leave()
            board.permit_is_free(self, token, worker)

    async def _seek_handle(self, token: PlacementToken | None) -> RunnerHandle | None:
        """None when nothing is left to be played by then. Raises RunnerGoneError."""
        seeking = asyncio.ensure_future(self.runners.take_handle(token))
        self._seeking.add(seeking)
        try:
            await asyncio.wait([seeking])
        except asyncio.CancelledError:
            # Not waited for here: whoever cancels once more meanwhile would lose the handle.
            seeking.add_done_callback(_leave)
            seeking.cancel()
            raise
        finally:
            self._seeking.discard(seeking)
        return None if seeking.cancelled() else seeking.result()

    def _end_seeking(self) -> None:
        """Who still waits for a handle would find nothing to play there, and holds a token meanwhile."""
        for seeking in self._seeking:
            seeking.cancel()


def _leave(seeking: asyncio.Future[RunnerHandle]) -> None:
    """The handle, if there is one, of a permit that is no more."""
    if not seeking.cancelled() and seeking.exception() is None:
        seeking.result().leave()
