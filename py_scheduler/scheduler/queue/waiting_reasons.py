"""Why what waits for room is not let in, for people: one line for each batch, a whole explanation for a task."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Protocol

from py_scheduler.domain.requests import WaitingBatch
from py_scheduler.placement import short_words, tokens_in_budget
from py_scheduler.scheduler.queue.ready_queue import ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.service_order import Ahead, ahead_of, describe_ahead
from py_scheduler.scheduler.queue.task_explanation import TaskExplainer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.ports import Clock
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.queue.flows import ReadyEntry
    from py_scheduler.scheduler.queue.quotas import Quotas
    from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
    from py_scheduler.scheduler.queue.staleness_gate import HeldBatch, StalenessGate

_SHUTTING_DOWN = "the server is shutting down and admits nothing"
_ITS_TURN = "it waits for its turn: `py-scheduler why TASK_ID`, with a task of it, says what is ahead"


class Gatekeeper(Protocol):
    """Who lets entries in, as far as that explains why one is not: `admission.Admission`."""

    is_stopped: bool
    stranded_tokens: int
    """Held by handlers that do not stop."""

    def lacks_permits(self, entry: ReadyEntry) -> bool:
        """Whether it needs more permits than are free."""
        ...

    def most_tokens(self, spec: EvaluatorSpec) -> int:
        """How many tokens one batch may want at once."""
        ...


class WaitingReasons:
    """Looks at the queue, at what is held before it and at the pool, and changes nothing."""

    def __init__(
        self,
        gatekeeper: Gatekeeper,
        queue: ReadyQueue,
        pool: PlacementPool | None,
        ledger: LedgerState,
        clock: Clock,
        quotas: Quotas,
        gate: StalenessGate | None,
        max_permits: int,
    ) -> None:
        self._gatekeeper = gatekeeper
        self._queue = queue
        self._pool = pool
        self._ledger = ledger
        self._clock = clock
        self._quotas = quotas
        self._gate = gate
        self._max_permits = max_permits

    def waiting(self, submission_id: str, limit: int) -> list[WaitingBatch]:
        """The waiting batches of a submission, in order, each with its reason."""
        ledger, now = self._ledger, self._clock.monotonic()
        found: list[WaitingBatch] = []
        batches: Iterator[ReadyBatch | HeldBatch] = itertools.chain(
            self._queue.batches_of(submission_id), self._held(submission_id)
        )
        for batch in batches:
            live = [attempt.ref.task_id for attempt in batch.attempts if ledger.is_waiting(attempt.ref)]
            if live:
                queued = batch if isinstance(batch, ReadyBatch) else None
                found.append(
                    WaitingBatch(
                        task_ids=tuple(dict.fromkeys(live)),
                        reason=self._why_held(batch.namespace) if queued is None else self._reason(queued),
                        waiting_seconds=now - batch.queued_at,
                        bypassed=0 if queued is None else queued.bypassed,
                    )
                )
                if len(found) == limit:
                    break
        return found

    def _held(self, submission_id: str) -> list[HeldBatch]:
        submission = self._ledger.submission(submission_id)
        if self._gate is None or submission is None:
            return []
        return [batch for batch in self._gate.held(submission.key.namespace) if batch.submission_id == submission_id]

    def explain_task(self, task_id: str, namespace: str) -> TaskExplanation:
        """How a task stands, and why it waits if it does. Raises NotFoundError."""
        explainer = TaskExplainer(
            self._queue,
            self._pool,
            self._ledger,
            now=self._clock.monotonic(),
            most_tokens=self._gatekeeper.most_tokens,
            reason_of=self._reason,
            held=[] if self._gate is None else self._gate.held(namespace),
            why_held=self._why_held(namespace),
        )
        return explainer.explain(task_id, namespace)

    def why_pending(self, entry: ReadyLease) -> str:
        """Why a claim in the queue is not granted."""
        return self._reason(entry, ahead_of(self._queue, entry, self._clock.monotonic()))

    def _reason(self, entry: ReadyEntry, ahead: Ahead | None = None) -> str:
        if self._gatekeeper.is_stopped:
            return _SHUTTING_DOWN
        reason = self._why_not_admitted(entry)
        turn = describe_ahead(self._queue, entry, ahead) if ahead is not None else _ITS_TURN
        if reason and len(self._queue.flows) == 1:
            return reason
        return f"{reason}; {turn}" if reason else turn

    def _why_held(self, namespace: str) -> str:
        if self._gatekeeper.is_stopped or self._gate is None:
            return _SHUTTING_DOWN
        return self._gate.reason(namespace)

    def _why_not_admitted(self, entry: ReadyEntry) -> str:
        """What would keep it waiting even if its turn came; empty when nothing is known to."""
        namespace = entry.flow[0]
        if self._queue.is_capped(entry):
            quota, held = self._quotas.of(namespace).max_running_samples, self._queue.shares.tokens_of(namespace)
            return f"the quota of namespace {namespace!r} is max_running_samples = {quota}, and {held} are running"
        if self._gatekeeper.lacks_permits(entry):
            return f"max_running_samples ({self._max_permits}) are running"
        if self._pool is not None and self._queue.is_blocked(entry):
            stranded = f"; {self._gatekeeper.stranded_tokens} tokens are held by handlers that do not stop"
            return self._why_blocked(self._pool, entry) + (stranded if self._gatekeeper.stranded_tokens else "")
        return ""

    def _why_blocked(self, pool: PlacementPool, entry: ReadyEntry) -> str:
        if isinstance(entry, ReadyLease):
            demand, wanted = entry.per_sample, entry.tokens
        else:
            assert isinstance(entry, ReadyBatch)
            spec = entry.spec
            demand = spec.sample_resource
            in_budget = tokens_in_budget(spec.resource, demand)
            wanted = min(in_budget, len(entry.attempts), self._gatekeeper.most_tokens(spec))
        if not pool.nodes():
            return "no node is left in the pool: it waits until one is back"
        explanation = pool.explain(demand, wanted)
        short = short_words(explanation) or "nothing any more"
        reason = f"needs {wanted} tokens at once, {explanation.free_tokens} are free; short of {short}"
        if explanation.fits_ever:
            return reason
        return f"{reason}; the nodes hold {explanation.max_tokens} even when empty: it waits until there are more"
