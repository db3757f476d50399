"""Why a task waits: read off the ledger, the ready queue and the pool; changes nothing."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from py_scheduler.domain.explanations import EntryAhead, TaskExplanation, TaskPhase, TaskWait
from py_scheduler.domain.leases import NodeShortageView, Shortage
from py_scheduler.domain.requests import SubmissionSelector
from py_scheduler.domain.results import AttemptState
from py_scheduler.errors import NotFoundError
from py_scheduler.placement import tokens_in_budget
from py_scheduler.scheduler.ledger.records import submission_and_number
from py_scheduler.scheduler.queue.ready_queue import ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.service_order import ahead_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.events import AttemptRef
    from py_scheduler.placement import NodeExplanation, PlacementPool
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.queue.flows import ReadyEntry
    from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
    from py_scheduler.scheduler.queue.service_order import Ahead
    from py_scheduler.scheduler.queue.staleness_gate import HeldBatch

MAX_NODES_TOLD = 100
MAX_AHEAD_TOLD = 20
_FOREMOST_FIRST = (
    (AttemptState.RUNNING, TaskPhase.RUNNING),
    (AttemptState.LEASED, TaskPhase.LEASED),
    (AttemptState.QUEUED, TaskPhase.QUEUED),
)


class TaskExplainer:
    """Looks at one moment of the queue, and of what is held before it.

    now: monotonic seconds. most_tokens: that one batch of an evaluator may want at once.
    reason_of: why an entry waits, given what is ahead of it. held: the namespace's, in order; why_held: why they are.
    What has ended since it was queued may still lie in the queue, and is not told.
    """

    def __init__(
        self,
        queue: ReadyQueue,
        pool: PlacementPool | None,
        ledger: LedgerState,
        *,
        now: float,
        most_tokens: Callable[[EvaluatorSpec], int],
        reason_of: Callable[[ReadyEntry, Ahead], str],
        held: Sequence[HeldBatch] = (),
        why_held: str = "",
    ) -> None:
        self._queue = queue
        self._pool = pool
        self._ledger = ledger
        self._now = now
        self._most_tokens = most_tokens
        self._reason_of = reason_of
        self._held = held
        self._why_held = why_held

    def explain(self, task_id: str, namespace: str) -> TaskExplanation:
        """How a task stands. Raises NotFoundError for one that was never accepted, or is forgotten."""
        submission_id, _ = submission_and_number(task_id)
        submission = self._ledger.find(SubmissionSelector(submission_id=submission_id, namespace=namespace))
        if submission is None or not submission.has_had(task_id):
            raise NotFoundError(f"no task has the id {task_id!r} in namespace {namespace!r}")
        batch_id = submission.key.batch_id
        task = self._ledger.task(task_id)
        if task is None:
            return TaskExplanation(
                task_id=task_id, submission_id=submission_id, batch_id=batch_id, phase=TaskPhase.DONE
            )
        counts = Counter(subtask.state for subtask in task.subtasks)
        return TaskExplanation(
            task_id=task_id,
            submission_id=submission_id,
            batch_id=batch_id,
            # The last attempt that ends takes its TaskDone with it in the same turn, unless its group is to be scored.
            phase=next((phase for state, phase in _FOREMOST_FIRST if counts[state]), TaskPhase.SCORING),
            queued_attempts=counts[AttemptState.QUEUED],
            leased_attempts=counts[AttemptState.LEASED],
            running_attempts=counts[AttemptState.RUNNING],
            waits=self.waits_of(submission_id, task_id),
        )

    def waits_of(self, submission_id: str, task_id: str) -> tuple[TaskWait, ...]:
        """The batches that hold attempts of the task, in the order of service."""
        batches = [(entry, self._waiting_refs(entry)) for entry in self._queue.batches_of(submission_id)]
        waits = [self._wait_in_queue(entry, refs) for entry, refs in batches if _are_of(task_id, refs)]
        for place, batch in enumerate(self._held):
            refs = self._waiting_refs(batch)
            if _are_of(task_id, refs):
                waits.append(self._wait_before_queue(place, batch, refs))
        return tuple(waits)

    def _wait_in_queue(self, entry: ReadyBatch, refs: Sequence[AttemptRef]) -> TaskWait:
        ahead = ahead_of(self._queue, entry, self._now, MAX_AHEAD_TOLD, self._is_there)
        return self._wait(
            entry,
            refs,
            self._reason_of(entry, ahead),
            entry.bypassed,
            map(self._entry_ahead, ahead.first),
            ahead.in_all,
        )

    def _wait_before_queue(self, place: int, batch: HeldBatch, refs: Sequence[AttemptRef]) -> TaskWait:
        return self._wait(
            batch, refs, self._why_held, 0, map(self._batch_ahead, self._held[: min(place, MAX_AHEAD_TOLD)]), place
        )

    def _wait(
        self,
        entry: ReadyBatch | HeldBatch,
        refs: Sequence[AttemptRef],
        reason: str,
        bypassed: int,
        ahead: Iterable[EntryAhead],
        ahead_in_all: int,
    ) -> TaskWait:
        wanted = self._tokens_at_once(entry, refs)
        free_tokens = max_tokens = 0
        nodes: list[NodeShortageView] = []
        if self._pool is not None:
            explanation = self._pool.explain(entry.spec.sample_resource, wanted)
            free_tokens, max_tokens = explanation.free_tokens, explanation.max_tokens
            nodes = sorted(map(node_shortage, explanation.nodes), key=lambda node: -node.free_tokens)
        return TaskWait(
            evaluator_id=entry.spec.evaluator_id,
            tasks=_count_tasks(refs),
            attempts=len(refs),
            reason=reason,
            waiting_seconds=self._now - entry.queued_at,
            bypassed=bypassed,
            max_bypass=self._queue.max_bypass,
            wanted_tokens=wanted,
            free_tokens=free_tokens,
            max_tokens=max_tokens,
            nodes=tuple(nodes[:MAX_NODES_TOLD]),
            nodes_in_all=len(nodes),
            ahead=tuple(ahead),
            ahead_in_all=ahead_in_all,
        )

    def _entry_ahead(self, entry: ReadyEntry) -> EntryAhead:
        if isinstance(entry, ReadyLease):
            waiting_seconds = self._now - entry.queued_at
            return EntryAhead(tokens=entry.tokens, waiting_seconds=waiting_seconds, bypassed=entry.bypassed)
        assert isinstance(entry, ReadyBatch)
        return self._batch_ahead(entry)

    def _batch_ahead(self, entry: ReadyBatch | HeldBatch) -> EntryAhead:
        submission = self._ledger.submission(entry.submission_id)
        assert submission is not None  # an attempt of it is still to be run
        refs = self._waiting_refs(entry)
        return EntryAhead(
            namespace=submission.key.namespace,
            batch_id=submission.key.batch_id,
            tasks=_count_tasks(refs),
            tokens=self._tokens_at_once(entry, refs),
            waiting_seconds=self._now - entry.queued_at,
            bypassed=entry.bypassed if isinstance(entry, ReadyBatch) else 0,
        )

    def _is_there(self, entry: ReadyEntry) -> bool:
        return not isinstance(entry, ReadyBatch) or any(
            self._ledger.is_waiting(attempt.ref) for attempt in entry.attempts
        )

    def _waiting_refs(self, entry: ReadyBatch | HeldBatch) -> list[AttemptRef]:
        return [attempt.ref for attempt in entry.attempts if self._ledger.is_waiting(attempt.ref)]

    def _tokens_at_once(self, entry: ReadyBatch | HeldBatch, refs: Sequence[AttemptRef]) -> int:
        """What the entry takes of the pool when it is admitted."""
        spec = entry.spec
        in_budget = tokens_in_budget(spec.resource, spec.sample_resource)
        return min(in_budget, len(refs), self._most_tokens(spec))


def node_shortage(node: NodeExplanation) -> NodeShortageView:
    """A node's part of an explanation."""
    return NodeShortageView(
        node_ip=node.node_ip,
        free_tokens=node.free_tokens,
        max_tokens=node.max_tokens,
        short=tuple(map(Shortage, node.short)),
        short_named=tuple(node.short_named),
        lacking_labels=node.lacking_labels,
    )


def _are_of(task_id: str, refs: Iterable[AttemptRef]) -> bool:
    """Whether some of them are the task's."""
    return any(ref.task_id == task_id for ref in refs)


def _count_tasks(refs: Iterable[AttemptRef]) -> int:
    return len({ref.task_id for ref in refs})
