"""Collecting on the wire (collecting.proto): a set of results as a stream of parts, and the parts as a set again.

A message carries about a mebibyte of parts, so that a step of gigabytes needs no giant one; payloads are cut where they
are longer. A sample is never cut: it must fit into a message.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import collecting_pb2
from py_scheduler.domain.collecting import (
    DEFAULT_COLLECT_SECONDS,
    CollectReply,
    CollectRequest,
    TaskResult,
    UnfinishedTask,
)
from py_scheduler.domain.limits import check_collect, name_fault
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import ServerError
from py_scheduler.wire.common.fields import TASK_STATES, Faults
from py_scheduler.wire.requests import decode_namespace, decode_selector
from py_scheduler.wire.results import decode_sample, encode_sample
from py_scheduler.wire.tasks import decode_batch_id, encode_batch_id

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from py_scheduler.domain.requests import SubmissionSelector
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import BatchId

MAX_CHUNK_BYTES = 1 << 20
MAX_CHUNK_PARTS = 1_000
"""Of one message, which is made within one turn of the loop: small parts take long to make for what they weigh."""


# Requests


def decode_collect_request(message: collecting_pb2.CollectResultsRequest) -> CollectRequest:
    """Raises InvalidArgumentError naming each faulty field."""
    faults = Faults()
    request = CollectRequest(
        request_id=message.request_id,
        batch_id=_batch_id(message, faults),
        submission_id=message.submission_id,
        namespace=decode_namespace(message.namespace, faults),
        min_num=message.min_num if message.HasField("min_num") else None,
        max_num=message.max_num if message.HasField("max_num") else None,
        timeout_seconds=message.timeout_seconds if message.HasField("timeout_seconds") else DEFAULT_COLLECT_SECONDS,
        wait_after_min_seconds=message.wait_after_min_seconds if message.HasField("wait_after_min_seconds") else None,
        clear_unfinished=not message.leave_unfinished,
        include_partial=message.include_partial,
        with_payloads=not message.without_payloads,
    )
    faults.check()
    faults.add_all("", check_collect(request))
    faults.check()
    return request


def decode_drain_request(message: collecting_pb2.DrainSubmissionRequest) -> CollectRequest:
    """Raises InvalidArgumentError naming each faulty field."""
    faults = Faults()
    request = CollectRequest(
        request_id=message.request_id,
        batch_id=_batch_id(message, faults),
        submission_id=message.submission_id,
        namespace=decode_namespace(message.namespace, faults),
        with_payloads=not message.without_payloads,
    )
    faults.check()
    faults.add_all("", check_collect(request))
    faults.check()
    return request


def _batch_id(
    message: collecting_pb2.CollectResultsRequest | collecting_pb2.DrainSubmissionRequest, faults: Faults
) -> BatchId | None:
    return decode_batch_id(message.batch_id, "batch_id", faults) if message.HasField("batch_id") else None


def encode_collect_request(request: CollectRequest) -> collecting_pb2.CollectResultsRequest:
    """Raises InvalidArgumentError for one that the server would refuse anyway."""
    faults = Faults()
    faults.add_all("", check_collect(request))
    faults.check()
    return collecting_pb2.CollectResultsRequest(
        request_id=request.request_id,
        batch_id=None if request.batch_id is None else encode_batch_id(request.batch_id),
        submission_id=request.submission_id,
        namespace=request.namespace,
        min_num=request.min_num,
        max_num=request.max_num,
        timeout_seconds=request.timeout_seconds,
        wait_after_min_seconds=request.wait_after_min_seconds,
        leave_unfinished=not request.clear_unfinished,
        include_partial=request.include_partial,
        without_payloads=not request.with_payloads,
    )


def encode_drain_request(request: CollectRequest) -> collecting_pb2.DrainSubmissionRequest:
    return collecting_pb2.DrainSubmissionRequest(
        request_id=request.request_id,
        batch_id=None if request.batch_id is None else encode_batch_id(request.batch_id),
        submission_id=request.submission_id,
        namespace=request.namespace,
        without_payloads=not request.with_payloads,
    )


def decode_ack_request(message: collecting_pb2.AckResultsRequest) -> tuple[str, str]:
    """Namespace and request id. Raises InvalidArgumentError."""
    faults = Faults()
    namespace = decode_namespace(message.namespace, faults)
    faults.check()
    return namespace, message.request_id


def encode_ack_request(namespace: str, request_id: str) -> collecting_pb2.AckResultsRequest:
    return collecting_pb2.AckResultsRequest(namespace=namespace, request_id=request_id)


def decode_discard_request(message: collecting_pb2.DiscardSubmissionRequest) -> tuple[SubmissionSelector, str]:
    """And its request id. Raises InvalidArgumentError naming each faulty field."""
    faults = Faults()
    selector = decode_selector(message, faults)
    if message.request_id and (fault := name_fault(message.request_id)):
        faults.add("request_id", fault)
    faults.check()
    return selector, message.request_id


def encode_discard_request(
    selector: SubmissionSelector, request_id: str = ""
) -> collecting_pb2.DiscardSubmissionRequest:
    return collecting_pb2.DiscardSubmissionRequest(
        submission_id=selector.submission_id,
        batch_id=None if selector.batch_id is None else encode_batch_id(selector.batch_id),
        namespace=selector.namespace,
        request_id=request_id,
    )


# Domain to wire


def encode_chunks(
    reply: CollectReply, max_bytes: int = MAX_CHUNK_BYTES
) -> Iterator[list[collecting_pb2.CollectedPart]]:
    """The parts of a reply, as many to a list as one message should carry. The summary is the last."""
    parts: list[collecting_pb2.CollectedPart] = []
    size = 0
    for part in _parts(reply, max_bytes):
        part_size = part.ByteSize()
        if parts and (size + part_size > max_bytes or len(parts) == MAX_CHUNK_PARTS):
            yield parts
            parts, size = [], 0
        parts.append(part)
        size += part_size
    yield parts


def _parts(reply: CollectReply, max_bytes: int) -> Iterator[collecting_pb2.CollectedPart]:
    for result in reply.results:
        yield _result_part(result)
        for sample in result.samples:
            part = collecting_pb2.CollectedPart()
            encode_sample(sample, part.sample)
            yield part
        for payload in result.payloads:
            for start in range(0, len(payload), max_bytes):
                end = start + max_bytes
                yield collecting_pb2.CollectedPart(
                    payload=collecting_pb2.PayloadPart(data=payload[start:end], continues=end < len(payload))
                )
    yield _summary_part(reply)


def _result_part(result: TaskResult) -> collecting_pb2.CollectedPart:
    return collecting_pb2.CollectedPart(
        result=collecting_pb2.TaskResult(
            task_id=result.task_id,
            client_key=result.client_key,
            state=TASK_STATES.number_of[result.state],
            succeeded_samples=result.succeeded_samples,
            planned_samples=result.planned_samples,
            is_eval=result.is_eval,
            message=safe_text(result.message),
            metrics={safe_text(name): value for name, value in result.metrics.items()},
        )
    )


def _summary_part(reply: CollectReply) -> collecting_pb2.CollectedPart:
    summary = collecting_pb2.CollectSummary(
        submission_id=reply.submission_id,
        results=len(reply.results),
        is_timed_out=reply.is_timed_out,
        warnings=[safe_text(warning) for warning in reply.warnings],
    )
    for task in reply.unfinished:
        summary.unfinished.add(
            task_id=task.task_id,
            client_key=task.client_key,
            succeeded_samples=task.succeeded_samples,
            planned_samples=task.planned_samples,
            is_stopped=task.is_stopped,
            reason=safe_text(task.reason),
        )
    return collecting_pb2.CollectedPart(summary=summary)


# Wire to domain


class CollectReader:
    """Puts the parts of one stream together. `reply` is None until the last one was read."""

    def __init__(self) -> None:
        self.reply: CollectReply | None = None
        self._results: list[TaskResult] = []
        self._open: TaskResult | None = None
        self._samples: list[SampleDone] = []
        self._payloads: list[bytes] = []
        self._pieces: list[bytes] = []

    def read(self, parts: Iterable[collecting_pb2.CollectedPart]) -> None:
        """Raises ServerError when the stream is not whole."""
        for part in parts:
            kind = part.WhichOneof("part")
            if kind == "result":
                self._close()
                self._open = _decode_result(part.result)
            elif kind == "sample":
                self._samples.append(decode_sample(part.sample))
            elif kind == "payload":
                self._pieces.append(part.payload.data)
                if not part.payload.continues:
                    self._payloads.append(b"".join(self._pieces))
                    self._pieces = []
            elif kind == "summary":
                self._close()
                self._finish(part.summary)

    def _close(self) -> None:
        if self._open is None:
            return
        self._results.append(
            msgspec.structs.replace(self._open, samples=tuple(self._samples), payloads=tuple(self._payloads))
        )
        self._open, self._samples, self._payloads = None, [], []

    def _finish(self, summary: collecting_pb2.CollectSummary) -> None:
        if summary.results != len(self._results) or self._pieces:
            raise ServerError(
                f"{summary.results} results were sent and {len(self._results)} arrived: collect again with the same "
                "request_id",
                "DATA_LOSS",
            )
        self.reply = CollectReply(
            submission_id=summary.submission_id,
            results=tuple(self._results),
            unfinished=tuple([_decode_unfinished(task) for task in summary.unfinished]),
            is_timed_out=summary.is_timed_out,
            warnings=tuple(summary.warnings),
        )


def _decode_result(message: collecting_pb2.TaskResult) -> TaskResult:
    return TaskResult(
        task_id=message.task_id,
        client_key=message.client_key,
        state=TASK_STATES.member(message.state, "result.state"),
        succeeded_samples=message.succeeded_samples,
        planned_samples=message.planned_samples,
        is_eval=message.is_eval,
        message=message.message,
        metrics=dict(message.metrics),
    )


def _decode_unfinished(message: collecting_pb2.UnfinishedTask) -> UnfinishedTask:
    return UnfinishedTask(
        task_id=message.task_id,
        client_key=message.client_key,
        succeeded_samples=message.succeeded_samples,
        planned_samples=message.planned_samples,
        is_stopped=message.is_stopped,
        reason=message.reason,
    )
