"""Collecting on the wire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from py_scheduler._generated.rollout_scheduler.v1 import collecting_pb2
from py_scheduler.domain.collecting import CollectReply, CollectRequest, TaskResult
from py_scheduler.domain.results import TaskState
from py_scheduler.errors import InvalidArgumentError, ServerError
from py_scheduler.wire.collecting import (
    MAX_CHUNK_PARTS,
    CollectReader,
    decode_collect_request,
    decode_drain_request,
    encode_chunks,
    encode_collect_request,
    encode_drain_request,
)
from tests.support import strategies

requests = st.builds(
    CollectRequest,
    request_id=strategies.names,
    batch_id=strategies.batch_ids,
    namespace=strategies.names,
    min_num=st.none() | st.integers(0, 10),
    max_num=st.none() | st.integers(10, 20),
    timeout_seconds=st.floats(0, 1e6),
    wait_after_min_seconds=st.none() | st.floats(0, 1e6),
    clear_unfinished=st.booleans(),
    include_partial=st.booleans(),
    with_payloads=st.booleans(),
)


def travel(reply: CollectReply, max_bytes: int = 1 << 20) -> CollectReply | None:
    reader = CollectReader()
    for parts in encode_chunks(reply, max_bytes):
        raw = collecting_pb2.CollectResultsResponse(parts=parts).SerializeToString()
        reader.read(collecting_pb2.CollectResultsResponse.FromString(raw).parts)
    return reader.reply


@given(strategies.collect_replies, st.sampled_from([8, 64, 1 << 20]))
def test_a_reply_travels_unchanged_in_chunks_of_any_size(reply: CollectReply, max_bytes: int) -> None:
    assert travel(reply, max_bytes) == reply


@given(requests)
def test_requests_travel_unchanged(request: CollectRequest) -> None:
    assert decode_collect_request(encode_collect_request(request)) == request
    drain = CollectRequest(
        request_id=request.request_id,
        batch_id=request.batch_id,
        namespace=request.namespace,
        with_payloads=request.with_payloads,
    )
    assert decode_drain_request(encode_drain_request(drain)) == drain


def test_a_long_payload_is_cut_and_no_message_is_much_longer_than_a_chunk() -> None:
    payloads = (b"a" * 2_500_000, b"b" * 10)
    result = TaskResult(
        task_id="t", client_key="", state=TaskState.SUCCEEDED, succeeded_samples=1, planned_samples=1, payloads=payloads
    )
    reply = CollectReply(submission_id="s", results=(result,))
    sizes = [collecting_pb2.CollectResultsResponse(parts=parts).ByteSize() for parts in encode_chunks(reply)]
    assert len(sizes) == 4
    assert max(sizes) < 1.01 * (1 << 20)
    assert travel(reply) == reply


def test_a_message_is_made_of_no_more_parts_than_one_turn_of_the_loop_should_make() -> None:
    result = TaskResult(task_id="t", client_key="", state=TaskState.FAILED, succeeded_samples=0, planned_samples=1)
    reply = CollectReply(results=(result,) * (2 * MAX_CHUNK_PARTS))
    assert [len(parts) for parts in encode_chunks(reply)] == [MAX_CHUNK_PARTS, MAX_CHUNK_PARTS, 1]


def test_a_stream_that_lacks_a_result_is_found_out() -> None:
    reply = CollectReply(
        results=tuple(
            TaskResult(task_id=f"t{n}", client_key="", state=TaskState.FAILED, succeeded_samples=0, planned_samples=1)
            for n in range(2)
        )
    )
    (parts,) = encode_chunks(reply)
    with pytest.raises(ServerError, match="2 results were sent and 1 arrived"):
        CollectReader().read(parts[1:])


def test_every_fault_of_a_request_is_named() -> None:
    message = collecting_pb2.CollectResultsRequest(
        request_id="", submission_id="s", max_num=0, min_num=3, timeout_seconds=float("nan")
    )
    message.batch_id.step = -1
    with pytest.raises(InvalidArgumentError) as caught:
        decode_collect_request(message)
    assert {violation.field for violation in caught.value.violations} == {"batch_id.step"}
    message.batch_id.step = 1
    with pytest.raises(InvalidArgumentError) as caught:
        decode_collect_request(message)
    assert {violation.field for violation in caught.value.violations} == {
        "request_id",
        "submission_id",
        "timeout_seconds",
        "max_num",
    }
