"""Why what waits for room is not let in, for people: one line for each batch, a whole explanation for a task. Reads the
ledger, the ready queue, what is held before it and the room, and changes nothing.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from typing import TYPE_CHECKING, TypeVar

from py_scheduler.domain.explanations import EntryAhead, TaskExplanation, TaskPhase, TaskWait
from py_scheduler.domain.leases import NodeShortageView, Shortage
from py_scheduler.domain.requests import SubmissionSelector, WaitingBatch
from py_scheduler.domain.results import AttemptState
from py_scheduler.errors import NotFoundError
from py_scheduler.placement import not_taking, short_words
from py_scheduler.scheduler.ledger.records import submission_and_number
from py_scheduler.scheduler.queue.entries import ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.service_order import describe_ahead, look_ahead_of
from py_scheduler.scheduler.queue.staleness_gate import HeldBatch
from py_scheduler.scheduler.slices import in_slices

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Sequence

    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.task import SubmissionKey
    from py_scheduler.execution.attempt import PlannedAttempt
    from py_scheduler.placement import NodeExplanation, PlacementPool
    from py_scheduler.scheduler.ledger.records import TaskRecord
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.queue.entries import ReadyEntry, Shape
    from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
    from py_scheduler.scheduler.queue.service_order import Ahead
    from py_scheduler.scheduler.queue.staleness_gate import HeldOrder, StalenessGate

_Batch = TypeVar("_Batch", ReadyBatch, HeldBatch)

MAX_NODES_TOLD = 100
MAX_AHEAD_TOLD = 20
_STEP = 1_000
"""Batches or attempts that are looked at before the loop may be given back."""
_MOST_LOOKED_AT = 20_000
"""Attempts that one view of a submission looks at: it is made in one turn of the loop."""
_FOREMOST_FIRST = (
    (AttemptState.RUNNING, TaskPhase.RUNNING),
    (AttemptState.LEASED, TaskPhase.LEASED),
    (AttemptState.QUEUED, TaskPhase.QUEUED),
)
_SHUTTING_DOWN = "the server is shutting down and admits nothing"
_JOURNAL_IS_BEHIND = "the journal's disk is behind: nothing is admitted until it has caught up"
_ITS_TURN = "it waits for its turn: `py-scheduler why TASK_ID`, with a task of it, says what is ahead"


class WaitingReasons:
    """Answers while the server runs, and until it has stopped."""

    def __init__(self, queue: ReadyQueue, ledger: LedgerState, clock: Clock, gate: StalenessGate | None) -> None:
        self._queue = queue
        self._ledger = ledger
        self._clock = clock
        self._gate = gate
        self._one_at_a_time = asyncio.Lock()
        """For looks at the whole queue: many callers at once take no more of each turn of the loop than one."""
        self.is_stopped = False
        """Whether nothing is admitted any more."""
        self.is_paused = False
        """Whether nothing is admitted until the journal's disk has caught up."""

    def waiting(self, submission_id: str, limit: int) -> list[WaitingBatch]:
        """The waiting batches of a submission, in order, each with its reason: `limit` of them, or fewer if most of
        what still lies there has ended.
        """
        ledger, now = self._ledger, self._clock.monotonic()
        found: list[WaitingBatch] = []
        reasons: dict[tuple[Shape, int], str] = {}
        looked_at = 0
        held = () if self._gate is None else self._gate.batches_of(submission_id)
        for batch in itertools.chain[ReadyBatch | HeldBatch](self._queue.batches.of_submission(submission_id), held):
            live = [attempt.ref.task_id for attempt in batch.attempts if ledger.is_waiting(attempt.ref)]
            if live:
                queued = batch if isinstance(batch, ReadyBatch) else None
                found.append(
                    WaitingBatch(
                        task_ids=tuple(dict.fromkeys(live)),
                        reason=self._why_held(batch.namespace)
                        if queued is None
                        else self._reason_once(queued, reasons),
                        waiting_seconds=now - batch.queued_at,
                        bypassed=0 if queued is None else queued.bypassed,
                    )
                )
            looked_at += len(batch.attempts)
            if len(found) == limit or looked_at >= _MOST_LOOKED_AT:
                break
        return found

    def _reason_once(self, entry: ReadyBatch, reasons: dict[tuple[Shape, int], str]) -> str:
        """Entries of one submission that want the same wait for the same: the nodes are looked at once for them."""
        wanted = entry.shape, entry.tokens
        if wanted not in reasons:
            reasons[wanted] = self._reason(entry)
        return reasons[wanted]

    async def explain_task(self, task_id: str, namespace: str) -> TaskExplanation:
        """How a task stands, and why it waits if it does. Raises NotFoundError."""
        async with self._one_at_a_time:
            explainer = TaskExplainer(
                self._queue,
                self._ledger,
                now=self._clock.monotonic(),
                reason_of=self._reason,
                gate=self._gate,
                why_held=self._why_held(namespace),
            )
            return await in_slices(explainer.explain(task_id, namespace), self._clock)

    async def why_pending(self, entry: ReadyLease) -> str:
        """Why a lease in the queue is not granted yet."""
        async with self._one_at_a_time:
            now, is_there = self._clock.monotonic(), what_is_there(self._ledger)
            ahead = await in_slices(look_ahead_of(self._queue, entry, now, is_there), self._clock)
        return "" if entry.is_gone else self._reason(entry, ahead)

    def _reason(self, entry: ReadyEntry, ahead: Ahead | None = None) -> str:
        if self.is_stopped:
            return _SHUTTING_DOWN
        if self.is_paused:
            return _JOURNAL_IS_BEHIND
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
    """Looks at the queue, and at what is held before it, in slices: whatever it tells of was so at some moment of the
    look, and what a task itself waits for at its end.

    now: monotonic seconds. reason_of: why an entry waits, given what is ahead of it. gate: what holds batches before
    the queue; why_held: why it does. What has ended since it was queued may still lie in either, and is not told.
    """

    def __init__(
        self,
        queue: ReadyQueue,
        ledger: LedgerState,
        *,
        now: float,
        reason_of: Callable[[ReadyEntry, Ahead], str],
        gate: StalenessGate | None = None,
        why_held: str = "",
    ) -> None:
        self._queue = queue
        self._room = queue.room
        self._ledger = ledger
        self._now = now
        self._reason_of = reason_of
        self._gate = gate
        self._why_held = why_held
        self._is_there = what_is_there(ledger)

    def explain(self, task_id: str, namespace: str) -> Generator[None, None, TaskExplanation]:
        """How a task stands. Raises NotFoundError for one that was never accepted, or is forgotten."""
        submission_id, _ = submission_and_number(task_id)
        submission = self._ledger.find(SubmissionSelector(submission_id=submission_id, namespace=namespace))
        if submission is None or not submission.has_had(task_id):
            raise NotFoundError(f"no task has the id {task_id!r} in namespace {namespace!r}")
        batch_id = submission.key.batch_id
        queued = _count_states(self._ledger.task(task_id))[AttemptState.QUEUED]
        waits = (yield from self.waits_of(submission_id, task_id, queued)) if queued else ()
        task = self._ledger.task(task_id)
        if task is None:
            return TaskExplanation(
                task_id=task_id, submission_id=submission_id, batch_id=batch_id, phase=TaskPhase.DONE
            )
        counts = _count_states(task)
        return TaskExplanation(
            task_id=task_id,
            submission_id=submission_id,
            batch_id=batch_id,
            # The last attempt that ends takes its TaskDone with it in the same turn, unless its group is to be scored.
            phase=next((phase for state, phase in _FOREMOST_FIRST if counts[state]), TaskPhase.SCORING),
            queued_attempts=counts[AttemptState.QUEUED],
            leased_attempts=counts[AttemptState.LEASED],
            running_attempts=counts[AttemptState.RUNNING],
            waits=waits,
        )

    def waits_of(self, submission_id: str, task_id: str, attempts: int) -> Generator[None, None, tuple[TaskWait, ...]]:
        """The batches that hold attempts of the task, in the order of service. attempts: how many there are at most."""
        waits: list[TaskWait] = []
        batches = list(self._queue.batches.of_submission(submission_id))
        for entry in (yield from self._with_attempts_of(task_id, batches, attempts)):
            ahead = yield from look_ahead_of(self._queue, entry, self._now, self._is_there, MAX_AHEAD_TOLD)
            told = yield from self._told_of(ahead.first)
            if self._is_there(entry):
                reason = self._reason_of(entry, ahead)
                waits.append(self._wait(entry, reason, entry.bypassed, told, ahead.in_all))
        attempts -= sum([wait.attempts for wait in waits])
        held = [] if self._gate is None else list(self._gate.batches_of(submission_id))
        for batch in (yield from self._with_attempts_of(task_id, held, attempts)):
            before, place = yield from self._held_before(batch)
            told = yield from self._told_of(before)
            if self._waiting(batch):
                waits.append(self._wait(batch, self._why_held, 0, told, place))
        return tuple(waits)

    def _with_attempts_of(
        self, task_id: str, batches: Iterable[_Batch], attempts: int
    ) -> Generator[None, None, list[_Batch]]:
        """Those of these batches in which attempts of the task wait."""
        found: list[_Batch] = []
        for number, batch in enumerate(batches):
            if any(attempt.ref.task_id == task_id for attempt in batch.attempts):
                count = sum([attempt.ref.task_id == task_id for attempt in self._waiting(batch)])
                attempts -= count
                found += [batch] * bool(count)
            if attempts <= 0:
                break
            if number % _STEP == 0 or len(batch.attempts) > _STEP:
                yield
        return found

    def _held_before(self, batch: HeldBatch) -> Generator[None, None, tuple[list[HeldBatch], int]]:
        """The first of what is held before a batch, and how many there are."""
        assert self._gate is not None  # it holds the batch
        held = self._gate.held(batch.namespace)
        first: list[tuple[HeldOrder, HeldBatch]] = []
        in_all = 0
        for begin in range(0, len(held), _STEP):
            step = [item for item in held[begin : begin + _STEP] if item[0] < batch.order and self._waiting(item[1])]
            in_all += len(step)
            first = heapq.nsmallest(MAX_AHEAD_TOLD, first + step, key=lambda item: item[0])
            yield
        return [before for _, before in first], in_all

    def _told_of(self, entries: Iterable[ReadyEntry | HeldBatch]) -> Generator[None, None, list[EntryAhead]]:
        told: list[EntryAhead] = []
        for entry in entries:
            if isinstance(entry, ReadyLease):
                waiting_seconds = self._now - entry.queued_at
                told.append(EntryAhead(tokens=entry.tokens, waiting_seconds=waiting_seconds, bypassed=entry.bypassed))
            elif isinstance(entry, ReadyBatch | HeldBatch) and (waiting := self._waiting(entry)):
                submission = self._ledger.submission(entry.submission_id)
                if submission is not None:
                    told.append(self._batch_ahead(entry, submission.key, waiting))
            yield
        return told

    def _wait(
        self,
        entry: ReadyBatch | HeldBatch,
        reason: str,
        bypassed: int,
        ahead: Sequence[EntryAhead],
        ahead_in_all: int,
    ) -> TaskWait:
        waiting = self._waiting(entry)
        wanted = self._tokens_at_once(entry, len(waiting))
        free_tokens = max_tokens = 0
        nodes: list[NodeShortageView] = []
        if self._room.pool is not None:
            explanation = self._room.pool.explain(entry.spec.sample_resource, wanted)
            free_tokens, max_tokens = explanation.free_tokens, explanation.max_tokens
            nodes = sorted(map(node_shortage, explanation.nodes), key=lambda node: -node.free_tokens)
        return TaskWait(
            evaluator_id=entry.spec.evaluator_id,
            tasks=_count_tasks(waiting),
            attempts=len(waiting),
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

    def _batch_ahead(
        self, entry: ReadyBatch | HeldBatch, key: SubmissionKey, waiting: Sequence[PlannedAttempt]
    ) -> EntryAhead:
        return EntryAhead(
            namespace=key.namespace,
            batch_id=key.batch_id,
            tasks=_count_tasks(waiting),
            tokens=self._tokens_at_once(entry, len(waiting)),
            waiting_seconds=self._now - entry.queued_at,
            bypassed=entry.bypassed if isinstance(entry, ReadyBatch) else 0,
        )

    def _waiting(self, batch: ReadyBatch | HeldBatch) -> Sequence[PlannedAttempt]:
        """Its attempts that still wait."""
        is_waiting = self._ledger.is_waiting
        return [attempt for attempt in batch.attempts if is_waiting(attempt.ref)]

    def _tokens_at_once(self, entry: ReadyBatch | HeldBatch, attempts: int) -> int:
        """What the entry takes of the pool when it is admitted."""
        return self._room.tokens_at_once(entry.spec, attempts, entry.namespace)


def what_is_there(ledger: LedgerState) -> Callable[[ReadyEntry], bool]:
    """Whether anything of an entry still waits."""
    is_waiting = ledger.is_waiting

    def is_there(entry: ReadyEntry) -> bool:
        if entry.is_gone or not isinstance(entry, ReadyBatch):
            return not entry.is_gone
        for attempt in entry.attempts:  # noqa: SIM110 -- a generator for each of a million entries takes twice as long
            if is_waiting(attempt.ref):
                return True
        return False

    return is_there


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


def _count_states(task: TaskRecord | None) -> Counter[AttemptState]:
    return Counter(subtask.state for subtask in task.subtasks) if task is not None else Counter()


def _count_tasks(attempts: Iterable[PlannedAttempt]) -> int:
    return len({attempt.ref.task_id for attempt in attempts})
