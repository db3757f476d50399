"""Runners on the wire (runner.proto)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler._generated.rollout_scheduler.v1 import runner_pb2
from py_scheduler.domain.runners.runner import RunnerView
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.wire.common.fields import RUNNER_STATES

if TYPE_CHECKING:
    from collections.abc import Iterable


def encode_runners(views: Iterable[RunnerView]) -> runner_pb2.ListRunnersResponse:
    message = runner_pb2.ListRunnersResponse()
    for view in views:
        is_at_work = view.sample_no >= 0
        message.runners.add(
            runner_id=view.runner_id,
            kind=view.kind,
            state=RUNNER_STATES.number_of[view.state],
            evaluator_id=view.evaluator_id,
            node_ip=view.node_ip,
            gpu_ids=view.gpu_ids,
            pid=view.pid,
            submission_id=view.submission_id,
            task_id=view.task_id,
            sample_no=view.sample_no if is_at_work else None,
            attempt_no=view.attempt_no if is_at_work else None,
            begun_unix_seconds=view.begun_unix_seconds,
            running_seconds=view.running_seconds,
            restarts=view.restarts,
            message=safe_text(view.message),
            keys={safe_text(key): safe_text(value) for key, value in view.keys.items()},
        )
    return message


def decode_runners(message: runner_pb2.ListRunnersResponse) -> tuple[RunnerView, ...]:
    return tuple([_decode_runner(runner) for runner in message.runners])


def _decode_runner(message: runner_pb2.Runner) -> RunnerView:
    is_at_work = message.HasField("sample_no")
    return RunnerView(
        runner_id=message.runner_id,
        kind=message.kind,
        state=RUNNER_STATES.member(message.state, "runners.state"),
        evaluator_id=message.evaluator_id,
        node_ip=message.node_ip,
        gpu_ids=tuple(message.gpu_ids),
        pid=message.pid,
        submission_id=message.submission_id,
        task_id=message.task_id,
        sample_no=message.sample_no if is_at_work else -1,
        attempt_no=message.attempt_no if is_at_work else -1,
        begun_unix_seconds=message.begun_unix_seconds,
        running_seconds=message.running_seconds,
        restarts=message.restarts,
        message=message.message,
        keys=dict(message.keys),
    )
