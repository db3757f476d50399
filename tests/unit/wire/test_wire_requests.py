"""Calls and answers on the wire, and whatever else somebody may send."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.domain.requests import (
    AbortReply,
    AbortRequest,
    EventFilter,
    EventKind,
    SubmissionSelector,
    SubmissionView,
    SubmitReply,
    WaitingBatch,
)
from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire import requests as wire
from py_scheduler.wire.common.cursor import CursorCodec
from py_scheduler.wire.tasks import encode_submission_chunks
from tests.support import strategies

if TYPE_CHECKING:
    from collections.abc import Callable

    from google.protobuf.message import Message

filters = st.builds(
    EventFilter,
    submission_id=strategies.optional_names,
    kinds=st.frozensets(st.sampled_from(EventKind)),
    namespace=strategies.names,
)
selectors = st.builds(SubmissionSelector, submission_id=strategies.names, namespace=strategies.names) | st.builds(
    SubmissionSelector, batch_id=strategies.batch_ids, namespace=strategies.names
)
name_lists = st.lists(strategies.names, max_size=3).map(tuple)


@given(filters)
def test_filters_travel_unchanged(event_filter: EventFilter) -> None:
    assert wire.decode_filter(wire.encode_filter(event_filter)) == event_filter


@given(selectors)
def test_selectors_travel_unchanged(selector: SubmissionSelector) -> None:
    assert wire.decode_get_request(wire.encode_get_request(selector)) == selector


@given(selectors, name_lists, strategies.texts, st.booleans(), st.none() | st.floats(0, 10))
def test_aborts_travel_with_the_calls_deadline(
    selector: SubmissionSelector, task_ids: tuple[str, ...], reason: str, wait: Any, timeout: float | None
) -> None:
    request = AbortRequest(selector=selector, task_ids=task_ids, reason=reason, wait=wait, timeout_seconds=timeout)
    assert wire.decode_abort_request(wire.encode_abort_request(request), timeout) == request


@given(strategies.counts, name_lists)
def test_abort_replies(aborted_tasks: int, still_stopping: tuple[str, ...]) -> None:
    reply = AbortReply(aborted_tasks=aborted_tasks, still_stopping=still_stopping)
    message = wire.encode_abort_reply(reply)
    assert wire.decode_abort_reply(message) == reply
    assert message.state == (service.ABORT_STATE_ABORTING if still_stopping else service.ABORT_STATE_ABORTED)


waiting_batches = st.builds(
    WaitingBatch,
    task_ids=name_lists,
    reason=strategies.texts,
    waiting_seconds=strategies.seconds,
    bypassed=strategies.counts,
)
views = st.builds(
    SubmissionView,
    submission_id=strategies.names,
    key=st.builds(SubmissionKey, strategies.batch_ids, strategies.names),
    waiting=st.lists(waiting_batches, max_size=2).map(tuple),
    **{name: strategies.counts for name in SubmissionView.__struct_fields__ if name.endswith(("_tasks", "_attempts"))},
)


@given(views)
def test_submission_views_travel_unchanged(view: SubmissionView) -> None:
    assert wire.decode_submission(wire.encode_submission(view), view.key.namespace) == view


def test_no_more_than_a_hundred_waiting_batches_are_told() -> None:
    batch = WaitingBatch(task_ids=("t",), reason="gpu", waiting_seconds=1.0, bypassed=0)
    counts = dict.fromkeys((n for n in SubmissionView.__struct_fields__ if n.endswith(("_tasks", "_attempts"))), 0)
    view = SubmissionView(submission_id="s", key=SubmissionKey(1), waiting=(batch,) * 500, **counts)
    assert len(wire.encode_submission(view).waiting) == 100


def test_a_submits_cursor_watches_its_submission_from_the_start() -> None:
    reply = SubmitReply(submission_id="s", task_ids=("t",), warnings=("w",), before_sequence=41)
    message = wire.encode_submit_reply(reply, "team", bytes(16))
    for kinds in (frozenset[EventKind](), frozenset({EventKind.TASK_DONE})):
        codec = CursorCodec(bytes(16), EventFilter(submission_id="s", namespace="team", kinds=kinds))
        assert codec.decode(message.cursor) == 41


@pytest.mark.parametrize(
    ("decode", "message", "fields"),
    [
        (wire.decode_get_request, service.GetSubmissionRequest(), ["submission_id"]),
        (
            wire.decode_get_request,
            service.GetSubmissionRequest(submission_id="s", batch_id=task_pb2.BatchId(step=1)),
            ["submission_id"],
        ),
        (wire.decode_get_request, service.GetSubmissionRequest(batch_id=task_pb2.BatchId()), ["batch_id"]),
        (
            wire.decode_get_request,
            service.GetSubmissionRequest(submission_id="\n", namespace="\t"),
            ["namespace", "submission_id"],
        ),
        (
            lambda message: wire.decode_abort_request(message, None),
            service.AbortSubmissionRequest(submission_id="s", task_ids=["a", "", "b\n"], reason="x" * 5_000),
            ["task_ids[1]", "task_ids[2]", "reason"],
        ),
        (
            wire.decode_filter,
            service.EventFilter(namespace="\n", submission_id="\n", kinds=[1, 0, 99]),  # type: ignore[list-item]
            ["filter.namespace", "filter.submission_id", "filter.kinds[1]", "filter.kinds[2]"],
        ),
    ],
)
def test_faults_are_named(decode: Callable[[Any], Any], message: Any, fields: list[str]) -> None:
    with pytest.raises(InvalidArgumentError) as caught:
        decode(message)
    assert [violation.field for violation in caught.value.violations] == fields


# Whatever bytes come: an answer or InvalidArgumentError, nothing else

_CHUNK = next(
    encode_submission_chunks(
        [Task(config=TaskConfig(task_type="a", dataset="d"), prompt="p", metadata={"_dataset_cfg": {"name": "n"}})] * 3,
        SubmissionKey("7/x"),
        "r",
        10,
        1 << 20,
    )
)
_DECODERS: list[tuple[type[Message], Callable[[Any], Any]]] = [
    (service.SubmitTasksRequest, lambda message: wire.decode_submit_request(message, 100)),
    (service.GetSubmissionRequest, wire.decode_get_request),
    (service.AbortSubmissionRequest, lambda message: wire.decode_abort_request(message, None)),
    (service.WatchEventsRequest, lambda message: wire.decode_filter(message.filter)),
]


def offer(raw: bytes) -> None:
    for message_class, decode in _DECODERS:
        try:
            decode(message_class.FromString(raw))
        except (DecodeError, InvalidArgumentError):
            continue


@given(st.binary(max_size=300))
def test_random_bytes(raw: bytes) -> None:
    offer(raw)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=8))
def test_mutated_requests(changes: list[tuple[int, int]]) -> None:
    raw = bytearray(_CHUNK.request.SerializeToString())
    for position, value in changes:
        raw[position % len(raw)] = value
    offer(bytes(raw))
