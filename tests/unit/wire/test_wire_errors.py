"""Errors on the wire, and messages that are damaged."""

from __future__ import annotations

import pytest
from google.rpc import code_pb2, status_pb2
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler import errors
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.errors import FieldViolation, InvalidArgumentError, SchedulerError, ServerError
from py_scheduler.wire.common.damage import damage_error
from py_scheduler.wire.common.errors import error_of, internal_status, status_of

EXAMPLES: dict[str, SchedulerError] = {
    "CursorExpiredError": errors.CursorExpiredError("gone", 42),
    "ResourceExhaustedError": errors.ResourceExhaustedError("full", 2.5),
    "ServerError": ServerError("broken", "DATA_LOSS"),
}
BASES = {"SchedulerError"}


def travel(error: SchedulerError) -> SchedulerError:
    status = status_of(error)
    return error_of(status_pb2.Status.FromString(status.SerializeToString()), code_pb2.Code.Name(status.code))


def every_class() -> list[type[SchedulerError]]:
    classes = [value for value in vars(errors).values() if isinstance(value, type)]
    return [value for value in classes if issubclass(value, SchedulerError) and value.__name__ not in BASES]


@pytest.mark.parametrize("error_class", every_class())
def test_each_class_comes_back_as_itself(error_class: type[SchedulerError]) -> None:
    error = EXAMPLES.get(error_class.__name__) or error_class("what is wrong, and the way out")
    arrived = travel(error)
    assert type(arrived) is error_class
    assert str(arrived) == str(error)
    assert vars(arrived) == vars(error)


def test_an_error_without_a_class_on_the_wire_comes_back_as_a_server_error() -> None:
    class OwnError(SchedulerError):
        pass

    arrived = travel(OwnError("strange"))
    assert isinstance(arrived, ServerError)
    assert (str(arrived), arrived.code) == ("strange", "UNKNOWN")


def test_a_subclass_comes_back_as_the_parent_that_is_known() -> None:
    class OwnNotFoundError(errors.NotFoundError):
        pass

    assert type(travel(OwnNotFoundError("gone"))) is errors.NotFoundError


def test_statuses_of_other_services_are_server_errors() -> None:
    arrived = error_of(status_pb2.Status(code=5, message="not ours"), "NOT_FOUND")
    assert isinstance(arrived, ServerError)


def test_internal_errors_say_where_to_look() -> None:
    arrived = error_of(internal_status("abc"), "INTERNAL")
    assert isinstance(arrived, ServerError)
    assert "abc" in str(arrived)


@given(st.lists(st.builds(FieldViolation, st.text(max_size=2_000), st.text(max_size=2_000)), min_size=1))
def test_a_status_stays_within_what_any_client_takes(violations: list[FieldViolation]) -> None:
    status = status_of(InvalidArgumentError(violations))
    # Binary metadata travels in base64, beside the message, which travels percent-encoded.
    assert len(status.SerializeToString()) * 4 / 3 + 3 * len(status.message.encode()) < 8 * 1024 * 2
    assert isinstance(error_of(status, "INVALID_ARGUMENT"), InvalidArgumentError)


# Damage


@given(st.binary(max_size=200))
def test_any_bytes_get_an_answer(raw: bytes) -> None:
    error = damage_error(raw, service.SubmitTasksRequest.DESCRIPTOR)
    assert isinstance(error, InvalidArgumentError)


def test_deep_nesting_gets_an_answer() -> None:
    raw = b"\xff"
    for _ in range(1_000):
        raw = b"\x22" + bytes([len(raw)]) + raw if len(raw) < 128 else raw
    assert damage_error(raw, service.SubmitTasksRequest.DESCRIPTOR)


@pytest.mark.parametrize(
    ("raw", "field"),
    [
        (b"\x0a\x01\xff", "request_id"),
        (b"\x08\x01\x0a\x01\xff", "request_id"),
        (b"\x2a\x02\x12\x00\x2a\x03\x12\x01\xff", "tasks[1].prompt"),
        (b"\x12\x03\x12\x01\xff", "batch_id.label"),
    ],
)
def test_the_damaged_field_is_named(raw: bytes, field: str) -> None:
    (violation,) = damage_error(raw, service.SubmitTasksRequest.DESCRIPTOR).violations
    assert violation == FieldViolation(field, "is not valid UTF-8")
