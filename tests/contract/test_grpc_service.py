"""The calls of the service over a real channel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.client import SchedulerClient
from py_scheduler.domain.requests import (
    EvaluatorSpecView,
    GenerationBackendView,
    NodeView,
    ServerInfo,
    SubmissionView,
    WaitingBatch,
)
from py_scheduler.domain.resources import Resource
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import (
    CursorExpiredError,
)
from tests.support.servers.grpc_calls import tasks

if TYPE_CHECKING:
    from py_scheduler._generated.rollout_scheduler.v1.scheduler_service_pb2_grpc import SchedulerServiceStub
    from tests.contract.conftest import Served


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
            GenerationBackendView(
                role="student",
                model_name="m",
                weight_version="7",
                vocab_size=49_152,
                context_length=2_048,
                streaming="increments",
            ),
            GenerationBackendView(
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
