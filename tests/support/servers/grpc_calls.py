"""What the contract tests of the scheduler service share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.domain.task import Task, TaskConfig

if TYPE_CHECKING:
    from collections.abc import Awaitable

CONFIG = TaskConfig(task_type="agent")
WATCH = "/rollout_scheduler.v1.SchedulerService/WatchEvents"


def tasks(count: int) -> list[Task]:
    return [Task(config=CONFIG, prompt=f"prompt {number}") for number in range(count)]


async def failure_of(call: Awaitable[Any]) -> tuple[grpc.StatusCode, status_pb2.Status]:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    details = dict(caught.value.trailing_metadata() or ())["grpc-status-details-bin"]
    return caught.value.code(), status_pb2.Status.FromString(details)


def violations_of(status: status_pb2.Status) -> dict[str, str]:
    bad = error_details_pb2.BadRequest()
    for detail in status.details:
        if detail.Is(bad.DESCRIPTOR):
            detail.Unpack(bad)
    return {violation.field: violation.description for violation in bad.field_violations}


def submit_raw(address: str, raw: bytes) -> bytes:
    """SubmitTasks of a message of any size. Blocks: in a thread it takes nothing of the loop's time."""
    options = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]
    with grpc.insecure_channel(address, options=options) as channel:
        call: Any = channel.unary_unary(
            f"/{service.DESCRIPTOR.services_by_name['SchedulerService'].full_name}/SubmitTasks"
        )
        reply: bytes = call(raw, timeout=60)
        return reply
