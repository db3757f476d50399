"""Why what waits for room is not let in, for people: one line for each batch, a whole explanation for a task. Reads the
ledger, the ready queue, what is held before it and the room, and changes nothing.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from py_scheduler.domain.explanations import EntryAhead, TaskExplanation, TaskPhase, TaskWait
from py_scheduler.domain.leases import NodeShortageView, Shortage
from py_scheduler.domain.requests import SubmissionSelector, WaitingBatch
from py_scheduler.domain.results import AttemptState
from py_scheduler.errors import NotFoundError
from py_scheduler.placement import not_taking, short_words
from py_scheduler.scheduler.ledger.records import submission_and_number
from py_scheduler.scheduler.queue.entries import ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.service_order import ahead_of, describe_ahead

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from py_scheduler.domain.events import AttemptRef
    from py_scheduler.domain.ports import Clock
    from py_scheduler.placement import NodeExplanation, PlacementPool
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.queue.entries import ReadyEntry
    from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
    from py_scheduler.scheduler.queue.service_order import Ahead
    from py_scheduler.scheduler.queue.staleness_gate import HeldBatch, StalenessGate

MAX_NODES_TOLD = 100
MAX_AHEAD_TOLD = 20
_FOREMOST_FIRST = (
    (AttemptState.RUNNING, TaskPhase.RUNNING),
    (AttemptState.LEASED, TaskPhase.LEASED),
    (AttemptState.QUEUED, TaskPhase.QUEUED),
)
_SHUTTING_DOWN = "the server is shutting down and admits nothing"
_ITS_TURN = "it waits for its turn: `py-scheduler why TASK_ID`, with a task of it, says what is ahead"


class WaitingReasons:
    """Answers while the server runs, and until it has stopped."""

    def __init__(self, queue: ReadyQueue, ledger: LedgerState, clock: Clock, gate: StalenessGate | None) -> None:
        self._queue = queue
        self._ledger = ledger
        self._clock = clock
        self._gate = gate
        self.is_stopped = False
        """Whether nothing is admitted any more."""

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
            self._ledger,
            now=self._clock.monotonic(),
            reason_of=self._reason,
            held=[] if self._gate is None else self._gate.held(namespace),
            why_held=self._why_held(namespace),
        )
        return explainer.explain(task_id, namespace)

    def why_pending(self, entry: ReadyLease) -> str:
        """Why a lease in the queue is not granted yet."""
        return self._reason(entry, ahead_of(self._queue, entry, self._clock.monotonic()))

    def _reason(self, entry: ReadyEntry, ahead: Ahead | None = None) -> str:
        if self.is_stopped:
            return _SHUTTING_DOWN
        reason = self._why_not_admitted(entry)
        turn = describe_ahead(self._queue, entry, ahead) if ahead is not None else _ITS_TURN
        if reason and len(self._queue.flows) == 1:
            return reason
        return f"{reason}; {turn}" if reason else turn

    def _why_held(self, namespace: str) -> str:
        if self.is_stopped or self._gate is None:
            return _SHUTTING_DOWN
        return self._gate.reason(namespace)

    def _why_not_admitted(self, entry: ReadyEntry) -> str:
        """What would keep it waiting even if its turn came; empty when nothing is known to."""
        room, namespace = self._queue.room, entry.flow[0]
        if room.is_capped(entry):
            quota, held = room.quotas.of(namespace).max_running_samples, room.shares.tokens_of(namespace)
            return f"the quota of namespace {namespace!r} is max_running_samples = {quota}, and {held} are running"
        if room.lacks_permits(entry):
            return f"max_running_samples ({room.max_permits}) are running"
        if room.pool is not None and self._queue.is_blocked(entry):
            stranded = f"; {len(room.stranded)} tokens are held by handlers that do not stop"
            return _why_blocked(room.pool, entry) + (stranded if room.stranded else "")
        return ""


def _why_blocked(pool: PlacementPool, entry: ReadyEntry) -> str:
    if not pool.nodes():
        return "no node is left in the pool: it waits until one is back"
    explanation = pool.explain(entry.per_sample, entry.tokens)
    draining = not_taking(explanation)
    short = short_words(explanation) or ("" if draining else "nothing any more")
    told = [
        f"needs {entry.tokens} tokens at once, {explanation.free_tokens} are free",
        f"short of {short}" * bool(short),
    ]
    reason = "; ".join(filter(None, [*told, draining]))
    if explanation.fits_ever:
        return reason
    return f"{reason}; the nodes hold {explanation.max_tokens} even when empty: it waits until there are more"


class TaskExplainer:
    """Looks at one moment of the queue, and of what is held before it.

    now: monotonic seconds. reason_of: why an entry waits, given what is ahead of it. held: the namespace's, in order;
    why_held: why they are. What has ended since it was queued may still lie in the queue, and is not told.
    """

    def __init__(
        self,
        queue: ReadyQueue,
        ledger: LedgerState,
        *,
        now: float,
        reason_of: Callable[[ReadyEntry, Ahead], str],
        held: Sequence[HeldBatch] = (),
        why_held: str = "",
    ) -> None:
        self._queue = queue
        self._room = queue.room
        self._ledger = ledger
        self._now = now
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
        if self._room.pool is not None:
            explanation = self._room.pool.explain(entry.spec.sample_resource, wanted)
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
        return self._room.tokens_at_once(entry.spec, len(refs), entry.namespace)


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
