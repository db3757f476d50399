"""Runs the samples of one batch, and is discarded.

A permit is one unit of `Resource.concurrency` together with one placement token of the batch's lease. A resident worker
takes a permit and runs one attempt after another with it; a sample holds the permit from run through eval. A token that
no waiting attempt can use goes back to the pool at once, so stragglers hold only what they use: of 8 samples on 4
tokens, the last one to run holds 1 token and 3 are free.

A permit takes a handle before it takes an attempt; the handle's runner knows where the attempt runs
(`execution/runner.py`).

Invariants
  1. A token is released exactly once, at the end of the drain that took it, whatever ended the drain. A handle is left
     exactly once.
  2. No attempt begins without a handle. So a runner that does not live costs no attempt, unless no runner can be
     started at all.
  3. A token whose node has gone is used for no further attempt: those that are left run on the batch's other tokens, or
     are placed anew.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from py_scheduler.execution.attempt import AttemptReport, PlannedAttempt, RunningAttempt
from py_scheduler.execution.episode import EpisodeServices
from py_scheduler.execution.run_sample import INLINE
from py_scheduler.execution.runner import RunnerGoneError, Runners

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.execution.runner import RunnerHandle
    from py_scheduler.execution.workers import Worker

RunningT = TypeVar("RunningT", bound=RunningAttempt)


class AttemptBoard(Protocol[RunningT]):
    """Where an evaluator says what it is about to do, and what came of it. It gets back what it gave out.

    is_paused: no attempt is to begin for now. Permits are given back.
    """

    is_paused: bool

    def begin(
        self, planned: PlannedAttempt, evaluator: Evaluator, token: PlacementToken | None, worker: Worker
    ) -> RunningT | None:
        """None when the attempt is no longer to be run."""
        ...

    def end(self, running: RunningT, report: AttemptReport) -> None: ...

    def node_is_gone(self, token: PlacementToken | None) -> bool:
        """Whether the token is of a node that was taken out."""
        ...

    def permit_is_free(self, evaluator: Evaluator, token: PlacementToken | None, worker: Worker) -> None:
        """The worker is done with this permit; its token goes back to the pool."""
        ...


class Evaluator:
    """The attempts of one batch that have not begun, and how many permits are at them.

    admitted_at: monotonic seconds. pending: the next one is the last.
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
        board: AttemptBoard[Any],
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
        """Runs pending attempts with one permit until none is left or the worker takes no more work."""
        pending, board, spec, services = self.pending, self.board, self.spec, self.services
        handle = self.runners.standing_handle
        try:
            while pending and worker.takes_work and not board.is_paused:
                if handle is None or not handle.is_usable:
                    if handle is not None:
                        handle.leave()
                        handle = None
                    handle = await self._seek_handle(token)
                    continue
                running: RunningAttempt | None = board.begin(pending.pop(), self, token, worker)
                if self._seeking and not pending:
                    self._end_seeking()
                if running is not None:
                    board.end(running, await handle.run(running, worker, spec, services))
                    if running.workdirs:
                        await services.workdirs.remove(running.workdirs)
                if board.node_is_gone(token):
                    break
                if pending and worker.turn_is_over():
                    await worker.give_way()
        except RunnerGoneError:
            handle = None  # The attempts that are left are placed anew, where there are runners.
        finally:
            if handle is not None:
                handle.leave()
            board.permit_is_free(self, token, worker)

    async def _seek_handle(self, token: PlacementToken | None) -> RunnerHandle | None:
        """None when no attempt is left by then. Raises RunnerGoneError."""
        seeking = asyncio.ensure_future(self.runners.take_handle(token))
        self._seeking.add(seeking)
        try:
            await asyncio.wait([seeking])
        except asyncio.CancelledError:
            # Not waited for here: another cancellation meanwhile would lose the handle.
            seeking.add_done_callback(_leave)
            seeking.cancel()
            raise
        finally:
            self._seeking.discard(seeking)
        return None if seeking.cancelled() else seeking.result()

    def _end_seeking(self) -> None:
        """A permit that still waits for a handle would find no attempt to run, and holds a token meanwhile."""
        for seeking in self._seeking:
            seeking.cancel()


def _leave(seeking: asyncio.Future[RunnerHandle]) -> None:
    """Leaves the handle that a permit got after its end, if it got one."""
    if not seeking.cancelled() and seeking.exception() is None:
        seeking.result().leave()
