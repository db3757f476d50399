"""Steps on the wire: requests and reports both ways, and frames that are those of a watch."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2 as service
from py_scheduler.domain.events import EventRecord
from py_scheduler.domain.requests import EventFilter, EventFrame, EventKind
from py_scheduler.domain.results import Outcome
from py_scheduler.domain.training.steps import (
    DatasetOutcomes,
    FilterReport,
    KeptGroup,
    StepKind,
    StepReport,
    StepRequest,
)
from py_scheduler.errors import CursorMismatchError, InvalidArgumentError
from py_scheduler.wire.common.cursor import CursorCodec
from py_scheduler.wire.events import decode_frame, encode_frames
from py_scheduler.wire.rollouts import (
    decode_report,
    decode_step_request,
    encode_report_frame,
    encode_step_request,
    step_cursors,
)
from tests.support.servers.fake_engine import events_of_finish
from tests.support.strategies import counts, names, texts

EPOCH = bytes(range(16))
REASONS = st.dictionaries(names, counts, max_size=3)
FILTERS = st.builds(
    FilterReport,
    filter=names,
    kept_groups=counts,
    kept_samples=counts,
    dropped_groups=counts,
    dropped_samples=counts,
    group_reasons=REASONS,
    sample_reasons=REASONS,
    dropped_task_ids=st.lists(names, max_size=3).map(tuple),
)
DATASETS = st.builds(
    DatasetOutcomes,
    dataset=texts,
    outcomes=st.dictionaries(st.sampled_from(Outcome), counts),
    mean_reward=st.none() | st.floats(allow_nan=False),
)
KEPT = st.builds(KeptGroup, task_id=names, sample_nos=st.lists(counts, max_size=3).map(tuple))


@st.composite
def reports(draw: st.DrawFn) -> StepReport:
    return StepReport(
        kind=draw(st.sampled_from(StepKind)),
        rollout_id=draw(st.integers(0, 2**53 - 1)),
        request_id=draw(names),
        submission_id=draw(texts),
        kept=tuple(draw(st.lists(KEPT, max_size=3))),
        rounds=draw(counts),
        training_samples=draw(counts),
        filters=tuple(draw(st.lists(FILTERS, max_size=2))),
        metrics=draw(st.dictionaries(names, st.floats(allow_nan=False), max_size=3)),
        datasets=tuple(draw(st.lists(DATASETS, max_size=2))),
        files=tuple(draw(st.lists(texts, max_size=3))),
        reused_from=draw(texts),
        warnings=tuple(draw(st.lists(texts, max_size=2))),
        samples_of=draw(st.none() | st.integers(0, 2**53 - 1)),
    )


@st.composite
def requests(draw: st.DrawFn) -> StepRequest:
    kind = draw(st.sampled_from(StepKind))
    return StepRequest(
        kind=kind,
        rollout_id=draw(st.integers(0, 2**53 - 1)),
        request_id=draw(names),
        groups=draw(st.none() | st.integers(1, 1_000)) if kind is StepKind.ROLLOUT else None,
        samples=draw(st.none() | st.integers(1, 500)),
        cancel_on_disconnect=draw(st.booleans()),
    )


@given(reports())
def test_a_report_survives_the_wire(report: StepReport) -> None:
    cursors = CursorCodec(EPOCH, EventFilter())
    response = service.ExecuteRolloutResponse if report.kind is StepKind.ROLLOUT else service.ExecuteEvalResponse
    message = response.FromString(encode_report_frame(report, 7, cursors))
    assert (message.after_sequence, message.through_sequence, cursors.decode(message.cursor)) == (7, 7, 7)
    assert decode_report(message) == report


@given(requests(), st.binary(max_size=4))
def test_a_request_survives_the_wire(request: StepRequest, cursor: bytes) -> None:
    message = encode_step_request(request, cursor)
    assert message.cursor == cursor
    assert decode_step_request(message) == request


def test_what_cannot_travel_is_made_to() -> None:
    report = StepReport(kind=StepKind.EVAL, rollout_id=0, request_id="a", metrics={"\ud800": 1.0}, files=("\ud800",))
    message = service.ExecuteEvalResponse.FromString(encode_report_frame(report, 0, CursorCodec(EPOCH, EventFilter())))
    decoded = decode_report(message)
    assert decoded is not None
    assert (decoded.metrics, decoded.files) == ({"?": 1.0}, ("?",))


def test_frames_of_a_step_are_those_of_a_watch() -> None:
    events = events_of_finish("s-0")
    records = tuple(EventRecord(number, "default", event) for number, event in enumerate(events, 2))
    cursors = step_cursors(StepRequest(kind=StepKind.ROLLOUT, rollout_id=0, request_id="a"), EPOCH, 1)
    (encoded,) = encode_frames(EventFrame(after_sequence=1, through_sequence=9, records=records), cursors)
    message = service.ExecuteRolloutResponse.FromString(encoded)
    assert decode_report(message) is None
    decoded: Any = decode_frame(message)  # type: ignore[arg-type] # the same on the wire
    assert (decoded.after_sequence, decoded.through_sequence, decoded.cursor) == (1, 9, cursors.encode(9))
    assert [record.event for record in decoded.records] == [record.event for record in records]


def test_the_cursors_of_a_step_are_of_its_request() -> None:
    def of(kind: StepKind, request_id: str) -> CursorCodec:
        return step_cursors(StepRequest(kind=kind, rollout_id=0, request_id=request_id), EPOCH, 1)

    cursor = of(StepKind.ROLLOUT, "a").encode(5)
    assert of(StepKind.ROLLOUT, "a").decode(cursor) == 5
    for other in (
        of(StepKind.ROLLOUT, "b"),
        of(StepKind.EVAL, "a"),
        CursorCodec(EPOCH, EventFilter(kinds=frozenset({EventKind.TASK_DONE}))),
    ):
        with pytest.raises(CursorMismatchError):
            other.decode(cursor)


def test_a_step_is_not_larger_than_a_call() -> None:
    request = service.ExecuteRolloutRequest(request_id="a", groups=100_000, samples=6)
    with pytest.raises(InvalidArgumentError, match="100000 groups of 6 samples are more than 500000"):
        decode_step_request(request)
