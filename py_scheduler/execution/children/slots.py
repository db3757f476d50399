"""The slots of an evaluator's children, and by key the permits that wait for one. Starts and ends nothing.

Invariant: a slot is in the queue of its key from `new` to `drop`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections import deque
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.runners.runner import ANYWHERE, RunnerState, RunnerView

if TYPE_CHECKING:
    from collections.abc import Iterator

    from py_scheduler.domain.ports import TimerHandle
    from py_scheduler.domain.runners.runner import RunnerKey
    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.execution.children.session import ChildSession


class ChildSlot:
    """Where one child lives, and after it the next: the slot stays over restarts.

    failed_tries: starts in a row that came to nothing. failed_rounds: how often in a row all tries of a round did.
    has_run: whether a permit ever got the child that is there now.
    """

    def __init__(self, runner_id: str, key: RunnerKey) -> None:
        self.runner_id = runner_id
        self.key = key
        self.state = RunnerState.STARTING
        self.session: ChildSession | None = None
        self.running: RunningAttempt | None = None
        self.restarts = 0
        self.failed_tries = 0
        self.failed_rounds = 0
        self.has_run = False
        self.message = ""

    def view(self, kind: str, evaluator_id: str, now: float) -> RunnerView:
        """As it stands. now: monotonic seconds."""
        view = RunnerView(
            runner_id=self.runner_id,
            kind=kind,
            state=self.state,
            evaluator_id=evaluator_id,
            node_ip=self.key[0],
            gpu_ids=self.key[1] or (),
            pid=self.session.child.pid if self.session is not None else 0,
            restarts=self.restarts,
            message=self.message,
        )
        running = self.running
        if running is None:
            return view
        return msgspec.structs.replace(
            view,
            submission_id=running.planned.submission_id,
            task_id=running.ref.task_id,
            sample_no=running.sample_no,
            attempt_no=running.ref.attempt_no,
            begun_unix_seconds=running.began_unix_seconds,
            running_seconds=now - running.began_at,
            keys=dict(running.shown),
        )


class Waiter:
    """A permit that wants a child. arrival_no: of two that one child would do for, the lower number goes first."""

    def __init__(self, arrival_no: int) -> None:
        self.arrival_no = arrival_no
        self.given: asyncio.Future[ChildSlot] = asyncio.get_running_loop().create_future()


class WaitQueue:
    """The slots of one key, and the permits that wait for one of them.

    failed: the slot whose start failed and has not been tried again; of several, the first one.
    may_try_again: whether the backoff of that slot is over.
    """

    def __init__(self, key: RunnerKey) -> None:
        self.key = key
        self.slots: set[ChildSlot] = set()
        self.idle: list[ChildSlot] = []
        self.failed: ChildSlot | None = None
        self.may_try_again = False
        self.backoff: TimerHandle | None = None
        self._waiters: deque[Waiter] = deque()

    @property
    def first(self) -> Waiter | None:
        """The waiter that has waited longest, without those that are cancelled and about to leave."""
        while self._waiters and self._waiters[0].given.done():
            self._waiters.popleft()
        return self._waiters[0] if self._waiters else None

    @property
    def arrival_no(self) -> float:
        """The first waiter's; infinite if nobody waits."""
        return math.inf if self.first is None else self.first.arrival_no

    @property
    def missing(self) -> int:
        """How many children to start: 5 waiters and 2 children on their way make 3."""
        waiting = sum(not waiter.given.done() for waiter in self._waiters)
        return waiting - sum(slot.state is RunnerState.STARTING for slot in self.slots)

    @property
    def has_live_slots(self) -> bool:
        """Whether a child lives there or is on its way."""
        return any(slot is not self.failed for slot in self.slots)

    @property
    def is_held_back(self) -> bool:
        """Whether its last start failed and it is too early for another."""
        return self.failed is not None and not self.may_try_again

    def join(self, arrival_no: int) -> Waiter:
        waiter = Waiter(arrival_no)
        self._waiters.append(waiter)
        return waiter

    def withdraw(self, waiter: Waiter) -> ChildSlot | None:
        """Takes a waiter out. Returns the slot that it was given just before, if it was."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
        given = waiter.given
        if not given.done() or given.cancelled() or given.exception() is not None:
            return None
        return given.result()

    def give(self, slot: ChildSlot) -> None:
        """Gives a slot to the first waiter, which must be there."""
        self._waiters.popleft().given.set_result(slot)

    def refuse_all(self, error: Exception) -> None:
        while (waiter := self.first) is not None:
            waiter.given.set_exception(error)

    def forget_failure(self) -> None:
        if self.backoff is not None:
            self.backoff.cancel()
        self.failed = self.backoff = None
        self.may_try_again = False


class ChildSlots:
    """All slots of one evaluator. max_live: how many may have a child or one on its way."""

    def __init__(self, evaluator_id: str, max_live: int) -> None:
        self._evaluator_id = evaluator_id
        self._max_live = max_live
        self._numbers = itertools.count()
        self._slots: dict[str, ChildSlot] = {}
        self._queues: dict[RunnerKey, WaitQueue] = {}

    def __iter__(self) -> Iterator[ChildSlot]:
        return iter(self._slots.values())

    def new(self, key: RunnerKey) -> ChildSlot:
        slot = ChildSlot(f"{self._evaluator_id}/{next(self._numbers)}", key)
        self._slots[slot.runner_id] = slot
        self.queue(key).slots.add(slot)
        return slot

    def drop(self, slot: ChildSlot) -> None:
        queue = self.queue(slot.key)
        del self._slots[slot.runner_id]
        queue.slots.discard(slot)
        if queue.failed is slot:
            queue.forget_failure()

    def clear(self) -> None:
        self._slots.clear()
        self._queues.clear()

    # Queues

    def queue(self, key: RunnerKey) -> WaitQueue:
        return self._queues.setdefault(key, WaitQueue(key))

    @property
    def queues(self) -> list[WaitQueue]:
        """In the order in which their first waiters came."""
        return sorted(self._queues.values(), key=lambda queue: queue.arrival_no)

    def queue_served_by(self, slot: ChildSlot) -> WaitQueue:
        """Of the two queues that a slot can serve, the one whose first waiter came earlier."""
        return min(self.queue(slot.key), self.queue(ANYWHERE), key=lambda queue: queue.arrival_no)

    def queue_with_idle(self, key: RunnerKey) -> WaitQueue | None:
        """A queue with idle children that would do for the key."""
        queue = self.queue(key)
        if not queue.idle and key == ANYWHERE:
            return next((queue for queue in self._queues.values() if queue.idle), None)
        return queue if queue.idle else None

    # All slots together

    @property
    def has_room(self) -> bool:
        return sum(slot.state is not RunnerState.FAILED for slot in self) < self._max_live

    def is_anybody_starved(self, arrival_no: float) -> bool:
        """Whether a waiter that came before that number waits for children of which there is none."""
        return any(
            queue.arrival_no < arrival_no and not (queue.has_live_slots or queue.is_held_back)
            for queue in self._queues.values()
        )

    def is_hopeless(self, queue: WaitQueue) -> bool:
        """Whether no child lives or is on its way that could serve this queue."""
        serving = self._queues.values() if queue.key == ANYWHERE else [queue]
        return not any(queue.has_live_slots for queue in serving)
