"""Events and stream frames on the wire (event.proto).

An event is encoded once, as a frame that holds nothing else, and the bytes are kept on its record for all watchers:
concatenating serialised messages merges them, so a frame of many events is their bytes in a row and then the frame's
own fields.
Messages are filled field by field: with this protobuf that is three times faster than constructor arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler._generated.rollout_scheduler.v1 import event_pb2, scheduler_service_pb2
from py_scheduler.domain.events import (
    AbortRequested,
    AttemptEnded,
    AttemptStarted,
    EndpointsSet,
    ResultsAcknowledged,
    ResultsCollected,
    ResultsDiscarded,
    TaskDone,
    TasksAccepted,
    TrainingResumed,
    WeightsChanged,
)
from py_scheduler.domain.requests import TasksAcceptedNotice, WatchedEvent, WatchedFrame, WatchedRecord
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.wire.common.fields import ATTEMPT_STATES, OUTCOMES, STOP_CAUSES, TASK_STATES
from py_scheduler.wire.results import decode_reward, decode_sample, encode_reward, encode_sample
from py_scheduler.wire.tasks import encode_batch_id

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from py_scheduler.domain.events import EventRecord, JournalledEvent
    from py_scheduler.domain.requests import EventFrame
    from py_scheduler.domain.task import BatchId
    from py_scheduler.wire.common.cursor import CursorCodec


# Domain to wire


MAX_FRAME_BYTES = 1 << 20
"""Frames are closed above this size: a step of long trajectories is many messages, none near the limit of one."""


def encode_frames(frame: EventFrame, cursors: CursorCodec, max_bytes: int = MAX_FRAME_BYTES) -> Iterator[bytes]:
    """One serialised WatchEventsResponse, or several that follow on one another when there is much to carry."""
    after = frame.after_sequence
    parts: list[bytes] = []
    size = 0
    for record in frame.records:
        encoded = record.encoded or encode_record(record)
        if parts and size + len(encoded) > max_bytes:
            through = record.sequence - 1
            yield _join(parts, after, through, cursors)
            after, parts, size = through, [], 0
        parts.append(encoded)
        size += len(encoded)
    yield _join(parts, after, frame.through_sequence, cursors)


def _join(parts: list[bytes], after: int, through: int, cursors: CursorCodec) -> bytes:
    own = scheduler_service_pb2.WatchEventsResponse()
    own.after_sequence = after
    own.through_sequence = through
    own.cursor = cursors.encode(through)
    parts.append(own.SerializeToString())
    return b"".join(parts)


def encode_record(record: EventRecord) -> bytes:
    """Encodes an event and keeps the bytes on its record."""
    frame = scheduler_service_pb2.WatchEventsResponse()
    fill_event(record.event, record.sequence, frame.events.add())
    record.encoded = encoded = frame.SerializeToString()
    return encoded


def fill_event(event: JournalledEvent, sequence: int, message: event_pb2.Event) -> None:
    """Fills an empty message."""
    message.sequence = sequence
    message.unix_seconds = event.unix_seconds
    if event.submission_id:
        message.submission_id = event.submission_id
    _FILLERS[type(event)](event, message)


def _fill_tasks_accepted(event: TasksAccepted, message: event_pb2.Event) -> None:
    message.tasks_accepted.batch_id.CopyFrom(encode_batch_id(event.batch_id))
    message.tasks_accepted.task_ids.extend([accepted.task_id for accepted in event.tasks])


def _fill_attempt_started(event: AttemptStarted, message: event_pb2.Event) -> None:
    started = message.attempt_started
    started.task_id = event.task_id
    if event.subtask_no:
        started.subtask_no = event.subtask_no
    started.attempt_no = event.attempt_no
    if event.node_ip:
        started.node_ip = event.node_ip
        started.gpu_ids.extend(event.gpu_ids)


def _fill_attempt_ended(event: AttemptEnded, message: event_pb2.Event) -> None:
    ended = message.attempt_ended
    ended.task_id = event.task_id
    if event.subtask_no:
        ended.subtask_no = event.subtask_no
    ended.attempt_no = event.attempt_no
    ended.state = ATTEMPT_STATES.number_of[event.state]
    for sample in event.samples:
        encode_sample(sample, ended.samples.add())
    if event.message:
        ended.message = safe_text(event.message)
    if event.next_attempt_no:
        ended.next_attempt_no = event.next_attempt_no
    if event.payload:
        ended.payload = event.payload
    if event.running_seconds:
        ended.running_seconds = event.running_seconds


def _fill_abort_requested(event: AbortRequested, message: event_pb2.Event) -> None:
    abort = message.abort_requested
    abort.task_ids.extend(event.task_ids)
    abort.reason = safe_text(event.reason)
    abort.cause = STOP_CAUSES.number_of[event.cause]
    abort.keeps_results = event.keeps_results
    abort.restarts_runners = event.restarts_runners


def _fill_task_done(event: TaskDone, message: event_pb2.Event) -> None:
    done = message.task_done
    done.task_id = event.task_id
    if event.client_key:
        done.client_key = event.client_key
    done.state = TASK_STATES.number_of[event.state]
    done.planned_samples = event.planned_samples
    for outcome, count in event.outcomes.items():
        entry = done.outcomes.add()
        entry.outcome = OUTCOMES.number_of[outcome]
        entry.count = count
    if event.reason:
        done.reason = safe_text(event.reason)
    for reward in event.rewards:
        encode_reward(reward, done.rewards.add())
    done.group_outcomes.extend([OUTCOMES.number_of[outcome] for outcome in event.group_outcomes])


def _fill_weights_changed(event: WeightsChanged, message: event_pb2.Event) -> None:
    changed = message.weights_changed
    changed.SetInParent()
    changed.roles.extend(event.roles)
    changed.weight_version = safe_text(event.weight_version)
    changed.weight_epoch = event.epoch


def _fill_training_resumed(event: TrainingResumed, message: event_pb2.Event) -> None:
    # Epoch 0 would leave the kind unset.
    message.training_resumed.SetInParent()
    message.training_resumed.weight_epoch = event.epoch


def _fill_endpoints_set(event: EndpointsSet, message: event_pb2.Event) -> None:
    message.endpoints_set.SetInParent()
    message.endpoints_set.roles.extend(event.roles)


def _fill_collected(event: ResultsCollected, message: event_pb2.Event) -> None:
    message.results_collected.request_id = event.request_id
    message.results_collected.task_ids.extend(event.task_ids)


def _fill_acknowledged(event: ResultsAcknowledged, message: event_pb2.Event) -> None:
    message.results_acknowledged.request_id = event.request_id


def _fill_discarded(_event: ResultsDiscarded, message: event_pb2.Event) -> None:
    message.results_discarded.SetInParent()


_FILLERS: dict[type, Callable[[Any, event_pb2.Event], None]] = {
    TasksAccepted: _fill_tasks_accepted,
    AttemptStarted: _fill_attempt_started,
    AttemptEnded: _fill_attempt_ended,
    AbortRequested: _fill_abort_requested,
    TaskDone: _fill_task_done,
    WeightsChanged: _fill_weights_changed,
    TrainingResumed: _fill_training_resumed,
    ResultsCollected: _fill_collected,
    ResultsAcknowledged: _fill_acknowledged,
    ResultsDiscarded: _fill_discarded,
    EndpointsSet: _fill_endpoints_set,
}


# Wire to domain


def decode_frame(message: scheduler_service_pb2.WatchEventsResponse) -> WatchedFrame:
    """Events of kinds that this version does not know are left out: a newer server may send some.

    Raises InvalidArgumentError for what else only a newer server could have sent.
    """
    records = []
    for encoded in message.events:
        event = decode_event(encoded)
        if event is not None:
            records.append(WatchedRecord(encoded.sequence, event))
    return WatchedFrame(
        after_sequence=message.after_sequence,
        through_sequence=message.through_sequence,
        records=tuple(records),
        cursor=message.cursor,
    )


def decode_event(message: event_pb2.Event) -> WatchedEvent | None:
    """None for a kind that this version does not know."""
    decode = _DECODERS.get(message.WhichOneof("kind") or "")
    return None if decode is None else decode(message)


def _decode_tasks_accepted(message: event_pb2.Event) -> TasksAcceptedNotice:
    accepted = message.tasks_accepted
    batch_id: BatchId = accepted.batch_id.label or accepted.batch_id.step
    return TasksAcceptedNotice(
        submission_id=message.submission_id,
        batch_id=batch_id,
        task_ids=tuple(accepted.task_ids),
        unix_seconds=message.unix_seconds,
    )


def _decode_attempt_started(message: event_pb2.Event) -> AttemptStarted:
    started = message.attempt_started
    node_ip = started.node_ip
    return AttemptStarted(
        submission_id=message.submission_id,
        task_id=started.task_id,
        subtask_no=started.subtask_no,
        attempt_no=started.attempt_no,
        node_ip=node_ip,
        gpu_ids=tuple(started.gpu_ids) if node_ip else (),
        unix_seconds=message.unix_seconds,
    )


def _decode_attempt_ended(message: event_pb2.Event) -> AttemptEnded:
    ended = message.attempt_ended
    return AttemptEnded(
        submission_id=message.submission_id,
        task_id=ended.task_id,
        subtask_no=ended.subtask_no,
        attempt_no=ended.attempt_no,
        state=ATTEMPT_STATES.member(ended.state, "attempt_ended.state"),
        samples=tuple([decode_sample(sample) for sample in ended.samples]),
        message=ended.message,
        next_attempt_no=ended.next_attempt_no,
        unix_seconds=message.unix_seconds,
        payload=ended.payload,
        running_seconds=ended.running_seconds,
    )


def _decode_abort_requested(message: event_pb2.Event) -> AbortRequested:
    abort = message.abort_requested
    return AbortRequested(
        submission_id=message.submission_id,
        task_ids=tuple(abort.task_ids),
        cause=STOP_CAUSES.member(abort.cause, "abort_requested.cause"),
        reason=abort.reason,
        unix_seconds=message.unix_seconds,
        keeps_results=abort.keeps_results,
        restarts_runners=abort.restarts_runners,
    )


def _decode_task_done(message: event_pb2.Event) -> TaskDone:
    done = message.task_done
    return TaskDone(
        submission_id=message.submission_id,
        task_id=done.task_id,
        client_key=done.client_key,
        state=TASK_STATES.member(done.state, "task_done.state"),
        planned_samples=done.planned_samples,
        outcomes={OUTCOMES.member(entry.outcome, "task_done.outcomes"): entry.count for entry in done.outcomes},
        reason=done.reason,
        unix_seconds=message.unix_seconds,
        rewards=tuple([decode_reward(reward) for reward in done.rewards]),
        group_outcomes=tuple([OUTCOMES.member(outcome, "task_done.group_outcomes") for outcome in done.group_outcomes]),
    )


def _decode_weights_changed(message: event_pb2.Event) -> WeightsChanged:
    changed = message.weights_changed
    return WeightsChanged(
        roles=tuple(changed.roles),
        weight_version=changed.weight_version,
        epoch=changed.weight_epoch,
        unix_seconds=message.unix_seconds,
    )


def _decode_training_resumed(message: event_pb2.Event) -> TrainingResumed:
    return TrainingResumed(epoch=message.training_resumed.weight_epoch, unix_seconds=message.unix_seconds)


def _decode_endpoints_set(message: event_pb2.Event) -> EndpointsSet:
    return EndpointsSet(roles=tuple(message.endpoints_set.roles), endpoints=None, unix_seconds=message.unix_seconds)


def _decode_collected(message: event_pb2.Event) -> ResultsCollected:
    collected = message.results_collected
    return ResultsCollected(
        submission_id=message.submission_id,
        request_id=collected.request_id,
        task_ids=tuple(collected.task_ids),
        unix_seconds=message.unix_seconds,
    )


def _decode_acknowledged(message: event_pb2.Event) -> ResultsAcknowledged:
    return ResultsAcknowledged(
        submission_id=message.submission_id,
        request_id=message.results_acknowledged.request_id,
        unix_seconds=message.unix_seconds,
    )


def _decode_discarded(message: event_pb2.Event) -> ResultsDiscarded:
    return ResultsDiscarded(submission_id=message.submission_id, unix_seconds=message.unix_seconds)


_DECODERS: dict[str, Callable[[event_pb2.Event], WatchedEvent]] = {
    "tasks_accepted": _decode_tasks_accepted,
    "attempt_started": _decode_attempt_started,
    "attempt_ended": _decode_attempt_ended,
    "abort_requested": _decode_abort_requested,
    "task_done": _decode_task_done,
    "weights_changed": _decode_weights_changed,
    "training_resumed": _decode_training_resumed,
    "results_collected": _decode_collected,
    "results_acknowledged": _decode_acknowledged,
    "results_discarded": _decode_discarded,
    "endpoints_set": _decode_endpoints_set,
}
