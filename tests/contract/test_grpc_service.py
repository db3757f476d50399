"""The service over a real channel: each call, each error, health, reflection, binding."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING
from unittest.mock import Mock

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.api import boundary
from py_scheduler.api.server import (
    GENERATION_SERVICE,
    PLACEMENT_SERVICE,
    ROLLOUT_SERVICE,
    SCHEDULER_SERVICE,
    ApiServer,
)
from py_scheduler.client import SchedulerClient
from py_scheduler.config import ServerSettings
from py_scheduler.domain.requests import (
    EvaluatorSpecView,
    GenerationEngineView,
    NodeView,
    ServerInfo,
    SubmissionView,
    WaitingBatch,
)
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import SubmissionKey, Task
from py_scheduler.errors import (
    AlreadyExistsError,
    ConfigError,
    CursorExpiredError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    SchedulerError,
    ServerError,
    UnplaceableError,
)
from tests.contract.conftest import serve
from tests.support.fake_engine import FakeEngine
from tests.support.grpc_calls import CONFIG, WATCH, failure_of, tasks, violations_of

if TYPE_CHECKING:
    from py_scheduler._generated.rollout_scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
    from tests.contract.conftest import Served


# Calls


async def test_submit_reaches_the_engine_as_domain_values(served: Served, client: SchedulerClient) -> None:
    submission = await client.submit(tasks(3), 7, request_id="r")
    assert submission.task_ids == ("s-7-0", "s-7-1", "s-7-2")
    (request,) = served.engine.submits
    assert request.request_id == "r"
    assert request.key == SubmissionKey(7)
    assert list(request.tasks) == tasks(3)


async def test_a_long_list_is_sent_in_several_calls_under_derived_request_ids(
    served: Served, client: SchedulerClient
) -> None:
    many = tasks(2_500)
    first = await client.submit(many, "7/gsm8k", request_id="r")
    again = await client.submit(many, "7/gsm8k", request_id="r")
    assert first == again
    assert len(set(first.task_ids)) == 2_500
    assert [request.request_id for request in served.engine.submits] == ["r", "r/1", "r/2"] * 2
    assert [task for request in served.engine.submits[:3] for task in request.tasks] == many


async def test_abort_and_get_by_batch_id_and_by_submission_id(served: Served, client: SchedulerClient) -> None:
    served.engine.view = SubmissionView(
        submission_id="s-7",
        key=SubmissionKey("7/gsm8k"),
        queued_attempts=1,
        leased_attempts=2,
        running_attempts=3,
        open_tasks=4,
        succeeded_tasks=5,
        partial_tasks=6,
        failed_tasks=7,
        aborted_tasks=8,
        waiting=(WaitingBatch(task_ids=("a",), reason="gpu is short", waiting_seconds=1.5, bypassed=3),),
    )
    assert await client.get_submission("7/gsm8k") == served.engine.view
    assert await client.get_submission(submission_id="s-7") == served.engine.view
    reply = await client.abort(7, task_ids=["a", "b"], reason="enough")
    assert (reply.aborted_tasks, reply.still_stopping) == (2, ())
    (abort,) = served.engine.aborts
    assert (abort.selector.batch_id, abort.task_ids, abort.reason, abort.wait) == (7, ("a", "b"), "enough", True)


async def test_an_abort_that_waits_is_answered_shortly_before_its_deadline(
    served: Served, client: SchedulerClient
) -> None:
    served.engine.still_stopping = ("s-7-0",)
    reply = await client.abort(7, timeout_seconds=1.0)
    assert reply.still_stopping == ("s-7-0",)
    timeout = served.engine.aborts[0].timeout_seconds
    assert timeout is not None
    assert 0.3 < timeout < 0.8


async def test_an_abort_without_a_deadline_waits_as_long_as_it_takes(
    served: Served, stub: SchedulerServiceStub
) -> None:
    await stub.AbortSubmission(service.AbortSubmissionRequest(submission_id="s-7", wait=True))
    assert served.engine.aborts[0].timeout_seconds is None


async def test_server_info(served: Served, client: SchedulerClient) -> None:
    served.engine.info = ServerInfo(
        version="",
        evaluators=(
            EvaluatorSpecView(
                evaluator_id="agent",
                handler="a:B",
                resource=Resource(gpu=4, cpu=8, memory_gb=16, concurrency=8),
                sample_resource=Resource(gpu=0.5),
                batch_size=None,
            ),
        ),
        engines=(
            GenerationEngineView(
                role="student", model_name="m", weight_version="7", vocab_size=49_152, context_length=2_048
            ),
            GenerationEngineView(
                role="teacher", model_name="", weight_version="", vocab_size=0, context_length=0, error="is away"
            ),
        ),
        nodes=(
            NodeView(
                node_ip="10.0.0.1",
                gpu_ids=(0, 1),
                cpu=8.0,
                memory_gb=32.0,
                free_gpus=(0.5, 1.0),
                free_cpu=7.0,
                free_memory_gb=31.0,
            ),
        ),
    )
    info = await client.server_info()
    assert info.version == "1.2.3"
    assert (info.evaluators, info.engines, info.nodes) == (
        served.engine.info.evaluators,
        served.engine.info.engines,
        served.engine.info.nodes,
    )


async def test_a_cursor_of_another_store_is_told_the_oldest_event(served: Served, client: SchedulerClient) -> None:
    cursor = (await client.submit(tasks(1), 7)).cursor
    served.engine.store_epoch = bytes(16)
    served.engine.oldest_sequence = 5
    with pytest.raises(CursorExpiredError) as caught:
        await anext(client.watch(submission_id="s-7", cursor=cursor))
    assert caught.value.oldest_sequence == 5


# Errors


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


# Health, reflection, binding


async def test_health_per_service(served: Served, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    for name in ("", SCHEDULER_SERVICE):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stub.Check(health_pb2.HealthCheckRequest(service="nothing"))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    watches = [stub.Watch(health_pb2.HealthCheckRequest(service="")) for _ in range(2)]
    for watch in watches:
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
    watches.pop().cancel()
    served.server.stop_serving()
    assert (await watches[0].read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
    reply = await stub.Check(health_pb2.HealthCheckRequest(service=SCHEDULER_SERVICE))
    assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_each_service_says_whether_what_it_needs_is_there(served: Served, channel: grpc.aio.Channel) -> None:
    """The server as a whole serves meanwhile; who watches is told of each change."""
    stub, states = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckResponse
    assert served.server._health._look_seconds == 1.0
    served.server._health._look_seconds = 0.01
    for name, need in ((PLACEMENT_SERVICE, "can_lease"), (GENERATION_SERVICE, "can_generate")):
        watch = stub.Watch(health_pb2.HealthCheckRequest(service=name))
        for is_there in (True, False, True):
            setattr(served.engine, need, is_there)
            expected = states.SERVING if is_there else states.NOT_SERVING
            assert (await watch.read()).status == expected
            assert (await stub.Check(health_pb2.HealthCheckRequest(service=name))).status == expected
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == states.SERVING
        watch.cancel()
    served.server._health._look_seconds = 60.0
    looks = Mock(return_value=True)
    served.server._health._services[GENERATION_SERVICE] = looks
    for _ in range(20):
        await stub.Check(health_pb2.HealthCheckRequest(service=GENERATION_SERVICE))
    assert looks.call_count <= 1, "who needs no token keeps nobody busy with it"
    check = await stub.Check(health_pb2.HealthCheckRequest(service=ROLLOUT_SERVICE))
    assert check.status == states.NOT_SERVING, "this server executes no steps"


async def test_health_tells_of_a_journal_that_has_failed(served: Served, channel: grpc.aio.Channel) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    served.engine.can_record = False
    for name in ("", SCHEDULER_SERVICE):
        reply = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert reply.status == health_pb2.HealthCheckResponse.NOT_SERVING


async def test_who_watches_health_without_a_token_takes_no_stream_from_who_has_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(boundary, "_MAX_STREAMS_FOR_ALL", 2)
    served = await serve(FakeEngine(), max_streams=2)
    async with grpc.aio.insecure_channel(served.address) as channel, SchedulerClient(served.address) as client:
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.Watch(health_pb2.HealthCheckRequest()).read()
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await anext(client.watch())
    await served.server.stop()


async def test_reflection_lists_the_services(channel: grpc.aio.Channel) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
    reply = await call.read()
    assert SCHEDULER_SERVICE in [entry.name for entry in reply.list_services_response.service]


async def test_a_port_in_use_is_refused(served: Served) -> None:
    second = ApiServer(FakeEngine(), "1", ServerSettings(listen=served.address))
    with pytest.raises(ConfigError, match=r"server\.listen: cannot listen on"):
        second.bind()
    await second.stop()


async def test_a_unix_socket(tmp_path_factory: pytest.TempPathFactory) -> None:
    served = await serve(FakeEngine(), listen=f"unix:{tmp_path_factory.mktemp('s')}/s")
    async with SchedulerClient.connect(served.address) as client:
        assert (await client.server_info()).version == "1.2.3"
    await served.server.stop()


@pytest.mark.slow
async def test_a_client_that_pings_too_often_is_not_cut_off(served: Served) -> None:
    options = [
        ("grpc.keepalive_time_ms", 1_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    ]
    async with grpc.aio.insecure_channel(served.address, options=options) as channel:
        call: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(WATCH)
        watch = call(b"")
        await watch.read()
        # Pings are the transport's own: only time shows whether the server holds them against the client. gRPC pings
        # once a second at most, and a server with its defaults ends the connection at the third.
        await asyncio.sleep(4.0)
        await served.engine.finish("s-1-0")
        assert await watch.read()
        watch.cancel()
