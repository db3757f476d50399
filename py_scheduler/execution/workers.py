"""Resident workers: long-lived asyncio tasks that play episodes, so that a sample costs no new task.

Invariants
  1. At most `max_workers` live workers; one that was abandoned no longer counts.
  2. While permits wait and a worker is idle or may be made, one worker is on its way, and never two. Whoever takes a
     permit wakes the next before it starts to play, so a burst of samples that never wait for anything is played by one
     worker without a switch.
  3. A worker gives the event loop its turn at least every few milliseconds of uninterrupted work.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.execution.attempt import RunningAttempt

logger = logging.getLogger(__name__)

_TURN_SECONDS = 0.002


class Work(Protocol):
    """What a worker takes up."""

    async def drain(self, token: PlacementToken | None, worker: Worker) -> None:
        """Does all of it, with the token if it has one. Raises only what ends the worker."""
        ...


Permit = tuple[Work, "PlacementToken | None"]


class Worker:
    """Takes permits and drains them. `running` is the attempt that it is at, if its work is one.

    is_abandoned: its handler ignored a stop; should it ever come back it takes no more work. is_closing: the pool is
    closing.
    """

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._turn_began = time.monotonic()
        self.running: RunningAttempt | None = None
        self.is_at_work = False
        self.is_abandoned = False
        self.is_closing = False
        self.kill: Callable[[], None] | None = None
        """As `RunningAttempt.kill`, for work that is no attempt."""
        self.task = asyncio.get_running_loop().create_task(self._work())

    def turn_is_over(self) -> bool:
        """Whether the worker has kept the loop long enough; if so, give way."""
        return time.monotonic() - self._turn_began >= _TURN_SECONDS

    async def give_way(self) -> None:
        """Lets everything else that is ready have its turn first."""
        await asyncio.sleep(0)
        self._turn_began = time.monotonic()

    async def _work(self) -> None:
        self._pool.worker_is_here()
        while not self.is_abandoned:
            if self.turn_is_over():
                # Not between a permit and its attempt: what is admitted first begins first.
                await self.give_way()
            self.is_at_work = False
            work, token = await self._pool.next_permit()
            self.is_at_work = True
            await work.drain(token, self)


class WorkerPool:
    """Permits that wait for a worker, in order, and the workers. `on_crash` is told of a worker that ended by an
    exception.
    """

    def __init__(self, max_workers: int, on_crash: Callable[[Worker, BaseException], None]) -> None:
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
        worker.is_abandoned = True
        self._workers.discard(worker)
        self._abandoned.add(worker)
        if self._permits:
            self._wake_one()

    async def close(self, grace_seconds: float) -> int:
        """Ends all workers; how many did not end within the grace.

        What was abandoned has had its grace before, and is told once more but not waited for.
        """
        self._is_closed = True
        workers = self._workers | self._abandoned
        for worker in workers:
            worker.is_closing = True
            worker.task.cancel()
        if self._workers:
            await asyncio.wait([worker.task for worker in self._workers], timeout=grace_seconds)
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
        # One that was at nothing is cancelled only with everything else, at the end of its loop.
        was_at_work = worker.is_at_work or not task.cancelled()
        if error is not None and was_at_work and not worker.is_closing:
            logger.error("a worker crashed", exc_info=error)
            self._on_crash(worker, error)
        if self._permits:
            self._wake_one()
