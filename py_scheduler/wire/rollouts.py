"""Steps on the wire (rollout_service.proto).

The frames of both calls have the fields of WatchEventsResponse under the same numbers, so `encode_frames` serves them
too and an event's bytes are shared with all watchers; what is more in them is the report, at the end.
"""

from __future__ import annotations

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2 as service
from py_scheduler.domain.limits import MAX_GROUPS_PER_STEP, MAX_REPEAT_TIMES, MAX_SAMPLES_PER_CALL, name_fault
from py_scheduler.domain.requests import EventFilter
from py_scheduler.domain.training.steps import (
    DatasetOutcomes,
    FilterReport,
    KeptGroup,
    StepKind,
    StepReport,
    StepRequest,
)
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.wire.common.cursor import CursorCodec
from py_scheduler.wire.common.fields import OUTCOMES, Faults

ExecuteRequest = service.ExecuteRolloutRequest | service.ExecuteEvalRequest
ExecuteResponse = service.ExecuteRolloutResponse | service.ExecuteEvalResponse

_MAX_ROLLOUT_ID = 2**53 - 1
"""Exact in every JSON file that it is written to."""
_FILTER_COUNTS = ("kept_groups", "kept_samples", "dropped_groups", "dropped_samples")


def step_cursors(request: StepRequest, store_epoch: bytes, oldest_sequence: int) -> CursorCodec:
    """Cursors of one step: bound to its request, because its submission is not known before the first task."""
    return CursorCodec(store_epoch, EventFilter(submission_id=f"{request.kind}/{request.request_id}"), oldest_sequence)


# Requests


def decode_step_request(message: ExecuteRequest) -> StepRequest:
    """Without the cursor. Raises InvalidArgumentError with every faulty field."""
    faults = Faults()
    if fault := name_fault(message.request_id):
        faults.add("request_id", fault)
    _check_rollout_id(message.rollout_id, faults)
    groups = None
    if isinstance(message, service.ExecuteRolloutRequest) and message.HasField("groups"):
        groups = _count(message.groups, "groups", MAX_GROUPS_PER_STEP, faults)
    samples = _count(message.samples, "samples", MAX_REPEAT_TIMES, faults) if message.HasField("samples") else None
    if (groups or 1) * (samples or 1) > MAX_SAMPLES_PER_CALL:
        faults.add(
            "samples",
            f"{groups or 1} groups of {samples or 1} samples are more than {MAX_SAMPLES_PER_CALL}: ask for fewer",
        )
    faults.check()
    return StepRequest(
        kind=StepKind.ROLLOUT if isinstance(message, service.ExecuteRolloutRequest) else StepKind.EVAL,
        rollout_id=message.rollout_id,
        request_id=message.request_id,
        groups=groups,
        samples=samples,
        cancel_on_disconnect=message.cancel_on_disconnect,
    )


def decode_read_request(message: service.ReadSamplesRequest) -> int:
    """The iteration. Raises InvalidArgumentError."""
    faults = Faults()
    _check_rollout_id(message.rollout_id, faults)
    faults.check()
    return message.rollout_id


def _check_rollout_id(rollout_id: int, faults: Faults) -> None:
    if not 0 <= rollout_id <= _MAX_ROLLOUT_ID:
        faults.add("rollout_id", f"is {rollout_id}, must be at least 0 and at most {_MAX_ROLLOUT_ID}")


def _count(value: int, field: str, most: int, faults: Faults) -> int:
    if not 1 <= value <= most:
        faults.add(field, f"is {value}, must be at least 1 and at most {most}; leave it out for the configured number")
    return value


def encode_step_request(request: StepRequest, cursor: bytes) -> ExecuteRequest:
    message: ExecuteRequest
    if request.kind is StepKind.ROLLOUT:
        message = service.ExecuteRolloutRequest(groups=request.groups)
    else:
        message = service.ExecuteEvalRequest()
    message.request_id = request.request_id
    message.rollout_id = request.rollout_id
    message.cursor = cursor
    message.cancel_on_disconnect = request.cancel_on_disconnect
    if request.samples is not None:
        message.samples = request.samples
    return message


# Reports


def encode_report_frame(report: StepReport, through_sequence: int, cursors: CursorCodec) -> bytes:
    """The last frame of a stream: no events, and the report."""
    # Either response would do: they are the same on the wire.
    frame = service.ExecuteRolloutResponse(
        after_sequence=through_sequence, through_sequence=through_sequence, cursor=cursors.encode(through_sequence)
    )
    _fill_report(report, frame.report)
    return frame.SerializeToString()


def _fill_report(report: StepReport, message: service.StepReport) -> None:
    message.rollout_id = report.rollout_id
    message.request_id = report.request_id
    message.submission_id = report.submission_id
    for group in report.kept:
        message.kept.add(task_id=group.task_id, sample_nos=group.sample_nos)
    message.rounds = report.rounds
    message.training_samples = report.training_samples
    for counts in report.filters:
        message.filters.add(**msgspec.structs.asdict(counts))
    message.metrics.update({safe_text(name): value for name, value in report.metrics.items()})
    for dataset in report.datasets:
        entry = message.datasets.add(dataset=safe_text(dataset.dataset), mean_reward=dataset.mean_reward)
        for outcome, number in dataset.outcomes.items():
            entry.outcomes.add(outcome=OUTCOMES.number_of[outcome], count=number)
    message.files.extend(map(safe_text, report.files))
    message.reused_from = safe_text(report.reused_from)
    message.warnings.extend(map(safe_text, report.warnings))
    if report.samples_of is not None:
        message.samples_of = report.samples_of


def decode_report(message: ExecuteResponse) -> StepReport | None:
    """The report that a frame carries; None for all frames but the last."""
    if not message.HasField("report"):
        return None
    report = message.report
    is_rollout = isinstance(message, service.ExecuteRolloutResponse)
    return StepReport(
        kind=StepKind.ROLLOUT if is_rollout else StepKind.EVAL,
        rollout_id=report.rollout_id,
        request_id=report.request_id,
        submission_id=report.submission_id,
        kept=tuple(KeptGroup(group.task_id, tuple(group.sample_nos)) for group in report.kept),
        rounds=report.rounds,
        training_samples=report.training_samples,
        filters=tuple(
            FilterReport(
                filter=counts.filter,
                sample_reasons=dict(sorted(counts.sample_reasons.items())),
                group_reasons=dict(sorted(counts.group_reasons.items())),
                dropped_task_ids=tuple(counts.dropped_task_ids),
                **{count: getattr(counts, count) for count in _FILTER_COUNTS},
            )
            for counts in report.filters
        ),
        metrics=dict(sorted(report.metrics.items())),
        datasets=tuple(map(_decode_dataset, report.datasets)),
        files=tuple(report.files),
        reused_from=report.reused_from,
        samples_of=report.samples_of if report.HasField("samples_of") else None,
        warnings=tuple(report.warnings),
    )


def _decode_dataset(message: service.DatasetOutcomes) -> DatasetOutcomes:
    return DatasetOutcomes(
        dataset=message.dataset,
        outcomes={OUTCOMES.member(entry.outcome, "datasets.outcomes"): entry.count for entry in message.outcomes},
        mean_reward=message.mean_reward if message.HasField("mean_reward") else None,
    )
