"""Resident workers: long-lived asyncio tasks that run samples, so that a sample costs no new task.

Invariants
  1. At most `max_workers` live workers; one that was abandoned no longer counts.
  2. While permits wait and a worker is idle or may be made, exactly one worker is on its way. A worker that takes a
     permit wakes the next one before it begins to run, so one worker runs a burst of samples that never wait for
     anything, without a switch.
  3. A worker gives the event loop its turn at least every few milliseconds of uninterrupted work.
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

_TURN_SECONDS = 0.002
_KILL_SECONDS = 1.0
"""How long what is killed as the pool closes may take to end."""


class Work(Protocol):
    """What a worker takes up."""

    async def drain(self, token: PlacementToken | None, worker: Worker) -> None:
        """Does all of it, with the token if it has one. Raises only what ends the worker."""
        ...


Permit = tuple[Work, "PlacementToken | None"]


class Worker:
    """Takes permits and drains them.

    running: the attempt or group score that it is at, set by their supervisor. takes_work: until it is given up
    or its pool closes. is_abandoned: it was given up, because its handler ignored a stop. is_closing: the pool closes.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._monotonic = pool.clock.monotonic
        self._turn_began = self._monotonic()
        self.running: Stoppable | None = None
        self.is_at_work = False
        self.takes_work = True
        self.is_abandoned = False
        self.is_closing = False
        self.task = asyncio.get_running_loop().create_task(self._work())

    def turn_is_over(self) -> bool:
        """Whether the worker has kept the loop long enough; if so, give way."""
        return self._monotonic() - self._turn_began >= _TURN_SECONDS

    async def give_way(self) -> None:
        """Lets everything else that is ready have its turn first."""
        await asyncio.sleep(0)
        self._turn_began = self._monotonic()

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
