"""One set of rules: what a client's request is refused for is what a caller in the same process is refused for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.domain.limits import MAX_VIOLATIONS, check_batch_id
from py_scheduler.domain.requests import SubmitRequest
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.errors import FieldViolation, InvalidArgumentError
from py_scheduler.scheduler.intake import check_request
from py_scheduler.wire.requests import decode_submit_request

CONFIG = TaskConfig(task_type="a", dataset="math")


def told_in_process(batch_id: Any, metadata: dict[str, Any], count: int = 1) -> tuple[FieldViolation, ...]:
    tasks = tuple(Task(config=CONFIG, metadata=metadata) for _ in range(count))
    with pytest.raises(InvalidArgumentError) as caught:
        check_request(SubmitRequest(request_id="r", key=SubmissionKey(batch_id), tasks=tasks))
    return caught.value.violations


def told_at_the_door(batch_id: task_pb2.BatchId, metadata: dict[str, Any]) -> tuple[FieldViolation, ...]:
    message = service.SubmitTasksRequest(
        request_id="r",
        batch_id=batch_id,
        default_config=task_pb2.TaskConfig(task_type="a", dataset="math"),
        tasks=[task_pb2.Task(metadata_json=json.dumps(metadata).encode())],
    )
    with pytest.raises(InvalidArgumentError) as caught:
        decode_submit_request(message, 10)
    return caught.value.violations


@pytest.mark.parametrize(
    ("dataset_config", "field", "description"),
    [
        ({"sampling": {"top_p": 3.0}}, ".sampling.top_p", "data set 'math': is 3.0"),
        ({"name": "gsm8k", "sampling": {"top_k": 0}}, ".sampling.top_k", "data set 'gsm8k': is 0"),
        ({"stopping": {"max_turns": 0}}, ".stopping.max_turns", "data set 'math': is 0"),
        ({"name": "gsm8k", "smpling": {}}, "", "data set 'gsm8k'"),
        ([], "", "data set"),
    ],
)
def test_settings_of_a_data_set(dataset_config: Any, field: str, description: str) -> None:
    metadata = {"_dataset_cfg": dataset_config}
    (violation,) = told_in_process(1, metadata)
    assert violation.field == f"tasks[0].metadata._dataset_cfg{field}"
    assert violation.description.startswith(description)
    assert told_at_the_door(task_pb2.BatchId(step=1), metadata) == (violation,)


@pytest.mark.parametrize(
    ("batch_id", "field"), [(-1, "batch_id.step"), ("", "batch_id.label"), ("a\n", "batch_id.label")]
)
def test_batch_ids(batch_id: int | str, field: str) -> None:
    (violation,) = told_in_process(batch_id, {})
    assert violation.field == field
    message = task_pb2.BatchId(label=batch_id) if isinstance(batch_id, str) else task_pb2.BatchId(step=batch_id)
    assert told_at_the_door(message, {}) == (violation,)


@pytest.mark.parametrize("batch_id", [2**63, 1.5, None])
def test_batch_ids_that_no_message_can_hold(batch_id: Any) -> None:
    (violation,) = told_in_process(batch_id, {})
    assert violation.field == "batch_id.step"


@pytest.mark.parametrize("batch_id", [0, 7, 2**63 - 1, "7/gsm8k", "é"])
def test_batch_ids_that_are_right(batch_id: int | str) -> None:
    assert not list(check_batch_id(batch_id))


def test_faults_in_process_are_bounded_too() -> None:
    assert len(told_in_process(1, {"_dataset_cfg": 7}, count=100)) == MAX_VIOLATIONS
