"""A submit that is read through its envelope, some tasks at a time, is what it is when it is read at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.domain.requests import Delivery
from py_scheduler.domain.task import SubmissionKey
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.scheduler.slices import at_once
from py_scheduler.wire import envelopes
from py_scheduler.wire.common.damage import damage_error
from py_scheduler.wire.envelopes import SubmitEnvelope, decode_envelope
from py_scheduler.wire.requests import decode_submit_request
from py_scheduler.wire.tasks import encode_submission_chunks
from tests.support import strategies

if TYPE_CHECKING:
    from py_scheduler.domain.requests import SubmitRequest
    from py_scheduler.domain.task import BatchId, Task
    from py_scheduler.domain.training.iteration import IterationContext

_MAX_TASKS = 100


def read_at_once(raw: bytes) -> SubmitRequest:
    try:
        message = service.SubmitTasksRequest.FromString(raw)
    except DecodeError:
        raise damage_error(raw, service.SubmitTasksRequest.DESCRIPTOR) from None
    return decode_submit_request(message, _MAX_TASKS)


def through_its_envelope(raw: bytes) -> SubmitRequest:
    try:
        envelope = SubmitEnvelope.FromString(raw)
    except DecodeError:
        raise damage_error(raw, SubmitEnvelope.DESCRIPTOR) from None
    key, reading = decode_envelope(envelope, _MAX_TASKS)
    request = at_once(reading)
    assert request.key == key
    return request


@pytest.fixture(autouse=True)
def _few_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(envelopes, "_TOGETHER_TASKS", 2)


@given(
    st.lists(strategies.tasks, min_size=1, max_size=3),
    strategies.batch_ids,
    st.none() | strategies.iterations,
    st.sampled_from(Delivery),
)
def test_a_request_is_the_same(
    tasks: list[Task], batch_id: BatchId, iteration: IterationContext | None, delivery: Delivery
) -> None:
    key = SubmissionKey(batch_id, "ns")
    chunk = next(encode_submission_chunks(tasks, key, "r", _MAX_TASKS, 1 << 30, iteration, delivery))
    raw = chunk.request.SerializeToString()
    assert through_its_envelope(raw) == read_at_once(raw)


def raw_of(*tasks: task_pb2.Task) -> bytes:
    request = service.SubmitTasksRequest(request_id="r", default_config=task_pb2.TaskConfig(task_type="a"))
    request.batch_id.step = 3
    request.tasks.extend(tasks)
    return request.SerializeToString()


_PIECES = st.sampled_from(
    [
        *(raw_of(task_pb2.Task(prompt=f"p{number}", client_key=str(number))) for number in range(4)),
        service.SubmitTasksRequest(request_id="other", namespace="b").SerializeToString(),
        service.SubmitTasksRequest(default_config=task_pb2.TaskConfig(repeat_times=3)).SerializeToString(),
        b"\x9a\x06\x03new",
        b"\x9b\x06\x28\x01\x9c\x06",
        b"\x2a\x00",
        b"\x2a\x03\x0a\x01\xff",
        b"\x2a\x05\x0a",
        b"\x28\x01",
    ]
)
"""Whole requests, parts of one, fields and groups that nobody knows, and damage."""


@given(st.lists(_PIECES, min_size=1, max_size=6).map(b"".join) | st.binary(max_size=40))
def test_whatever_the_bytes_are_both_take_them_or_both_refuse_them(raw: bytes) -> None:
    try:
        expected = read_at_once(raw)
    except InvalidArgumentError:
        with pytest.raises(InvalidArgumentError):
            through_its_envelope(raw)
    else:
        assert through_its_envelope(raw) == expected


@pytest.mark.parametrize(
    ("task", "field"),
    [
        (task_pb2.Task(client_key="no\nprint"), "tasks[4].client_key"),
        (task_pb2.Task(metadata_json=b"{"), "tasks[4].metadata_json"),
        (task_pb2.Task(config=task_pb2.TaskConfig(task_type="a", repeat_times=0)), "tasks[4].config.repeat_times"),
    ],
)
def test_a_fault_is_named_by_the_number_that_its_task_has_in_the_request(task: task_pb2.Task, field: str) -> None:
    raw = raw_of(*[task_pb2.Task()] * 4, task)
    for read in (read_at_once, through_its_envelope):
        with pytest.raises(InvalidArgumentError) as raised:
            read(raw)
        assert [violation.field for violation in raised.value.violations] == [field]


def test_so_is_text_that_is_not_utf8() -> None:
    raw = raw_of(*[task_pb2.Task()] * 4, task_pb2.Task(prompt="?")).replace(b"?", b"\xff")
    for read in (read_at_once, through_its_envelope):
        with pytest.raises(InvalidArgumentError) as raised:
            read(raw)
        (violation,) = raised.value.violations
        assert (violation.field, violation.description) == ("tasks[4].prompt", "is not valid UTF-8")


def test_too_many_tasks_are_refused_before_they_are_read() -> None:
    raw = raw_of(*[task_pb2.Task(metadata_json=b"{")] * (_MAX_TASKS + 1))
    with pytest.raises(InvalidArgumentError, match="holds 101, must hold at least 1 and at most 100"):
        decode_envelope(SubmitEnvelope.FromString(raw), _MAX_TASKS)
