"""Resident workers: long-lived asyncio tasks that run samples, so that a sample costs no new task.

Invariants
  1. At most `max_workers` live workers; one that was abandoned no longer counts.
  2. While permits wait and a worker is idle or may be made, exactly one worker is on its way. A worker that takes a
     permit wakes the next one before it begins to run, so one worker runs a burst of samples that never wait for
     anything, without a switch.
  3. Whatever the workers of a pool do, all together, they give the event loop its turn every few milliseconds. Ten
     thousand handlers that one event wakes end in as many turns as that takes, in the order in which they woke.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Protocol, assert_never

from py_scheduler.execution.stopping import StopState

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.execution.stopping import Stoppable

logger = logging.getLogger(__name__)

_TURN_SECONDS = 0.005
_NOT_BEGUN = float("-inf")
_KILL_SECONDS = 1.0
"""How long what is killed as the pool closes may take to end."""


class Work(Protocol):
    """What a worker takes up."""

    async def drain(self, token: PlacementToken | None, worker: Worker) -> None:
        """Does all of it, with the token if it has one. Raises only what ends the worker."""
        ...


Permit = tuple[Work, "PlacementToken | None"]


class LoopTurn:
    """What the workers of one pool may take of one turn of the loop, all together.

    ends_at: monotonic seconds, and in the past while nothing has been taken of this turn. Whoever finds that it has
    passed asks `is_over`, and waits for the `next` turn if so.
    """

    __slots__ = ("_is_watched", "_monotonic", "_served", "_waiting", "_wakened", "ends_at")

    def __init__(self, clock: Clock) -> None:
        self._monotonic = clock.monotonic
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._wakened = self._served = 0
        """Of those that waited, how many were woken for this turn, and how many of these went on in it."""
        self._is_watched = False
        """Whether `_end` will be called."""
        self.ends_at = _NOT_BEGUN

    def is_over(self, now: float) -> bool:
        """Whether the workers have kept the loop long enough; if not, the turn is theirs for some time."""
        if now < self.ends_at:
            return False
        if self.ends_at != _NOT_BEGUN:
            return True
        self.ends_at = now + _TURN_SECONDS
        self._watch()
        return False

    def is_over_for(self, began_at: float, now: float) -> bool:
        """As `is_over`, but what began in this turn, at `began_at`, may go on to its end."""
        if self.ends_at == _NOT_BEGUN:
            return self.is_over(now)
        return now >= self.ends_at and began_at < self.ends_at - _TURN_SECONDS

    async def next(self) -> None:
        """Lets everything else that is ready go first."""
        # Ten thousand come by here in one turn, so there is as little as can be on the way to the wait.
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append(woken)
        if not self._is_watched:
            self._watch()
        await woken
        while self.is_over(self._monotonic()):
            # Another one that was woken with it took the whole turn. It goes before those that came later.
            woken = asyncio.get_running_loop().create_future()
            self._waiting.appendleft(woken)
            self._watch()
            await woken
        self._served += 1

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        """The turn that `ends_at` is about is over. Wakes about as many as the next one has time for: to wake all of
        ten thousand in each turn would take longer than what they do.
        """
        self._is_watched, self.ends_at = False, _NOT_BEGUN
        time_for = 2 * self._served if self._served == self._wakened else self._served
        self._served, self._wakened = 0, min(max(1, time_for), len(self._waiting))
        for _ in range(self._wakened):
            woken = self._waiting.popleft()
            if not woken.done():
                woken.set_result(None)
        if self._waiting:
            self._watch()


class Worker:
    """Takes permits and drains them.

    running: the attempt or group score that it is at, set by their supervisor. takes_work: until it is given up
    or its pool closes. is_abandoned: it was given up, because its handler ignored a stop. is_closing: the pool closes.
    turn: what it shares with the other workers.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._monotonic = pool.clock.monotonic
        self.turn = pool.turn
        self.running: Stoppable | None = None
        self.is_at_work = False
        self.takes_work = True
        self.is_abandoned = False
        self.is_closing = False
        self.task = asyncio.get_running_loop().create_task(self._work())

    def turn_is_over(self) -> bool:
        """Whether the workers have kept the loop long enough; if so, give way."""
        return self.turn.is_over(self._monotonic())

    async def give_way(self) -> None:
        """Lets everything else that is ready have its turn first."""
        await self.turn.next()

    async def absorb_cancellation(self) -> None:
        """A stop ends what the worker is at and not the worker; nor may a handler end it by cancelling its task."""
        if not self.task.cancelling() or self.is_closing:
            return
        try:
            # One that was asked for and has not been delivered would strike the next sample.
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            if self.is_closing:
                raise
        while self.task.cancelling():
            self.task.uncancel()

    async def _work(self) -> None:
        self._pool.worker_is_here()
        while self.takes_work:
            if self.turn_is_over():
                # Not between a permit and its attempt: what is admitted first begins first.
                await self.give_way()
            self.is_at_work = False
            work, token = await self._pool.next_permit()
            self.is_at_work = True
            await work.drain(token, self)


class WorkerPool:
    """The workers, and the permits that wait for one, in order. `on_crash` gets each worker that an exception ended."""

    def __init__(self, max_workers: int, on_crash: Callable[[Worker, BaseException], None], clock: Clock) -> None:
        self.clock = clock
        self.turn = LoopTurn(clock)
        self._max_workers = max_workers
        self._on_crash = on_crash
        self._permits: deque[Permit] = deque()
        self._idle: list[asyncio.Future[None]] = []
        self._workers: set[Worker] = set()
        self._abandoned: set[Worker] = set()
        self._is_waking = False
        self._is_closed = False

    def submit(self, work: Work, token: PlacementToken | None) -> None:
        """Queues one permit; a worker takes it as soon as one is free, and none once the pool is closed."""
        self._permits.append((work, token))
        self._wake_one()

    def worker_is_here(self) -> None:
        """For workers: the one that was woken, or made, has come."""
        self._is_waking = False

    async def next_permit(self) -> Permit:
        """For workers: the next permit, waiting for one if need be."""
        while not self._permits:
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._idle.append(woken)
            await woken
            self.worker_is_here()
        permit = self._permits.popleft()
        if self._permits:
            self._wake_one()
        return permit

    def abandon(self, worker: Worker) -> None:
        """Gives up a worker whose handler does not stop; another may take its place."""
        worker.is_abandoned, worker.takes_work = True, False
        self._workers.discard(worker)
        self._abandoned.add(worker)
        if self._permits:
            self._wake_one()

    async def close(self, grace_seconds: float) -> int:
        """Ends all workers, and says how many did not end within the grace.

        A worker that was told to stop before is not told again while it has its grace: a second cancellation would
        strike its handler as it cleans up. It is told behind the grace, which kills a child that has not stopped until
        then. An abandoned worker has had its grace: it is told and not waited for.
        """
        self._is_closed = True
        workers = self._workers | self._abandoned
        stopping: list[Worker] = []
        for worker in workers:
            worker.is_closing, worker.takes_work = True, False
            if _has_its_grace(worker):
                stopping.append(worker)
            else:
                worker.task.cancel()
        if self._workers:
            await asyncio.wait([worker.task for worker in self._workers], timeout=grace_seconds)
        late = [worker.task for worker in stopping if not worker.task.done()]
        for task in late:
            task.cancel()
        if late:  # What runs in a child ends with it, now that it is killed; a handler in the loop may go on.
            await asyncio.wait(late, timeout=_KILL_SECONDS)
        return sum(not worker.task.done() for worker in workers)

    def _wake_one(self) -> None:
        if self._is_waking or self._is_closed:
            return
        while self._idle:
            woken = self._idle.pop()
            if not woken.done():
                woken.set_result(None)
                self._is_waking = True
                return
        if len(self._workers) < self._max_workers:
            self._is_waking = True
            worker = Worker(self)
            self._workers.add(worker)
            worker.task.add_done_callback(lambda task: self._ended(worker, task))

    def _ended(self, worker: Worker, task: asyncio.Task[None]) -> None:
        self._workers.discard(worker)
        self._abandoned.discard(worker)
        self._is_waking = False  # If it was on its way, it does not come any more.
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        # The end of the loop cancels everything, idle workers too: that is no crash.
        was_at_work = worker.is_at_work or not task.cancelled()
        if error is not None and was_at_work and not worker.is_closing:
            logger.error("a worker crashed", exc_info=error)
            self._on_crash(worker, error)
        if self._permits:
            self._wake_one()


def _has_its_grace(worker: Worker) -> bool:
    """Whether what it is at was told to stop, and may still take its time."""
    if worker.running is None:
        return False
    match worker.running.state:
        case StopState.STOPPING | StopState.KILLED:
            return True
        case StopState.RUNNING | StopState.STRANDED:
            return False
        case unknown:
            assert_never(unknown)
