"""CollectResults and its kin over a real channel: large sets, broken streams, servers that stop."""

from __future__ import annotations

import asyncio
import math

import grpc
import msgspec
import pytest

from py_scheduler.api.boundary import CallRefusedError
from py_scheduler.client import BlockingSchedulerClient, SchedulerClient, connection
from py_scheduler.client.connection import Backoff
from py_scheduler.domain.collecting import CollectReply, CollectRequest, TaskResult, UnfinishedTask
from py_scheduler.domain.requests import Delivery, SubmissionSelector
from py_scheduler.domain.results import TaskState
from py_scheduler.domain.runners.runner import RunnerState, RunnerView
from py_scheduler.errors import InvalidArgumentError, ServerError
from tests.contract.conftest import Served, serve
from tests.support.servers.fake_engine import FakeEngine, FakeResults
from tests.support.servers.grpc_calls import tasks


def result(number: int, *payloads: bytes) -> TaskResult:
    return TaskResult(
        task_id=f"s-{number}",
        client_key=f"key {number}",
        state=TaskState.PARTIAL,
        succeeded_samples=1,
        planned_samples=2,
        message="1/2 runs completed successfully. why",
        metrics={"reward": 0.5},
        payloads=payloads,
    )


REPLY = CollectReply(
    submission_id="s",
    results=(result(0, b"first", b"second"), result(1, b"third")),
    unfinished=(
        UnfinishedTask(
            task_id="s-2", client_key="", succeeded_samples=0, planned_samples=2, is_stopped=True, reason="too long"
        ),
    ),
    is_timed_out=True,
    warnings=("min_num is 9",),
)
RUNNER = RunnerView(
    runner_id="workflow-3",
    kind="process",
    state=RunnerState.BUSY,
    evaluator_id="workflow",
    pid=4_711,
    submission_id="s",
    task_id="s-0",
    sample_no=2,
    attempt_no=1,
    running_seconds=1.5,
    keys={"workflow_id": "7/0/2"},
)


async def test_a_set_arrives_whole_and_is_acknowledged(client: SchedulerClient, served: Served) -> None:
    served.engine.results.collected = REPLY
    reply = await client.collect(
        7, min_num=2, max_num=5, timeout_seconds=10, clear_unfinished=False, include_partial=True
    )
    assert reply == REPLY
    (asked,) = served.engine.results.collects
    assert (asked.batch_id, asked.min_num, asked.max_num) == (7, 2, 5)
    assert (asked.clear_unfinished, asked.include_partial, asked.with_payloads) == (False, True, True)
    assert 9 < asked.timeout_seconds <= 10
    assert served.engine.results.acknowledged == [("default", asked.request_id)]


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_a_reply_without_results_is_acknowledged_if_the_call_has_stopped_something(
    client: SchedulerClient, served: Served, *, is_stopped: bool
) -> None:
    """The server keeps what it stopped until then; otherwise there is nothing to be kept."""
    (task,) = REPLY.unfinished
    served.engine.results.collected = CollectReply(
        submission_id="s", unfinished=(msgspec.structs.replace(task, is_stopped=is_stopped),)
    )
    await client.collect(7, request_id="r")
    assert served.engine.results.acknowledged == ([("default", "r")] if is_stopped else [])


async def test_what_is_not_to_be_acknowledged_is_not(client: SchedulerClient, served: Served) -> None:
    served.engine.results.collected = REPLY
    await client.collect(submission_id="s", request_id="r", acknowledge=False)
    assert served.engine.results.acknowledged == []
    await client.ack_results("r")
    assert served.engine.results.acknowledged == [("default", "r")]


async def test_a_set_that_is_larger_than_any_message_arrives(served: Served) -> None:
    payloads = [bytes([number]) * 700_000 for number in range(20)]
    served.engine.results.collected = CollectReply(submission_id="s", results=(result(0, *payloads),))
    async with SchedulerClient(served.address, max_message_bytes=2 << 20) as client:
        assert (await client.collect(7)).payloads == payloads


async def test_a_server_that_stops_is_asked_again_with_the_same_request_id(served: Served) -> None:
    served.engine.results.may_answer.clear()
    async with SchedulerClient(served.address) as client:
        waiting = asyncio.create_task(client.collect(7, timeout_seconds=100))
        await served.engine.until(lambda: bool(served.engine.results.collects))
        await served.server.stop()
        second = FakeEngine()
        second.results.collected = REPLY
        restarted = await serve(second, listen=served.address)
        assert await waiting == REPLY
        assert [asked.request_id for asked in second.results.collects] == [served.engine.results.collects[0].request_id]
        assert second.results.acknowledged == [("default", second.results.collects[0].request_id)]
        await restarted.server.stop()


async def test_each_break_of_a_long_wait_is_waited_for_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """A server breaks one collect off three times, each time when the break before is long over."""
    connected = asyncio.Event()

    class HoursApart(Backoff):
        def connected(self) -> None:
            super().connected()
            connected.set()

        async def wait(self, until: float = math.inf) -> bool:
            if self._broken_since is not None:
                self._broken_since -= 3_600
            return await super().wait(until)

    class BreakingResults(FakeResults):
        async def collect(self, request: CollectRequest) -> CollectReply:
            reply = await super().collect(request)
            if len(self.collects) > 3:
                return reply
            self.may_answer.clear()
            raise CallRefusedError(grpc.StatusCode.UNAVAILABLE, "broken off")

    monkeypatch.setattr(connection, "Backoff", HoursApart)
    engine = FakeEngine()
    engine.results = BreakingResults(engine)
    engine.results.collected = REPLY
    engine.results.may_answer.clear()
    served = await serve(engine)
    async with SchedulerClient(served.address, reconnect_seconds=30.0) as client, asyncio.timeout(10):
        waiting = asyncio.create_task(client.collect(7))
        for _ in range(4):
            await connected.wait()
            connected.clear()
            engine.results.may_answer.set()
        assert await waiting == REPLY
    assert len({asked.request_id for asked in engine.results.collects}) == 1
    await served.server.stop()


async def test_a_client_that_has_no_patience_is_told_that_the_server_stops(served: Served) -> None:
    served.engine.results.may_answer.clear()
    async with SchedulerClient(served.address, reconnect_seconds=0.0) as client:
        waiting = asyncio.create_task(client.collect(7))
        await served.engine.until(lambda: bool(served.engine.results.collects))
        await served.server.stop()
        with pytest.raises(ServerError, match="the server is stopping: collect again"):
            await waiting


async def test_the_calls_by_the_seeds_names(client: SchedulerClient, served: Served) -> None:
    served.engine.results.collected = REPLY
    submission = await client.schedule(tasks(2), 7)
    assert submission is not None
    assert served.engine.submits[0].delivery is Delivery.COLLECT
    assert await client.schedule([], 7) is None
    assert len(served.engine.submits) == 1
    assert await client.get_payload_results(7, 2, 5.0, False, True) == (
        list(REPLY.results),
        [b"first", b"second", b"third"],
    )
    assert await client.get_statuses(7) == list(REPLY.results)
    assert [asked.with_payloads for asked in served.engine.results.collects] == [True, False]
    assert await client.drain_batch_payload_results(7) == (list(REPLY.results), REPLY.payloads)
    await client.discard_completed_results(7)
    assert served.engine.results.discarded == [SubmissionSelector(batch_id=7)]
    await client.abort_batch(7, return_partial_tasks=True)
    (abort,) = served.engine.aborts
    assert (abort.keep_partial, abort.restart_runners, abort.wait) == (True, True, True)
    assert not await client.has_step(7)


async def test_runners_are_listed_and_printed(
    client: SchedulerClient, served: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    idle = RunnerView(runner_id="workflow-4", kind="process", state=RunnerState.IDLE)
    served.engine.runners = [RUNNER, idle]
    assert await client.list_runners() == (RUNNER, idle)
    assert (await client.get_runner_state("workflow-3"))["workflow_id"] == "7/0/2"
    assert await client.get_runner_state("nobody") == {}
    assert await client.get_key_state("workflow_id") == {"workflow-3": "7/0/2"}
    await client.print_all_state()
    header, line, busy, free = capsys.readouterr().out.splitlines()
    assert header.split(" | ")[0].strip() == "runner_id"
    assert set(line) <= {"-", "+"}
    columns = [cell.strip() for cell in header.split(" | ")]
    assert [cell.strip() for cell in busy.split(" | ")][columns.index("workflow_id")] == "7/0/2"
    assert [cell.strip() for cell in free.split(" | ")][columns.index("state")] == "idle"
    assert header.index("state") == busy.index("busy") == free.index("idle")


async def test_a_fault_of_a_request_is_told_before_it_is_sent(client: SchedulerClient, served: Served) -> None:
    with pytest.raises(InvalidArgumentError, match="max_num"):
        await client.collect(7, min_num=3, max_num=2)
    with pytest.raises(InvalidArgumentError, match="exactly one"):
        await client.collect(7, submission_id="s")
    with pytest.raises(InvalidArgumentError, match="timeout_seconds"):
        await client.collect(7, timeout_seconds=float("nan"))
    assert served.engine.results.collects == []


async def test_the_blocking_twin_has_them_too(served: Served) -> None:
    served.engine.results.collected = REPLY
    served.engine.runners = [RUNNER]

    def trainer() -> tuple[object, ...]:
        with BlockingSchedulerClient(served.address) as client:
            client.schedule(tasks(1), 7)
            return (
                client.get_payload_results(7, min_num=1),
                client.get_statuses(7),
                client.has_step(7),
                client.get_all_state()["workflow-3"]["state"],
            )

    results, statuses, has_step, state = await asyncio.to_thread(trainer)
    assert results == (list(REPLY.results), REPLY.payloads)
    assert (statuses, has_step, state) == (list(REPLY.results), False, "busy")
