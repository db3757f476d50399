"""Lets waiting batches in, in order, as far as there is room. Wakes on events and never polls.

Invariants
  1. A batch runs with a lease that holds all of its tokens (none when there is no pool), or it waits.
  2. Whatever could make room or add a batch calls `wake`.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from py_scheduler.domain.requests import WaitingBatch
from py_scheduler.placement import PlacementPool, tokens_in_budget
from py_scheduler.scheduler.commands import LeaseAttempts
from py_scheduler.scheduler.ready_queue import ReadyBatch, ReadyQueue

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.events import AttemptRef
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.resources import PlacementToken, Resource
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.scheduler.recorder import Recorder
    from py_scheduler.scheduler.settings import EngineSettings

    Launch = Callable[[EvaluatorSpec, list[PlannedAttempt], Sequence[PlacementToken | None]], None]

_TURN_SECONDS = 0.002


class Admission:
    """The ready queue in front of the pool. `launch` gets what was let in, with one token (or None) for each slot."""

    def __init__(
        self,
        pool: PlacementPool | None,
        recorder: Recorder,
        clock: Clock,
        settings: EngineSettings,
        launch: Launch,
    ) -> None:
        self._pool = pool
        self._recorder = recorder
        self._clock = clock
        self._max_slots = settings.max_running_samples
        self._launch = launch
        self._queue = ReadyQueue(settings.max_bypass)
        self._wake = asyncio.Event()
        self._slots_out = 0
        self._demands: dict[str, Resource] = {}
        """What a sample of each evaluator holds: always the same object, which the pool has converted already."""
        self.is_stopped = False

    def enqueue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        """Adds one batch: attempts of one submission and one spec."""
        self._queue.push(spec, attempts, self._clock.monotonic())
        self._wake.set()

    def slot_returned(self) -> None:
        """A slot is free again, and its token has been given back."""
        self._slots_out -= 1
        self._queue.unblock()
        self._wake.set()

    def prune(self) -> None:
        """Forgets attempts that the ledger has ended while they waited."""
        ledger = self._recorder.ledger
        self._queue.prune(lambda attempt: ledger.is_waiting(attempt.ref))
        self._wake.set()

    def stop(self) -> None:
        """Lets nothing in any more; what waits goes on waiting."""
        self.is_stopped = True

    async def run(self) -> None:
        """The resident loop: one sweep for each wake."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            await self._sweep()

    async def _sweep(self) -> None:
        while self._admit_for_one_turn():  # noqa: ASYNC110 -- gives way to others, waits for nothing
            await asyncio.sleep(0)

    def _admit_for_one_turn(self) -> bool:
        """Admits what fits, for a few milliseconds at most; True when there may be more.

        Nothing that was admitted starts before this turn is over, so its leases are recorded together at the end.
        """
        turn_ends = time.monotonic() + _TURN_SECONDS
        leased: list[AttemptRef] = []
        may_be_more = False
        while not self.is_stopped and self._slots_out < self._max_slots:
            entry = self._queue.offer()
            if entry is None:
                break
            if self._admit(entry):
                leased.extend([attempt.ref for attempt in entry.attempts])
            if time.monotonic() >= turn_ends:
                may_be_more = True
                break
        if leased:
            self._recorder.record(LeaseAttempts(tuple(leased)), "")
        return may_be_more

    def _admit(self, entry: ReadyBatch) -> bool:
        tokens = self._tokens_for(entry.spec, len(entry.attempts))
        if tokens is None:
            self._queue.refuse(entry)
            return False
        self._queue.admit(entry)
        self._slots_out += len(tokens)
        self._launch(entry.spec, entry.attempts, tokens)
        return True

    def _tokens_for(self, spec: EvaluatorSpec, count: int) -> Sequence[PlacementToken | None] | None:
        if self._pool is None:
            return [None] * min(count, spec.resource.concurrency, self._max_slots)
        demand = self._demands.get(spec.evaluator_id)
        if demand is None:
            demand = self._demands[spec.evaluator_id] = spec.sample_resource
        lease = self._pool.try_acquire_batch(spec.resource, demand, count)
        return None if lease is None else lease.tokens

    # Why does it wait?

    def waiting(self, wanted: Callable[[PlannedAttempt], bool], limit: int) -> list[WaitingBatch]:
        """The waiting batches that hold a wanted attempt, in order, each with its reason."""
        found: list[WaitingBatch] = []
        for place, entry in enumerate(self._queue):
            task_ids = dict.fromkeys(attempt.ref.task_id for attempt in entry.attempts if wanted(attempt))
            if task_ids:
                found.append(
                    WaitingBatch(
                        task_ids=tuple(task_ids),
                        reason=self._reason(entry, place),
                        waiting_seconds=self._clock.monotonic() - entry.queued_at,
                        bypassed=entry.bypassed,
                    )
                )
                if len(found) == limit:
                    break
        return found

    def _reason(self, entry: ReadyBatch, place: int) -> str:
        if self.is_stopped:
            return "the server is shutting down and admits nothing"
        if self._slots_out >= self._max_slots:
            return f"max_running_samples ({self._max_slots}) are running"
        if self._pool is not None and self._queue.is_blocked(entry):
            return _why_blocked(self._pool, entry)
        return f"{place} batches are ahead of it"


def _why_blocked(pool: PlacementPool, entry: ReadyBatch) -> str:
    spec = entry.spec
    wanted = min(tokens_in_budget(spec.resource, spec.sample_resource), len(entry.attempts))
    explanation = pool.explain(spec.sample_resource, wanted)
    short = ", ".join(f"{what} on {nodes} nodes" for what, nodes in explanation.shortages)
    return f"needs {wanted} tokens at once, {explanation.free_tokens} are free; short of {short or 'nothing any more'}"
