"""Lets waiting batches and lease requests in, in order, as far as there is room. Wakes on events and never polls.

Invariants
  1. A batch runs with a lease that holds all of its tokens (none when there is no pool), or it waits. So does a lease
     request.
  2. Whatever could make room, add an entry or take one out wakes the loop.
  3. What was let in is called leased before anything else is let in. A very large batch takes some turns for that: its
     attempts run with their tokens meanwhile, although the ledger still says of some that they are queued
     (`is_calling_leased`).
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.results import AttemptState
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.scheduler.ledger.commands import LeaseAttempts
from py_scheduler.scheduler.queue.entries import ReadyBatch, ReadyLease
from py_scheduler.scheduler.queue.explanations import WaitingReasons
from py_scheduler.scheduler.queue.flows import FlowPolicy
from py_scheduler.scheduler.queue.ready_queue import ReadyQueue
from py_scheduler.scheduler.queue.rivalry import Rivalry
from py_scheduler.scheduler.queue.room import Room, StrandedToken
from py_scheduler.scheduler.queue.shares import Shares, supply_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.leases import PlacementDemand
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.quotas import NamespaceSettings
    from py_scheduler.domain.resources import PlacementToken, Resource
    from py_scheduler.domain.task import Batch
    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.placement import Lease, PlacementPool
    from py_scheduler.scheduler.ledger.records import TaskRecord
    from py_scheduler.scheduler.log.recorder import Recorder
    from py_scheduler.scheduler.queue.entries import ReadyEntry
    from py_scheduler.scheduler.queue.quotas import Quotas
    from py_scheduler.scheduler.queue.staleness_gate import StalenessGate
    from py_scheduler.scheduler.settings import EngineSettings

    Launch = Callable[[EvaluatorSpec, list[PlannedAttempt], Sequence[PlacementToken | None], float], None]

_TURN_SECONDS = 0.002
_LEASED_AT_ONCE = 4_096
_ATTEMPTS_AT_ONCE = 256
_LOOKS = 64
"""Heads that may be looked at before a turn is seen to be over: some microseconds each."""


class Admission:
    """Wakes, offers, acquires and launches. Who is next is the queue's to say, and what fits the room's.

    `launch` gets what was let in, with one token (or None) for each permit. gate: holds training back that would be too
    stale; None: nothing is.
    """

    def __init__(
        self,
        pool: PlacementPool | None,
        recorder: Recorder,
        clock: Clock,
        settings: EngineSettings,
        launch: Launch,
        quotas: Quotas,
        namespaces: Mapping[str, NamespaceSettings],
        gate: StalenessGate | None = None,
    ) -> None:
        self._recorder = recorder
        self._clock = clock
        self._launch = launch
        weights = {namespace: table.weight for namespace, table in namespaces.items()}
        permits = settings.max_running_samples
        shares = Shares(supply_of(pool, permits), weights)
        self.room = Room(pool, permits, quotas, shares, has_fixed_nodes=settings.has_fixed_nodes)
        eval_weight = None if settings.eval_weight == "by_batch_id" else settings.eval_weight
        self._queue = ReadyQueue(
            Rivalry(self.room), settings.max_bypass, FlowPolicy(eval_weight), settings.max_wait_seconds
        )
        self._leased: list[AttemptRef] = []
        """What was let in and is still to be called leased: a batch may have 65 536 attempts."""
        self._wake = asyncio.Event()
        self._gate = gate
        if gate is not None:
            gate.opened = self._wake.set
        self.is_stopped = False
        self._is_paused = False
        self.reasons = WaitingReasons(self._queue, recorder.ledger, clock, gate)

    def enqueueing(
        self, batches: Iterable[tuple[EvaluatorSpec, Batch]], records: Sequence[TaskRecord]
    ) -> Generator[None, None, None]:
        """Adds what is to be started of these tasks, batch by batch, in slices. What ends before that never waits."""
        is_waiting = self._recorder.ledger.is_waiting
        for waiting in waiting_attempts(batches, records, self._clock.monotonic()):
            if waiting is not None:
                spec, attempts = waiting
                if live := [attempt for attempt in attempts if is_waiting(attempt.ref)]:
                    self.enqueue(spec, live)
            yield

    def enqueue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        """Adds one batch: attempts of one submission and one spec."""
        now = self._clock.monotonic()
        if self._gate is not None:
            attempts = self._gate.hold(spec, attempts, now)
        if attempts:
            self._queue.push(spec, attempts, now)
        self._wake.set()

    def requeue(self, spec: EvaluatorSpec, attempts: list[PlannedAttempt]) -> None:
        """Adds attempts of what was let in before."""
        if self._leased:  # They were let in and have lost their room before they were called leased.
            again = {attempt.ref for attempt in attempts}
            self._leased[:] = [ref for ref in self._leased if ref not in again]
        self._queue.push(spec, attempts, self._clock.monotonic())
        self._wake.set()

    def enqueue_lease(
        self,
        namespace: str,
        batch_key: tuple[float, int],
        demand: PlacementDemand,
        tokens: int,
        grant: Callable[[Lease], None],
    ) -> ReadyLease:
        """Adds a request for a lease, and grants it before this returns if it fits and nothing holds it back."""
        entry = self._queue.push_lease(batch_key, demand, tokens, grant, self._clock.monotonic(), namespace)
        if self._admit_for_one_turn():
            self._wake.set()
        return entry

    def withdraw(self, entry: ReadyLease) -> None:
        """Takes out a lease request that waits no longer: what it held back may go on."""
        self._queue.remove(entry, self._clock.monotonic())
        self._wake.set()

    def room_is_stranded(self, attempts: Iterable[tuple[EvaluatorSpec, RunningAttempt]]) -> None:
        """These are all attempts whose handlers do not stop. What can never fit beside them holds nobody back."""
        self.room.strand(
            [
                StrandedToken(attempt.planned.namespace, self.room.sample_of(spec), attempt.node_ip, attempt.gpu_ids)
                for spec, attempt in attempts
            ]
        )
        self._queue.begin_anew()
        self._wake.set()

    def permit_returned(self, spec: EvaluatorSpec, namespace: str, taken_at: float) -> None:
        """A permit that was handed out at `taken_at` is free again, and its token has been given back."""
        self.room.give_back_permit(spec, namespace, taken_at, self._clock.monotonic())
        self.room_returned()

    def lease_returned(self, namespace: str, per_sample: Resource, tokens: int, taken_at: float) -> None:
        """So many tokens of a lease have been given back."""
        self.room.give_back_leased(namespace, per_sample, tokens, taken_at, self._clock.monotonic())
        self.room_returned()

    def quotas_changed(self) -> None:
        """What a quota kept from being admitted may go on, and batches may run at another width."""
        self._queue.look_again()
        self._wake.set()

    def nodes_changed(self) -> None:
        """Nodes of the pool came or went, and batches may run at another width."""
        self.room.nodes_changed(self._clock.monotonic())
        self._queue.look_again()
        self.room_returned()

    def room_returned(self) -> None:
        """Something was given back to the pool."""
        self._queue.unblock()
        self._wake.set()

    def attempts_were_ended(self) -> None:
        """The ledger has ended attempts that waited: from now on nothing goes or counts before it was looked at. Let
        `leave_out` follow for their tasks.
        """
        self._queue.look_again()
        self.room_returned()

    def leave_out(self, task_id: str) -> None:
        """Shrinks the batches that had attempts of a task which were ended: behind one that never fits they would never
        be looked at.
        """
        for batch in self._queue.batches.of_task(task_id):
            self._shrink(batch, self._clock.monotonic())
            self._wake.set()

    def _shrink(self, batch: ReadyBatch, now: float) -> bool:
        """Leaves out what has been ended of a batch; whether anything had been."""
        live = self._live_of(batch)
        if not live:
            self._queue.drop(batch, now)
        elif len(live) < len(batch.attempts):
            self._queue.shrink(batch, live)
        else:
            return False
        return True

    def _live_of(self, batch: ReadyBatch) -> list[PlannedAttempt]:
        ledger = self._recorder.ledger
        return [attempt for attempt in batch.attempts if ledger.is_waiting(attempt.ref)]

    @property
    def is_calling_leased(self) -> bool:
        """Whether attempts that were let in are still queued in the ledger. Room is not to be denied to them."""
        return bool(self._leased)

    def stop(self) -> None:
        """Lets nothing in any more; what waits goes on waiting."""
        self.is_stopped = self.reasons.is_stopped = True

    def pause(self) -> None:
        """Lets nothing in until `resume`: the journal's disk is behind."""
        self._is_paused = self.reasons.is_paused = True

    def resume(self) -> None:
        self._is_paused = self.reasons.is_paused = False
        self._wake.set()

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

        Nothing that was admitted starts before this turn is over, so its leases are recorded together at the end; of a
        very large batch the rest in the next turns.
        """
        leased = self._leased
        if leased:
            self._call_leased()
            return True
        may_be_more = False
        monotonic = self._clock.monotonic
        now = monotonic()
        turn_ends = now + _TURN_SECONDS
        if self._gate is not None and not self.is_stopped:
            may_be_more = self._take_from(self._gate, now, turn_ends)
        queue, room = self._queue, self.room
        lets_in = not self.is_stopped and not self._is_paused
        while lets_in and (room.permits_out < room.max_permits or queue.pending_leases):
            entry = queue.offer(now, _LOOKS)
            if entry is None:
                if not queue.is_half_way:
                    break
            elif entry.looked_at != queue.generation:
                self._look_at(entry, now)
            elif not self._admit(entry, now):
                queue.refuse(entry)
            elif isinstance(entry, ReadyBatch):
                leased.extend([attempt.ref for attempt in entry.attempts])
            if monotonic() >= turn_ends:
                may_be_more = True
                break
        if leased:
            self._call_leased()
        return may_be_more or bool(leased)

    def _call_leased(self) -> None:
        self._recorder.record(LeaseAttempts(tuple(self._leased[:_LEASED_AT_ONCE])), "")
        del self._leased[:_LEASED_AT_ONCE]

    def _take_from(self, gate: StalenessGate, now: float, turn_ends: float) -> bool:
        """Queues what the gate lets go; True when the turn is over and there may be more."""
        for held in gate.let_go():
            if held is not None:
                self._queue.push(held.spec, held.attempts, now)
            if self._clock.monotonic() >= turn_ends:
                return True
        return False

    def _look_at(self, entry: ReadyEntry, now: float) -> None:
        """Leaves out what has been ended of an entry, and an entry of which nothing is left."""
        if isinstance(entry, ReadyBatch):
            if self._shrink(entry, now):
                return
            entry.tokens = self.room.tokens_at_once(entry.spec, len(entry.attempts), entry.flow[0])
        self._queue.was_looked_at(entry)

    def _admit(self, entry: ReadyEntry, now: float) -> bool:
        """Whether it fitted."""
        if isinstance(entry, ReadyBatch):
            tokens = self._queue.admit(entry, now)
            if tokens is None:
                return False
            self._launch(entry.spec, entry.attempts, tokens, now)
            return True
        assert isinstance(entry, ReadyLease)
        lease = self._queue.admit(entry, now)
        if lease is None:
            return False
        entry.grant(lease)
        return True


def waiting_attempts(
    batches: Iterable[tuple[EvaluatorSpec, Batch]], records: Sequence[TaskRecord], queued_at: float
) -> Iterator[tuple[EvaluatorSpec, list[PlannedAttempt]] | None]:
    """The attempts of these tasks that are to be started, batch by batch; batches without any are left out. None: it
    may be interrupted here too.
    """
    # One Task object may stand for several tasks: the last of a list is the first of them.
    by_task: defaultdict[int, list[TaskRecord]] = defaultdict(list)
    backwards = records[::-1]
    for begin in range(0, len(records), _ATTEMPTS_AT_ONCE):
        for record in backwards[begin : begin + _ATTEMPTS_AT_ONCE]:
            by_task[id(record.task)].append(record)
        if begin + _ATTEMPTS_AT_ONCE < len(records):
            yield None
    for spec, batch in batches:
        attempts: list[PlannedAttempt] = []
        made = 0
        for task in batch.tasks:
            record = by_task[id(task)].pop()
            submission = record.submission
            for subtask_no, subtask in enumerate(record.subtasks):
                if subtask.state is not AttemptState.QUEUED:
                    continue
                attempts.append(
                    PlannedAttempt(
                        AttemptRef(record.task_id, subtask_no, subtask.attempt_no),
                        task,
                        subtask.first_sample_no,
                        subtask.sample_count,
                        submission.submission_id,
                        submission.key.namespace,
                        submission.batch_key,
                        queued_at,
                        record.iteration,
                    )
                )
            if len(attempts) - made >= _ATTEMPTS_AT_ONCE:
                made = len(attempts)
                yield None
        if spec.admits_subtasks_alone:
            yield from ((spec, [attempt]) for attempt in attempts)
        elif attempts:
            yield spec, attempts
