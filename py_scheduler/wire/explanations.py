"""ExplainTask on the wire."""

from __future__ import annotations

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.domain.explanations import EntryAhead, TaskExplanation, TaskPhase, TaskWait
from py_scheduler.domain.limits import name_fault
from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.wire.common.fields import EnumTable, Faults
from py_scheduler.wire.placement import decode_shortage, encode_shortage
from py_scheduler.wire.tasks import encode_batch_id

_PHASES = EnumTable(TaskPhase, service.TaskPhase, "TASK_PHASE")
_TASK_COUNTS = ("queued_attempts", "leased_attempts", "running_attempts")
_WAIT_NUMBERS = (
    "tasks",
    "attempts",
    "waiting_seconds",
    "bypassed",
    "max_bypass",
    "wanted_tokens",
    "free_tokens",
    "max_tokens",
    "nodes_in_all",
    "ahead_in_all",
)
_AHEAD_NUMBERS = ("tasks", "tokens", "waiting_seconds", "bypassed")


def decode_explain_request(message: service.ExplainTaskRequest) -> tuple[str, str]:
    """The task's id and the namespace. Raises InvalidArgumentError."""
    faults = Faults()
    if fault := name_fault(message.task_id):
        faults.add("task_id", fault)
    if fault := name_fault(message.namespace, required=False):
        faults.add("namespace", fault)
    faults.check()
    return message.task_id, message.namespace or DEFAULT_NAMESPACE


def encode_explanation(explanation: TaskExplanation) -> service.ExplainTaskResponse:
    return service.ExplainTaskResponse(
        task_id=explanation.task_id,
        submission_id=explanation.submission_id,
        batch_id=encode_batch_id(explanation.batch_id),
        phase=_PHASES.number_of[explanation.phase],
        waits=map(_encode_wait, explanation.waits),
        **{count: getattr(explanation, count) for count in _TASK_COUNTS},
    )


def decode_explanation(message: service.ExplainTaskResponse) -> TaskExplanation:
    return TaskExplanation(
        task_id=message.task_id,
        submission_id=message.submission_id,
        batch_id=_batch_id(message.batch_id),
        phase=_PHASES.member(message.phase, "phase"),
        waits=tuple(map(_decode_wait, message.waits)),
        **{count: getattr(message, count) for count in _TASK_COUNTS},
    )


def _encode_wait(wait: TaskWait) -> service.TaskWait:
    message = service.TaskWait(
        evaluator_id=wait.evaluator_id,
        reason=safe_text(wait.reason),
        **{number: getattr(wait, number) for number in _WAIT_NUMBERS},
    )
    message.nodes.extend(map(encode_shortage, wait.nodes))
    for entry in wait.ahead:
        message.ahead.add(
            namespace=entry.namespace,
            batch_id=None if entry.batch_id is None else encode_batch_id(entry.batch_id),
            **{number: getattr(entry, number) for number in _AHEAD_NUMBERS},
        )
    return message


def _decode_wait(message: service.TaskWait) -> TaskWait:
    return TaskWait(
        evaluator_id=message.evaluator_id,
        reason=message.reason,
        nodes=tuple(map(decode_shortage, message.nodes)),
        ahead=tuple(
            EntryAhead(
                namespace=entry.namespace,
                batch_id=_batch_id(entry.batch_id) if entry.HasField("batch_id") else None,
                **{number: getattr(entry, number) for number in _AHEAD_NUMBERS},
            )
            for entry in message.ahead
        ),
        **{number: getattr(message, number) for number in _WAIT_NUMBERS},
    )


def _batch_id(message: task_pb2.BatchId) -> BatchId:
    return message.label or message.step
