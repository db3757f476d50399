"""RolloutService over a real channel: one step to one request, whoever asks; streams that go on from a cursor."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import msgspec
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2_grpc
from py_scheduler.api.server import ApiServer
from py_scheduler.app import Parts, build, running
from py_scheduler.client import BlockingSchedulerClient, SchedulerClient
from py_scheduler.config import ServerSettings, parse_config
from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import SubmissionSelector, WatchedFrame
from py_scheduler.domain.training.steps import StepKind, StepReport, StepRequest
from py_scheduler.errors import (
    AlreadyExistsError,
    CursorExpiredError,
    CursorMismatchError,
    FailedPreconditionError,
    InvalidArgumentError,
    ServerError,
)
from tests.contract.conftest import serve
from tests.support.agents.step_handlers import Held
from tests.support.servers.fake_engine import FakeEngine
from tests.support.servers.grpc_calls import failure_of, violations_of
from tests.support.steps.rows import write_lines
from tests.support.waiting import eventually

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator

ROOT = Path(__file__).parents[2]
CONFIG = """
[server]
listen = "127.0.0.1:0"
[[evaluator]]
evaluator_id = "agent"
handler = "tests.support.agents.step_handlers:Held"
resource = { concurrency = 64 }
[rollout]
groups_per_step = 3
retained_reports = 2
[[dataset]]
name = "train"
path = "rows.jsonl"
task_type = "agent"
repeat_times = 2
[[eval_dataset]]
name = "test"
path = "rows.jsonl"
limit = 2
task_type = "agent"
"""


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    """A whole server whose handlers wait for the gate, with four rows to roll out."""
    Held.close_gate()
    rows = [{"prompt": f"row {number}"} for number in range(4)]
    write_lines(tmp_path / "rows.jsonl", rows)
    built = build(parse_config(CONFIG), tmp_path)
    async with running(built):
        yield built
        Held.gate.set()
        built.step_service.stop()
        await built.api.stop()


@pytest.fixture
async def address(parts: Parts) -> str:
    bound = parts.api.bind()
    await parts.api.start()
    return bound


def rollout(rollout_id: int = 0, request_id: str = "a", **more: object) -> StepRequest:
    return StepRequest(kind=StepKind.ROLLOUT, rollout_id=rollout_id, request_id=request_id, **more)  # type: ignore[arg-type]


class Followed:
    """What a follower saw: frames that join, and the report."""

    def __init__(self) -> None:
        self.frames: list[WatchedFrame] = []
        self.report: StepReport | None = None

    async def read(self, frames: AsyncGenerator[WatchedFrame | StepReport, None], until_samples: int = 1 << 30) -> None:
        async for frame in frames:
            if isinstance(frame, StepReport):
                self.report = frame
                return
            if self.frames:
                assert frame.after_sequence == self.frames[-1].through_sequence, "a gap or a repetition"
            self.frames.append(frame)
            if len(self.samples) >= until_samples:
                return

    @property
    def sequences(self) -> list[int]:
        return [record.sequence for frame in self.frames for record in frame.records]

    @property
    def samples(self) -> list[tuple[str, int]]:
        events = [record.event for frame in self.frames for record in frame.records]
        return [(s.task_id, s.sample_no) for e in events if isinstance(e, AttemptEnded) for s in e.samples]

    @property
    def done(self) -> list[str]:
        events = [record.event for frame in self.frames for record in frame.records]
        return [event.task_id for event in events if isinstance(event, TaskDone)]


async def followed(client: SchedulerClient, request: StepRequest, cursor: bytes = b"") -> Followed:
    seen = Followed()
    await seen.read(client.step_frames(request, cursor))
    return seen


async def test_one_request_is_one_step_while_it_runs_and_after(client: SchedulerClient) -> None:
    first = asyncio.create_task(followed(client, rollout()))
    await Held.entered.wait()
    joined = Followed()
    frames = client.step_frames(rollout())
    await joined.read(frames, until_samples=3)
    Held.gate.set()
    await joined.read(frames)
    one, again = await first, await followed(client, rollout())
    assert one.report is not None
    assert one.report == joined.report == again.report
    assert sorted(one.done) == sorted(one.report.task_ids)
    assert len(set(one.samples)) == len(one.samples) == 6
    assert one.sequences == joined.sequences == again.sequences


async def test_a_follower_that_went_away_goes_on_from_its_cursor(parts: Parts, client: SchedulerClient) -> None:
    seen = Followed()
    frames = client.step_frames(rollout())
    await seen.read(frames, until_samples=3)
    await frames.aclose()
    Held.gate.set()
    cursor = seen.frames[-1].cursor
    await seen.read(client.step_frames(rollout(), cursor))
    whole = await followed(client, rollout())
    assert seen.report == whole.report
    assert seen.sequences == whole.sequences
    # What is over can be followed from its end too.
    rest = await followed(client, rollout(), seen.frames[-1].cursor)
    assert (rest.report, rest.sequences) == (whole.report, [])


async def test_a_client_that_is_killed_leaves_the_step_running(address: str, client: SchedulerClient) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "tests/support/servers/step_follower.py"),
        address,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert process.stdout is not None
    sequences: list[int] = []
    cursor = b""
    while len(sequences) < 10:
        told = msgspec.json.decode(await process.stdout.readline())
        sequences += told["sequences"]
        cursor = bytes.fromhex(told["cursor"])
    process.send_signal(signal.SIGKILL)
    await process.communicate()
    Held.gate.set()
    rest = await followed(client, rollout(), cursor)
    whole = await followed(client, rollout())
    assert rest.report is not None
    assert rest.report == whole.report
    assert sequences + rest.sequences == whole.sequences


async def test_a_broken_connection_is_resumed_without_gap_or_repetition(parts: Parts) -> None:
    api = ApiServer(parts.scheduler, "1", ServerSettings(listen="127.0.0.1:0"), parts.step_service)
    address = api.bind()
    await api.start()
    seen = Followed()
    async with SchedulerClient(address) as client:
        frames = client.step_frames(rollout())
        await seen.read(frames, until_samples=3)
        await api.stop()
        api = ApiServer(parts.scheduler, "1", ServerSettings(listen=address), parts.step_service)
        api.bind()
        await api.start()
        Held.gate.set()
        await seen.read(frames)
        whole = await followed(client, rollout())
    await api.stop()
    assert seen.report == whole.report
    assert seen.sequences == whole.sequences


async def test_a_step_may_be_cancelled_with_its_last_follower(parts: Parts, client: SchedulerClient) -> None:
    request = rollout(cancel_on_disconnect=True)
    leaving, staying = client.step_frames(request), client.step_frames(rollout())
    seen = Followed()
    await seen.read(leaving, until_samples=3)
    await anext(staying)
    await leaving.aclose()
    assert Held.inside == 3, "somebody still follows"
    last = client.step_frames(request)
    await anext(last)
    (step,) = parts.step_service._steps.values()
    await staying.aclose()
    await eventually(lambda: step.followers == 1)  # The server hears of two that leave in whatever order.
    assert Held.inside == 3, "who left did not ask for it"
    await last.aclose()
    async with asyncio.timeout(5):
        await step.over.wait()
    assert Held.inside == 0
    assert parts.scheduler.submission(SubmissionSelector(batch_id=0)).open_tasks == 0
    # It may be executed again, and has the same tasks.
    Held.gate.set()
    again = await followed(client, request)
    assert again.report is not None
    assert again.report.training_samples == 6
    assert len(again.done) == 3


async def test_another_step_under_the_same_id_and_another_step_at_the_same_time(client: SchedulerClient) -> None:
    frames = client.step_frames(rollout())
    await anext(frames)
    with pytest.raises(AlreadyExistsError, match="request_id 'a' was used for another step"):
        await followed(client, rollout(rollout_id=1))
    with pytest.raises(AlreadyExistsError):
        await followed(client, rollout(groups=5))
    with pytest.raises(FailedPreconditionError, match=r"rollout 0 is under way.*request_id 'a'"):
        await followed(client, rollout(rollout_id=1, request_id="b"))
    # An eval may run beside it.
    Held.gate.set()
    report = [event async for event in client.execute_eval(0)][-1]
    assert isinstance(report, StepReport)
    assert report.metrics == {"eval/test/accuracy": 1.0}
    await frames.aclose()


async def test_groups_and_samples_may_be_asked_for(client: SchedulerClient) -> None:
    Held.gate.set()
    *events, report = [event async for event in client.execute_rollout(0, groups=2, samples=5)]
    assert isinstance(report, StepReport)
    assert (len(report.task_ids), report.training_samples, len(events)) == (2, 10, 12)
    *events, report = [event async for event in client.execute_eval(0, samples=3)]
    assert len(events) == 2 * 2 * 3


async def test_the_newest_reports_are_kept_and_the_others_forgotten(client: SchedulerClient) -> None:
    Held.gate.set()
    first = (await followed(client, rollout(0, "a"))).report
    second = (await followed(client, rollout(1, "b"))).report
    third = (await followed(client, rollout(2, "c"))).report
    assert (await followed(client, rollout(1, "b"))).report == second
    assert (await followed(client, rollout(2, "c"))).report == third
    again = (await followed(client, rollout(0, "a"))).report
    assert first is not None
    assert again is not None
    assert again.task_ids != first.task_ids, "two are kept, so this one was executed again"


async def test_a_cursor_is_of_one_request_and_one_store(parts: Parts, client: SchedulerClient) -> None:
    Held.gate.set()
    seen = await followed(client, rollout())
    cursor = seen.frames[-1].cursor
    with pytest.raises(CursorMismatchError):
        await followed(client, rollout(request_id="b"), cursor)
    with pytest.raises(CursorMismatchError):
        await anext(client.watch(submission_id=seen.report.submission_id, cursor=cursor))  # type: ignore[union-attr]
    with pytest.raises(InvalidArgumentError, match="not a cursor"):
        await followed(client, rollout(), b"nonsense")
    parts.scheduler._journal._store_epoch = bytes(16)  # type: ignore[attr-defined]
    with pytest.raises(CursorExpiredError):
        await followed(client, rollout(), cursor)


async def test_every_faulty_field_is_named(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        faulty = service.ExecuteRolloutRequest(rollout_id=-1, groups=0, samples=-4)
        code, status = await failure_of(stub.ExecuteRollout(faulty).read())
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert violations_of(status).keys() == {"request_id", "rollout_id", "groups", "samples"}
        code, status = await failure_of(stub.ExecuteEval(service.ExecuteEvalRequest(samples=70_000)).read())
        assert violations_of(status).keys() == {"request_id", "samples"}


async def test_a_deadline_ends_the_call_and_not_the_step(address: str, client: SchedulerClient) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = rollout_service_pb2_grpc.RolloutServiceStub(channel)
        call = stub.ExecuteRollout(service.ExecuteRolloutRequest(request_id="a"), timeout=0.3)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    Held.gate.set()
    assert (await followed(client, rollout())).report is not None


async def test_a_stopping_server_ends_the_stream_and_says_to_resume(parts: Parts, client: SchedulerClient) -> None:
    frames = client.step_frames(rollout())
    seen = Followed()
    await seen.read(frames, until_samples=3)
    parts.step_service.stop()
    with pytest.raises(ServerError) as caught:
        await seen.read(frames)
    assert caught.value.code == "UNAVAILABLE"
    with pytest.raises(FailedPreconditionError, match="shutting down"):
        await followed(client, rollout(1, "b"))
    assert parts.steps.next_rollout_id == 0, "it is to be executed again"


async def test_a_server_without_a_desk() -> None:
    served = await serve(FakeEngine())
    async with SchedulerClient(served.address) as client:
        with pytest.raises(FailedPreconditionError, match="executes no steps"):
            await followed(client, rollout())
    await served.server.stop()


async def test_the_blocking_client_executes_steps(address: str) -> None:
    def execute() -> tuple[int, StepReport]:
        with BlockingSchedulerClient(address) as client:
            *events, report = client.execute_rollout(0, request_id="a")
            assert isinstance(report, StepReport)
            *_, evaluated = client.execute_eval(0)
            assert isinstance(evaluated, StepReport)
            return len(events), report

    Held.gate.set()
    count, report = await asyncio.to_thread(execute)
    assert (count, report.training_samples) == (9, 6)
