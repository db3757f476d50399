"""The tree of errors.py <-> google.rpc.Status with details.

Every status carries an ErrorInfo whose reason names the class, so that a client gets back the class that the server
raised; InvalidArgumentError adds BadRequest, ResourceExhaustedError adds RetryInfo. Replies stay below the 8 KiB of
metadata that any client takes, however many faults there are. Text of unexpected exceptions never leaves the server.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.duration_pb2 import Duration
from google.rpc import code_pb2, error_details_pb2, status_pb2

from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import (
    AlreadyExistsError,
    ClusterLayoutError,
    ConfigError,
    ContextOverflowError,
    CursorExpiredError,
    CursorMismatchError,
    EngineRejectedError,
    EngineUnavailableError,
    FailedPreconditionError,
    FieldViolation,
    GenerationAbortedError,
    GenerationError,
    InvalidArgumentError,
    JournalDamagedError,
    JournalError,
    LeaseError,
    ModelFetchError,
    NotFoundError,
    PermissionDeniedError,
    ResourceExhaustedError,
    RunnerError,
    RunnerLostError,
    RunnerStartError,
    SandboxError,
    SchedulerError,
    ServerError,
    TurnLimitError,
    UnauthenticatedError,
    UnplaceableError,
)

if TYPE_CHECKING:
    from google.protobuf.message import Message

ERROR_DOMAIN = "py-scheduler"
_OLDEST_SEQUENCE = "oldest_sequence"
_MAX_MESSAGE = 1_000
_MAX_FIELD = 200
_MAX_DESCRIPTION = 300
_MAX_VIOLATIONS_BYTES = 2_500

# A subclass stands for itself; one that is not here is sent as its nearest parent that is.
_REASONS: dict[type[SchedulerError], tuple[str, int]] = {
    InvalidArgumentError: ("INVALID_ARGUMENT", code_pb2.INVALID_ARGUMENT),
    ConfigError: ("INVALID_CONFIG", code_pb2.INVALID_ARGUMENT),
    ClusterLayoutError: ("INVALID_CLUSTER_LAYOUT", code_pb2.INVALID_ARGUMENT),
    CursorMismatchError: ("CURSOR_MISMATCH", code_pb2.INVALID_ARGUMENT),
    UnplaceableError: ("UNPLACEABLE", code_pb2.FAILED_PRECONDITION),
    AlreadyExistsError: ("ALREADY_EXISTS", code_pb2.ALREADY_EXISTS),
    NotFoundError: ("NOT_FOUND", code_pb2.NOT_FOUND),
    UnauthenticatedError: ("UNAUTHENTICATED", code_pb2.UNAUTHENTICATED),
    PermissionDeniedError: ("PERMISSION_DENIED", code_pb2.PERMISSION_DENIED),
    CursorExpiredError: ("CURSOR_EXPIRED", code_pb2.OUT_OF_RANGE),
    ResourceExhaustedError: ("RESOURCE_EXHAUSTED", code_pb2.RESOURCE_EXHAUSTED),
    FailedPreconditionError: ("FAILED_PRECONDITION", code_pb2.FAILED_PRECONDITION),
    LeaseError: ("LEASE_GONE", code_pb2.FAILED_PRECONDITION),
    GenerationError: ("GENERATION_FAILED", code_pb2.UNAVAILABLE),
    EngineUnavailableError: ("ENGINE_UNAVAILABLE", code_pb2.UNAVAILABLE),
    EngineRejectedError: ("ENGINE_REJECTED", code_pb2.FAILED_PRECONDITION),
    ContextOverflowError: ("CONTEXT_OVERFLOW", code_pb2.INVALID_ARGUMENT),
    TurnLimitError: ("TURN_LIMIT", code_pb2.FAILED_PRECONDITION),
    GenerationAbortedError: ("GENERATION_ABORTED", code_pb2.ABORTED),
    SandboxError: ("SANDBOX_FAILED", code_pb2.UNAVAILABLE),
    RunnerError: ("RUNNER_FAILED", code_pb2.UNAVAILABLE),
    RunnerStartError: ("RUNNER_START_FAILED", code_pb2.UNAVAILABLE),
    RunnerLostError: ("RUNNER_LOST", code_pb2.UNAVAILABLE),
    JournalError: ("JOURNAL", code_pb2.UNAVAILABLE),
    JournalDamagedError: ("JOURNAL_DAMAGED", code_pb2.DATA_LOSS),
    ModelFetchError: ("MODEL_FETCH", code_pb2.UNAVAILABLE),
}
_CLASSES = {reason: error_class for error_class, (reason, _code) in _REASONS.items()}


def status_of(error: SchedulerError) -> status_pb2.Status:
    """What a client is told of an error of the tree."""
    if isinstance(error, ServerError):
        return _status(code_pb2.Code.Value(error.code), str(error), "SERVER_ERROR", {})
    for ancestor in type(error).__mro__:
        if ancestor in _REASONS:
            reason, code = _REASONS[ancestor]
            break
    else:
        reason, code = "UNKNOWN", code_pb2.UNKNOWN
    metadata = {_OLDEST_SEQUENCE: str(error.oldest_sequence)} if isinstance(error, CursorExpiredError) else {}
    status = _status(code, str(error), reason, metadata)
    if isinstance(error, InvalidArgumentError):
        _add_detail(status, _bad_request(error.violations))
    if isinstance(error, ResourceExhaustedError) and error.retry_after_seconds is not None:
        delay = Duration()
        delay.FromNanoseconds(int(error.retry_after_seconds * 1e9))
        _add_detail(status, error_details_pb2.RetryInfo(retry_delay=delay))
    return status


def internal_status(correlation_id: str) -> status_pb2.Status:
    """What a client is told of an exception that nobody meant: where to look, not what it was."""
    message = f"internal error; the server's log has it under {correlation_id}"
    status = _status(code_pb2.INTERNAL, message, "INTERNAL", {})
    _add_detail(status, error_details_pb2.RequestInfo(request_id=correlation_id))
    return status


def _status(code: int, message: str, reason: str, metadata: dict[str, str]) -> status_pb2.Status:
    status = status_pb2.Status(code=code, message=_shortened(message, _MAX_MESSAGE))
    _add_detail(status, error_details_pb2.ErrorInfo(reason=reason, domain=ERROR_DOMAIN, metadata=metadata))
    return status


def _add_detail(status: status_pb2.Status, detail: Message) -> None:
    status.details.add().Pack(detail)


def _shortened(text: str, limit: int) -> str:
    text = safe_text(text)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    request = error_details_pb2.BadRequest()
    room = _MAX_VIOLATIONS_BYTES
    for number, violation in enumerate(violations):
        field = _shortened(violation.field, _MAX_FIELD)
        description = _shortened(violation.description, _MAX_DESCRIPTION)
        room -= len(field.encode()) + len(description.encode())
        if room < 0 and number:
            request.field_violations.add(description="and more")
            break
        request.field_violations.add(field=field, description=description)
    return request


def error_of(status: status_pb2.Status, code_name: str) -> SchedulerError:
    """The error that a status tells of; ServerError when it is none of the tree."""
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    for detail in status.details:
        for known in (info, bad_request, retry):
            if detail.Is(known.DESCRIPTOR):
                detail.Unpack(known)
    error_class = _CLASSES.get(info.reason) if info.domain == ERROR_DOMAIN else None
    if error_class is None:
        return ServerError(status.message, code_name)
    if issubclass(error_class, InvalidArgumentError):
        violations = [FieldViolation(v.field, v.description) for v in bad_request.field_violations]
        return error_class(violations or status.message)
    if issubclass(error_class, CursorExpiredError):
        oldest = info.metadata.get(_OLDEST_SEQUENCE, "")
        return CursorExpiredError(status.message, int(oldest) if oldest.isdecimal() else 0)
    if issubclass(error_class, ResourceExhaustedError):
        seconds = retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None
        return ResourceExhaustedError(status.message, seconds)
    return error_class(status.message)
