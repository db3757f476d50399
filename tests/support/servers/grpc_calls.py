"""What the contract tests of the scheduler service share."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

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
