"""How a client leaves: what it still has under way, what it aborts, and that it does so in silence."""

from __future__ import annotations

import asyncio
import gc
import socket
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import pytest

from py_scheduler.api.boundary import OutgoingStream
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.errors import FailedPreconditionError, ServerError
from tests.contract.conftest import serve
from tests.support.servers.fake_engine import FakeEngine, events_of_finish

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from py_scheduler.domain.requests import SubmitReply, SubmitRequest
    from tests.contract.conftest import Served


class GatedEngine(FakeEngine):
    """Takes in `free` submits at once; the others wait for the gate."""

    def __init__(self, free: int) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.waiting = asyncio.Event()
        self._free = free

    async def submit(self, request: SubmitRequest) -> SubmitReply:
        if len(self.submits) >= self._free:
            self.waiting.set()
            await self.gate.wait()
        return await super().submit(request)


@pytest.fixture
async def gated(request: pytest.FixtureRequest) -> AsyncIterator[Served]:
    running = await serve(GatedEngine(request.param))
    yield running
    await running.server.stop()


def tasks(count: int) -> list[Task]:
    return [Task(config=TaskConfig(task_type="agent")) for _ in range(count)]


def aborted(engine: FakeEngine) -> set[str]:
    return {task_id for abort in engine.aborts for task_id in abort.task_ids}


@pytest.mark.parametrize("gated", [1], indirect=True)
async def test_a_chunk_under_way_is_learnt_of_before_the_abort(gated: Served) -> None:
    engine = gated.engine
    assert isinstance(engine, GatedEngine)
    async with SchedulerClient(gated.address) as client, asyncio.timeout(30):
        rollout = client.rollout(tasks(2_500), batch_id=7, abort_on_exit=True)
        reading = asyncio.create_task(anext(rollout))
        await engine.waiting.wait()
        await engine.finish("s-7-0")
        await reading
        leaving = asyncio.create_task(rollout.aclose())
        await asyncio.sleep(0)
        engine.gate.set()
        await leaving
    assert aborted(engine) == {f"s-7-{number}" for number in range(1, 2_000)}
    assert len(engine.submits) == 2, "the third chunk was never sent"


@pytest.mark.parametrize("gated", [0], indirect=True)
async def test_a_rollout_that_is_cancelled_during_its_first_call(gated: Served) -> None:
    engine = gated.engine
    assert isinstance(engine, GatedEngine)
    async with SchedulerClient(gated.address) as client, asyncio.timeout(30):
        reading = asyncio.create_task(anext(client.rollout(tasks(3), batch_id=7, abort_on_exit=True)))
        await engine.waiting.wait()
        reading.cancel()
        await asyncio.sleep(0)
        engine.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await reading
    assert aborted(engine) == {"s-7-0", "s-7-1", "s-7-2"}


async def test_a_break_and_then_the_end_of_the_client_aborts_too() -> None:
    served = await serve(FakeEngine())
    async with SchedulerClient(served.address) as client, asyncio.timeout(30):
        await client.submit(tasks(1), 7)

        async def finish_one() -> None:
            await served.engine.until(lambda: len(served.engine.submits) == 2)
            await served.engine.finish("s-7-2")

        finishing = asyncio.create_task(finish_one())
        async for _event in client.rollout(tasks(3), batch_id=7, abort_on_exit=True):
            break
        await finishing
    assert aborted(served.engine) == {"s-7-1", "s-7-3"}
    await served.server.stop()


async def test_the_timeout_of_a_call_is_one_of_all_its_tries() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with SchedulerClient(f"127.0.0.1:{port}", reconnect_seconds=3_600.0) as client, asyncio.timeout(20):
        with pytest.raises(ServerError) as caught:
            await client.abort(7, timeout_seconds=0.5)
    assert caught.value.code in {"UNAVAILABLE", "DEADLINE_EXCEEDED"}


@pytest.mark.parametrize("how", ["held", "dropped", "rollout"])
def test_breaking_off_and_closing_the_client_logs_nothing(how: str, caplog: pytest.LogCaptureFixture) -> None:
    """In a loop of its own, because the end of a loop is where what was left over shows."""
    unhandled: list[dict[str, Any]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, context: unhandled.append(context))
        served = await serve(FakeEngine())
        await served.engine.happen(*events_of_finish("s-0"))
        async with SchedulerClient(served.address) as client:
            if how == "rollout":
                frames: Any = client.rollout_batches(tasks(3), batch_id=7, abort_on_exit=True)
                reading = asyncio.create_task(anext(frames))
                await served.engine.until(lambda: bool(served.engine.submits))
                await served.engine.finish("s-7-1")
                await reading
            else:
                frames = client.watch()
                async for _frame in frames:
                    break
            if how == "dropped":
                del frames
        await served.server.stop()

    asyncio.run(main())
    gc.collect()
    assert not unhandled
    assert not [record for record in caplog.records if record.name == "asyncio" and "took" not in record.getMessage()]


async def test_reading_on_from_a_closed_client_says_so() -> None:
    served = await serve(FakeEngine())
    async with SchedulerClient(served.address) as client:
        frames = client.watch()
        await anext(frames)
        reading = asyncio.create_task(anext(frames))
        await asyncio.sleep(0)
    with pytest.raises(FailedPreconditionError, match="client was closed"):
        await reading
    await served.server.stop()


async def test_a_watch_that_was_left_is_freed_without_the_collector(served: Served) -> None:
    """It holds its last frame, up to a mebibyte of events; the collector's full runs are far apart in a server."""

    def is_held() -> bool:
        return any(isinstance(thing, OutgoingStream) for thing in gc.get_objects())

    await served.engine.happen(*events_of_finish("s-0"))
    gc.collect()
    gc.disable()
    try:
        async with SchedulerClient(served.address) as client, asyncio.timeout(30):
            for _ in range(5):
                async with aclosing(client.watch()) as frames:
                    await anext(frames)
                    assert is_held()
            while is_held():  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
    finally:
        gc.enable()
