"""Plays the samples of one batch, and is discarded.

A slot is one permit of `Resource.concurrency` together with one placement token of the batch's lease; a resident
worker takes a slot and plays one attempt after another with it. A sample holds its slot from run through eval. A
token that no waiting attempt can use goes back to the pool at once: stragglers hold only what they use. Where an
attempt is played, its runner knows (`execution/runner.py`); a seat at one is taken before the attempt is.

Invariants
  1. A token is released exactly once, at the end of the drain that took it, whatever ended it; so is a seat left.
  2. No attempt is begun without a seat, so that none is lost to a runner that does not live, unless none can be
     started.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Protocol

from py_scheduler.execution.attempt import AttemptReport, PlannedAttempt, RunningAttempt
from py_scheduler.execution.episode import EpisodeServices
from py_scheduler.execution.runner import INLINE, Runners, SeatGoneError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.execution.runner import Seat
    from py_scheduler.execution.workers import Worker


class AttemptBoard(Protocol):
    """Where an evaluator says what it is about to do, and what came of it."""

    def begin(
        self, planned: PlannedAttempt, evaluator: Evaluator, token: PlacementToken | None, worker: Worker
    ) -> RunningAttempt | None:
        """None when the attempt is no longer to be run."""
        ...

    def end(self, running: RunningAttempt, report: AttemptReport) -> None: ...

    def slot_is_free(self, evaluator: Evaluator, token: PlacementToken | None, worker: Worker) -> None:
        """The worker is done with this slot; its token goes back to the pool."""
        ...


class Evaluator:
    """The samples of one batch that have not been started, and how many slots are at them.

    admitted_at: monotonic seconds. pending: what is next is the last.
    """

    __slots__ = (
        "_seeking",
        "active_slots",
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
        self.active_slots = 0
        self.services = services
        self.board = board
        self.runners = runners
        self._seeking: set[asyncio.Future[Seat]] = set()

    async def drain(self, token: PlacementToken | None, worker: Worker) -> None:
        """Plays pending attempts with one slot until none is left or the worker was given up."""
        pending, board = self.pending, self.board
        seat = self.runners.standing_seat
        try:
            while pending and not worker.is_abandoned:
                if seat is None or not seat.is_usable:
                    if seat is not None:
                        seat.leave()
                        seat = None
                    seat = await self._seek_seat(token)
                    continue
                running = board.begin(pending.pop(), self, token, worker)
                if self._seeking and not pending:
                    self._end_seeking()
                if running is not None:
                    board.end(running, await seat.play(running))
                    if running.workdirs:
                        await self.services.workdirs.remove(running.workdirs)
                if pending and worker.turn_is_over():
                    await worker.give_way()
        except SeatGoneError:
            seat = None  # What is left is placed anew, where there are runners.
        finally:
            if seat is not None:
                seat.leave()
            board.slot_is_free(self, token, worker)

    async def _seek_seat(self, token: PlacementToken | None) -> Seat | None:
        """None when nothing is left to be played by then. Raises SeatGoneError."""
        seeking = asyncio.ensure_future(self.runners.take_seat(token))
        self._seeking.add(seeking)
        try:
            await asyncio.wait([seeking])
        except asyncio.CancelledError:
            # Not waited for here: whoever cancels once more meanwhile would lose the seat.
            seeking.add_done_callback(_leave)
            seeking.cancel()
            raise
        finally:
            self._seeking.discard(seeking)
        return None if seeking.cancelled() else seeking.result()

    def _end_seeking(self) -> None:
        """Who still waits for a seat would find nothing to play there, and holds a token meanwhile."""
        for seeking in self._seeking:
            seeking.cancel()


def _leave(seeking: asyncio.Future[Seat]) -> None:
    """The seat, if there is one, of a slot that is no more."""
    if not seeking.cancelled() and seeking.exception() is None:
        seeking.result().leave()
