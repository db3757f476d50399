"""Stands before the ready queue, and holds training back whose samples would be too stale when they are trained on.

`StalenessWindow.admits` is the rule. With `max_staleness` 1 and a `step_size` of 128, 256 samples may be accepted or
running before the next update of the weights. The gate counts those that run, and the ledger those that are accepted.

A batch goes through whole as soon as the rule admits one sample of it. A batch of 16 goes when 255 of those 256 are
accepted or running, and then 271 are. To hold back the 15 that no longer fit could leave a step incomplete for ever. So
the count may pass its limit, by less than one batch.

Invariants
  1. Evals, namespaces without a limit, and attempts of samples that were begun before never wait here. A sample that
     was begun before a restart counts as begun.
  2. A sample counts as running from when its batch is let through until its SampleDone, however many attempts that
     takes. So a retry is never held back by what came after it.
  3. Whatever could open the gate tells it: a change of weights, a resume, and the end of a sample that cannot be
     trained on.
"""

from __future__ import annotations

import heapq
import itertools
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.domain.events import AttemptEnded, TrainingResumed, WeightsChanged
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.queue.entries import ARRIVAL, CAME, OrderKey

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from py_scheduler.domain.events import Event
    from py_scheduler.scheduler.ledger.state import LedgerState

_KEEP_ENDED = 64
HeldOrder = OrderKey
"""What is held stands as it would in the ready queue."""


class HeldBatch(msgspec.Struct, frozen=True, gc=False):
    """A batch that is not in the queue yet. queued_at: monotonic seconds. Some of it may have been ended meanwhile."""

    order: HeldOrder
    spec: EvaluatorSpec
    attempts: list[PlannedAttempt]
    queued_at: float

    @property
    def submission_id(self) -> str:
        return self.attempts[0].submission_id

    @property
    def namespace(self) -> str:
        return self.attempts[0].namespace


class _NamespaceTraining:
    """One namespace's training.

    through: samples of each subtask that was let through and has not ended. batches_of: the held batches of each
    submission, by arrival; they come in their order.
    """

    __slots__ = ("batches_of", "ended", "held", "held_attempts", "running", "through")

    def __init__(self) -> None:
        self.held: list[tuple[HeldOrder, HeldBatch]] = []
        self.held_attempts = 0
        self.batches_of: dict[str, dict[int, HeldBatch]] = {}
        self.through: dict[tuple[str, int], int] = {}
        self.running = 0
        self.ended = 0
        """Attempts that ended while they were held, and may still lie there."""

    def push(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt], queued_at: float, arrival: int) -> None:
        """As in the queue, what joins a batch that waits stands before batches of the same place that came later."""
        first = attempts[0]
        siblings = self.batches_of.setdefault(first.submission_id, {})
        came = next(iter(siblings.values())).order[CAME] if siblings else arrival
        batch = HeldBatch((*first.batch_key, came, arrival), spec, attempts, queued_at)
        siblings[arrival] = batch
        heapq.heappush(self.held, (batch.order, batch))
        self.held_attempts += len(attempts)

    def pop(self) -> HeldBatch:
        batch = heapq.heappop(self.held)[1]
        siblings = self.batches_of[batch.submission_id]
        del siblings[batch.order[ARRIVAL]]
        if not siblings:
            del self.batches_of[batch.submission_id]
        self.held_attempts -= len(batch.attempts)
        return batch

    def keep(self, held: list[HeldBatch]) -> None:
        """Of all that is held. They come as `batches_of` has them."""
        self.held = [(batch.order, batch) for batch in held]
        heapq.heapify(self.held)
        self.held_attempts = sum([len(batch.attempts) for batch in held])
        self.batches_of = {}
        for batch in held:
            self.batches_of.setdefault(batch.submission_id, {})[batch.order[ARRIVAL]] = batch
        self.ended = 0

    def let_through(self, attempts: list[PlannedAttempt]) -> None:
        for attempt in attempts:
            self.through[attempt.ref.task_id, attempt.ref.subtask_no] = attempt.sample_count
            self.running += attempt.sample_count


class StalenessGate:
    """namespaces: those with a limit, whose windows the ledger counts. `apply` takes every event behind the ledger.

    opened: called when something that is held may go.
    """

    def __init__(self, ledger: LedgerState, namespaces: Iterable[str]) -> None:
        self._ledger = ledger
        self._trainings = {namespace: _NamespaceTraining() for namespace in namespaces}
        self._arrivals = itertools.count()
        self.opened: Callable[[], None] = lambda: None

    # What happens

    def apply(self, event: Event, namespace: str) -> None:
        if type(event) is AttemptEnded:
            training = self._trainings.get(namespace)
            if training is not None and not event.next_attempt_no:
                self._ended(training, event)
        elif type(event) is WeightsChanged or type(event) is TrainingResumed:
            self.opened()

    def _ended(self, training: _NamespaceTraining, event: AttemptEnded) -> None:
        count = training.through.pop((event.task_id, event.subtask_no), 0)
        training.running -= count
        if not count and training.held:
            training.ended += 1
            if 2 * training.ended > _KEEP_ENDED + training.held_attempts:
                self._forget_ended(training)
        if training.held:
            self.opened()

    # In and out

    def hold(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt], queued_at: float) -> list[PlannedAttempt]:
        """Takes what it has a say in of a batch; the rest, which may go at once."""
        first = attempts[0]
        training = self._trainings.get(first.namespace)
        if training is None or first.task.config.is_eval:
            return attempts
        # After a restart: what an earlier process has begun it had let through, and a step may be waiting for it.
        begun = [attempt for attempt in attempts if attempt.ref.attempt_no > 1]
        training.let_through(begun)
        new = [attempt for attempt in attempts if attempt.ref.attempt_no == 1] if begun else attempts
        if new:
            training.push(spec, new, queued_at, next(self._arrivals))
        return begun

    def let_go(self) -> Iterator[HeldBatch | None]:
        """What the rule admits now, in the order of service, as what counts as running from now on. None for a batch
        that has ended meanwhile: there may be many of those, and whoever asks may go on later.
        """
        windows = self._ledger.service.windows
        for namespace, training in self._trainings.items():
            while training.held and windows[namespace].admits(training.running):
                live = next(self._live(training.pop()), None)
                if live is not None:
                    training.let_through(live.attempts)
                yield live

    def _live(self, batch: HeldBatch) -> Iterator[HeldBatch]:
        """What is still to be run of it, if anything is."""
        attempts = [attempt for attempt in batch.attempts if self._ledger.is_waiting(attempt.ref)]
        if attempts:
            yield HeldBatch(batch.order, batch.spec, attempts, batch.queued_at)

    def _forget_ended(self, training: _NamespaceTraining) -> None:
        every = [batch for siblings in training.batches_of.values() for batch in siblings.values()]
        training.keep([live for batch in every for live in self._live(batch)])

    # Questions

    def batches_of(self, submission_id: str) -> Iterable[HeldBatch]:
        """What is held of a submission, in order; some of it ended."""
        for training in self._trainings.values():
            if submission_id in training.batches_of:
                return training.batches_of[submission_id].values()
        return ()

    def held(self, namespace: str) -> list[tuple[HeldOrder, HeldBatch]]:
        """What is held, each with its place, in no order, and some of it ended: a copy, for a look that takes several
        turns of the loop.
        """
        training = self._trainings.get(namespace)
        return training.held.copy() if training is not None else []

    def reason(self, namespace: str) -> str:
        """Why what is held of a namespace waits; empty for one without a limit."""
        training = self._trainings.get(namespace)
        return self._ledger.service.windows[namespace].describe(training.running) if training is not None else ""
