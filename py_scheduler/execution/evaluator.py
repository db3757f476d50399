"""Plays the samples of one batch, and is discarded.

A slot is one permit of `Resource.concurrency` together with one placement token of the batch's lease; a resident
worker takes a slot and plays one attempt after another with it. A sample holds its slot from run through eval. A
token that no waiting attempt can use goes back to the pool at once: stragglers hold only what they use.

Invariant: a token is released exactly once, at the end of the drain that took it, whatever ended it.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Protocol

from py_scheduler.domain.results import AttemptState, SampleDone
from py_scheduler.domain.task import Sample
from py_scheduler.execution.attempt import AttemptReport, PlannedAttempt, RunningAttempt
from py_scheduler.execution.episode import EpisodeServices, HandlerEpisode
from py_scheduler.execution.play import play_sample

if TYPE_CHECKING:
    from collections.abc import Iterable

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.execution.workers import Worker


class AttemptBoard(Protocol):
    """Where an evaluator says what it is about to do, and what came of it."""

    def begin(
        self, planned: PlannedAttempt, evaluator: Evaluator, token: PlacementToken | None, worker: Worker
    ) -> RunningAttempt | None:
        """None when the attempt is no longer to be run."""
        ...

    def phase_begins(self, running: RunningAttempt, phase: str, timeout_seconds: float | None) -> None: ...

    def end(self, running: RunningAttempt, report: AttemptReport) -> None: ...

    def slot_is_free(self, evaluator: Evaluator, token: PlacementToken | None, worker: Worker) -> None:
        """The worker is done with this slot; its token goes back to the pool."""
        ...


class Evaluator:
    """The samples of one batch that have not been started, and how many slots are at them."""

    __slots__ = ("_board", "_services", "active_slots", "pending", "spec")

    def __init__(
        self,
        spec: EvaluatorSpec,
        attempts: Iterable[PlannedAttempt],
        services: EpisodeServices,
        board: AttemptBoard,
    ) -> None:
        self.spec = spec
        self.pending = deque(attempts)
        self.active_slots = 0
        self._services = services
        self._board = board

    async def drain(self, token: PlacementToken | None, worker: Worker) -> None:
        """Plays pending attempts with one slot until none is left or the worker was given up."""
        pending, board = self.pending, self._board
        try:
            while pending and not worker.is_abandoned:
                if worker.turn_is_over():
                    await worker.give_way()
                    continue
                running = board.begin(pending.popleft(), self, token, worker)
                if running is not None:
                    board.end(running, await self._play(running))
                    if running.workdirs:
                        await self._services.workdirs.remove(running.workdirs)
        finally:
            board.slot_is_free(self, token, worker)

    async def _play(self, running: RunningAttempt) -> AttemptReport:
        planned, services, spec = running.planned, self._services, self.spec
        samples: list[SampleDone] = []
        for sample_no in range(planned.first_sample_no, planned.first_sample_no + planned.sample_count):
            running.sample_no = sample_no
            sample = Sample(task_id=planned.ref.task_id, sample_no=sample_no, task=planned.task)
            episode = HandlerEpisode(services, spec, sample, running)
            state, done = await play_sample(running, episode, spec, self._board, services.clock)
            samples.append(done)
            if state is not AttemptState.SUCCEEDED:
                return AttemptReport(state, tuple(samples), running.stop_reason or done.error)
        return AttemptReport(AttemptState.SUCCEEDED, tuple(samples))
