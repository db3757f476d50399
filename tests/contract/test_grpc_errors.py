"""Errors over a real channel: what is refused, how it is named, and what is kept to the server."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

import grpc
import grpc.aio
import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.task import Task
from py_scheduler.errors import (
    AlreadyExistsError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SchedulerError,
    ServerError,
    UnplaceableError,
)
from tests.contract.conftest import serve
from tests.support.servers.fake_engine import FakeEngine
from tests.support.servers.grpc_calls import CONFIG, WATCH, failure_of, tasks, violations_of

if TYPE_CHECKING:
    from py_scheduler._generated.rollout_scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
    from tests.contract.conftest import Served


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (UnplaceableError("spec 'a' needs 24 tokens"), grpc.StatusCode.FAILED_PRECONDITION),
        (AlreadyExistsError("taken"), grpc.StatusCode.ALREADY_EXISTS),
        (NotFoundError("gone"), grpc.StatusCode.NOT_FOUND),
        (ResourceExhaustedError("full", 1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (FailedPreconditionError("stopping"), grpc.StatusCode.FAILED_PRECONDITION),
        (InvalidArgumentError("is wrong", "tasks[0].prompt"), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_errors_of_the_tree_arrive_as_themselves(
    served: Served, client: SchedulerClient, stub: SchedulerServiceStub, error: SchedulerError, code: grpc.StatusCode
) -> None:
    served.engine.fail_with = error
    with pytest.raises(type(error)) as caught:
        await client.submit(tasks(1), 7)
    assert str(caught.value) == str(error)
    assert vars(caught.value) == vars(error)
    status_code, _ = await failure_of(stub.GetSubmission(service.GetSubmissionRequest(submission_id="s")))
    assert status_code is code


async def test_an_unexpected_exception_keeps_its_text_to_the_servers_log(
    served: Served, stub: SchedulerServiceStub, caplog: pytest.LogCaptureFixture
) -> None:
    served.engine.fail_with = KeyError("/secret/path")
    with caplog.at_level(logging.ERROR):
        code, status = await failure_of(stub.GetServerInfo(service.GetServerInfoRequest()))
    assert code is grpc.StatusCode.INTERNAL
    assert b"secret" not in status.SerializeToString()
    correlation_id = status.message.rpartition(" ")[2]
    (record,) = [record for record in caplog.records if correlation_id in record.getMessage()]
    assert record.exc_info is not None
    assert "/secret/path" in str(record.exc_info[1])


@pytest.mark.parametrize("method", ["GetServerInfo", "WatchEvents"])
async def test_a_handler_that_raises_cancelled_error_answers_at_once(
    served: Served, client: SchedulerClient, method: str
) -> None:
    served.engine.fail_with = asyncio.CancelledError()
    call = client.server_info() if method == "GetServerInfo" else anext(client.watch())
    with pytest.raises(ServerError) as caught:
        await asyncio.wait_for(call, 5)
    assert caught.value.code == "INTERNAL"


async def test_every_fault_of_a_request_is_named_at_once(stub: SchedulerServiceStub) -> None:
    request = service.SubmitTasksRequest(
        request_id="",
        default_config=task_pb2.TaskConfig(task_type="", repeat_times=0),
        tasks=[
            task_pb2.Task(),
            task_pb2.Task(
                config=task_pb2.TaskConfig(
                    task_type="a", sampling=task_pb2.SamplingParams(temperature=float("nan")), task_deadline_seconds=-1
                )
            ),
            task_pb2.Task(metadata_json=b"[1]"),
        ],
    )
    code, status = await failure_of(stub.SubmitTasks(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert set(violations_of(status)) == {
        "request_id",
        "batch_id",
        "default_config.task_type",
        "default_config.repeat_times",
        "tasks[1].config.sampling.temperature",
        "tasks[1].config.task_deadline_seconds",
        "tasks[2].metadata_json",
    }


async def test_faults_of_a_later_call_are_numbered_as_the_caller_counts(client: SchedulerClient) -> None:
    many = tasks(1_500)
    many[1_200] = Task(config=CONFIG, client_key="a\nb")
    with pytest.raises(InvalidArgumentError) as caught:
        await client.submit(many, 7)
    assert [violation.field for violation in caught.value.violations] == ["tasks[1200].client_key"]


async def test_ten_thousand_faults_fit_into_the_metadata_of_any_client(stub: SchedulerServiceStub) -> None:
    request = service.SubmitTasksRequest(
        request_id="r",
        batch_id=task_pb2.BatchId(step=1),
        tasks=[task_pb2.Task(client_key="é\n" * 2_000) for _ in range(10_000)],
    )
    code, status = await failure_of(stub.SubmitTasks(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert len(status.SerializeToString()) < 6_000
    assert any(text == "and more" for text in violations_of(status).values())


@pytest.mark.parametrize(
    ("request_bytes", "field"),
    [
        (b"\x0a\x02\xff\xfe", "request_id"),
        (b"\x2a\x04\x12\x02\xff\xfe", "tasks[0].prompt"),
        (b"\x2a\x00\x2a\x06\x0a\x04\x0a\x02\xff\xfe", "tasks[1].config.task_type"),
        (b"\x0a\x7f", ""),
        (b"\xff\xff\xff", ""),
    ],
)
async def test_malformed_messages_are_invalid_arguments_that_name_the_field(
    channel: grpc.aio.Channel, request_bytes: bytes, field: str
) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/rollout_scheduler.v1.SchedulerService/SubmitTasks"
    )
    code, status = await failure_of(call(request_bytes))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert list(violations_of(status)) == [field]


async def test_malformed_messages_are_refused_by_every_method(channel: grpc.aio.Channel) -> None:
    watch: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(WATCH)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await watch(b"\x12\x7f").read()
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    check: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary("/grpc.health.v1.Health/Check")
    code, _ = await failure_of(check(b"\x0a\x02\xff\xfe"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_an_unknown_method_is_unimplemented(channel: grpc.aio.Channel) -> None:
    call: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(
        "/rollout_scheduler.v1.SchedulerService/Nothing"
    )
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


async def test_an_oversized_message_is_resource_exhausted_and_names_the_limit() -> None:
    served = await serve(FakeEngine(), max_message_bytes=100_000)
    try:
        async with SchedulerClient.connect(served.address, reconnect_seconds=0.0) as client:
            with pytest.raises(ResourceExhaustedError, match=r"max_message_bytes.*100000"):
                await client.submit([Task(config=CONFIG, data=bytes(200_000))], 7)
        async with SchedulerClient.connect(served.address, max_message_bytes=1_000) as client:
            with pytest.raises(ResourceExhaustedError, match=r"max_message_bytes.*1000"):
                await client.submit([Task(config=CONFIG, data=bytes(2_000))], 7)
    finally:
        await served.server.stop()


async def test_too_many_tasks_in_a_call(stub: SchedulerServiceStub) -> None:
    served = await serve(FakeEngine(), max_tasks_per_call=10)
    try:
        async with SchedulerClient.connect(served.address, reconnect_seconds=0.0) as client:
            with pytest.raises(InvalidArgumentError, match="tasks: holds 11, must hold at least 1 and at most 10"):
                await client.submit(tasks(11), 7)
    finally:
        await served.server.stop()


async def test_an_empty_list_and_a_client_that_is_not_open(client: SchedulerClient) -> None:
    with pytest.raises(InvalidArgumentError, match="nothing to submit"):
        await client.submit([], 7)
    with pytest.raises(FailedPreconditionError, match="not open"):
        await SchedulerClient().server_info()
    with pytest.raises(InvalidArgumentError, match="exactly one"):
        await client.get_submission()


async def test_no_server_is_a_server_error_that_says_unavailable() -> None:
    async with SchedulerClient.connect("127.0.0.1:1", reconnect_seconds=0.2) as client:
        with pytest.raises(ServerError) as caught:
            await client.server_info()
    assert caught.value.code == "UNAVAILABLE"
