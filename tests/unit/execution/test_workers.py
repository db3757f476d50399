"""Resident workers: who is woken for what waits."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.execution import workers
from py_scheduler.execution.workers import LoopTurn, WorkerPool
from tests.support.fake_clock import FakeClock

if TYPE_CHECKING:
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.execution.workers import Worker


@pytest.fixture(autouse=True)
def _turns_that_do_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker gives way when its turn is over, which on a busy machine may come at any place of a test."""
    monkeypatch.setattr(workers, "_TURN_SECONDS", float("inf"))


class Burst:
    """Permits that wait for nothing, until the last one is drained."""

    def __init__(self, permits: int) -> None:
        self.left = permits
        self.players: list[Worker] = []
        self.is_over = asyncio.Event()

    async def drain(self, _token: PlacementToken | None, worker: Worker) -> None:
        self.players.append(worker)
        self.left -= 1
        if not self.left:
            self.is_over.set()


class Held:
    """Permits whose work goes on until it is let go."""

    def __init__(self, permits: int) -> None:
        self.begun = 0
        self.all_begun = asyncio.Event()
        self.let_go = asyncio.Event()
        self._permits = permits

    async def drain(self, _token: PlacementToken | None, _worker: Worker) -> None:
        self.begun += 1
        if self.begun == self._permits:
            self.all_begun.set()
        await self.let_go.wait()


def crash(_worker: Worker, error: BaseException) -> None:
    raise AssertionError("no worker may end") from error


async def pool_of_idle(workers: int) -> WorkerPool:
    pool = WorkerPool(workers, crash, LoopClock())
    held = Held(workers)
    for _ in range(workers):
        pool.submit(held, None)
    await held.all_begun.wait()
    held.let_go.set()
    await asyncio.sleep(0)
    return pool


async def test_everything_that_waits_is_begun_as_far_as_there_are_workers() -> None:
    pool = await pool_of_idle(5)
    held = Held(5)
    for _ in range(5):
        pool.submit(held, None)
    async with asyncio.timeout(10):
        await held.all_begun.wait()
    held.let_go.set()
    assert await pool.close(10) == 0


async def test_a_burst_that_waits_for_nothing_wakes_one_worker_beside_the_one_that_plays_it() -> None:
    pool = await pool_of_idle(5)
    loop, waits = asyncio.get_running_loop(), 0
    create = loop.create_future

    def create_counted() -> asyncio.Future[object]:
        nonlocal waits
        waits += 1
        return create()

    counting = pytest.MonkeyPatch()
    counting.setattr(loop, "create_future", create_counted)
    burst = Burst(100)
    for _ in range(100):
        pool.submit(burst, None)
    async with asyncio.timeout(10):
        await burst.is_over.wait()
    for _ in range(5):
        await asyncio.sleep(0)
    counting.undo()
    assert len(set(burst.players)) == 1
    # The test's own wait, and the two workers that found nothing to do at the end.
    assert waits <= 3
    assert await pool.close(10) == 0


class Once:
    """A permit whose worker can be cancelled at it, from where nobody passes the cancellation on."""

    def __init__(self) -> None:
        self.begun = asyncio.Event()
        self.worker: Worker | None = None

    async def drain(self, _token: PlacementToken | None, worker: Worker) -> None:
        self.worker = worker
        self.begun.set()
        await asyncio.Event().wait()


async def test_a_worker_that_is_cancelled_at_work_that_is_no_attempt_is_told_of_and_replaced() -> None:
    crashed: list[Worker] = []
    pool = WorkerPool(1, lambda worker, _error: crashed.append(worker), LoopClock())
    work, next_work = Once(), Once()
    pool.submit(work, None)
    await work.begun.wait()
    pool.submit(next_work, None)
    assert work.worker is not None
    work.worker.task.cancel()
    async with asyncio.timeout(10):
        await next_work.begun.wait()
    assert crashed == [work.worker]
    assert await pool.close(10) == 0


async def test_a_worker_that_is_cancelled_on_its_way_leaves_its_slot_to_another() -> None:
    pool = await pool_of_idle(2)
    work = Once()
    before = asyncio.all_tasks()
    pool.submit(work, None)
    for task in before - {asyncio.current_task()}:
        task.cancel()
    async with asyncio.timeout(10):
        await work.begun.wait()
    assert await pool.close(10) == 0


async def test_who_waits_for_a_turn_goes_on_in_one_of_few_turns_although_others_take_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first that was woken takes all of a turn: the clock goes on by more than a turn with each look at it."""
    monkeypatch.setattr(workers, "_TURN_SECONDS", 1.0)
    clock = FakeClock()
    turn, order = LoopTurn(clock), list[int]()

    async def wait(number: int) -> None:
        await turn.next()
        order.append(number)
        clock.now += 2.0

    waiting = [asyncio.create_task(wait(number)) for number in range(20)]
    await asyncio.sleep(0)
    waiting[3].cancel()
    turns = 0
    while len(order) < 19:
        await asyncio.sleep(0)
        turns += 1
    assert sorted(order) == [number for number in range(20) if number != 3]
    assert turns < 60
