"""One set of rules: what a client's request is refused for is what a caller in the same process is refused for."""

from __future__ import annotations

import json
from typing import Any

import pytest

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.domain.limits import MAX_SAMPLES_PER_CALL, MAX_VIOLATIONS, check_batch_id, check_submit
from py_scheduler.domain.requests import SubmitRequest
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.errors import FieldViolation, InvalidArgumentError
from py_scheduler.wire.requests import decode_submit_request

CONFIG = TaskConfig(task_type="a", dataset="math")


def told_in_process(batch_id: Any, metadata: dict[str, Any], count: int = 1) -> tuple[FieldViolation, ...]:
    tasks = tuple(Task(config=CONFIG, metadata=metadata) for _ in range(count))
    with pytest.raises(InvalidArgumentError) as caught:
        check_submit(SubmitRequest(request_id="r", key=SubmissionKey(batch_id), tasks=tasks))
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


def test_too_many_samples_in_one_call_are_told_the_same_on_both_sides() -> None:
    """Each task is right by itself: it is their sum that is too much for one call."""
    repeats = 50_000
    count = MAX_SAMPLES_PER_CALL // repeats + 1
    config = TaskConfig(task_type="a", repeat_times=repeats)
    request = SubmitRequest(request_id="r", key=SubmissionKey(1), tasks=(Task(config=config),) * count)
    with pytest.raises(InvalidArgumentError) as in_process:
        check_submit(request)
    message = service.SubmitTasksRequest(
        request_id="r",
        batch_id=task_pb2.BatchId(step=1),
        default_config=task_pb2.TaskConfig(task_type="a", repeat_times=repeats),
        tasks=[task_pb2.Task()] * count,
    )
    with pytest.raises(InvalidArgumentError) as at_the_door:
        decode_submit_request(message, count)
    assert at_the_door.value.violations == in_process.value.violations
    assert [violation.field for violation in at_the_door.value.violations] == ["tasks"]


def test_what_was_read_from_a_message_is_known_to_be_judged_and_what_was_made_here_is_not() -> None:
    message = service.SubmitTasksRequest(
        request_id="r",
        batch_id=task_pb2.BatchId(step=1),
        default_config=task_pb2.TaskConfig(task_type="a", dataset="math"),
        tasks=[task_pb2.Task()],
    )
    decoded = decode_submit_request(message, 1)
    assert decoded.is_checked
    assert not SubmitRequest(request_id="r", key=SubmissionKey(1), tasks=decoded.tasks).is_checked
