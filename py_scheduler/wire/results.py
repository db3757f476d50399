"""Samples' terminal records on the wire (task.proto). Token ids, log-probs and loss mask travel as bytes, untouched.

Messages are filled field by field: with this protobuf that is three times faster than constructor arguments.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.generation import WeightSpan
from py_scheduler.domain.results import NO_METRICS, NO_REWARD, EpisodePhase, Reward, SampleDone, Timings
from py_scheduler.domain.trajectory import EMPTY_TRAJECTORY, Trajectory, Turn
from py_scheduler.domain.values.plain import details_json, safe_text, words_of
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire.common.fields import EPISODE_PHASES, FINISH_REASONS, LOG_PROB_KINDS, OUTCOMES

if TYPE_CHECKING:
    from py_scheduler._generated.rollout_scheduler.v1 import task_pb2

_NO_TIMINGS = Timings()


# Domain to wire


def encode_sample(sample: SampleDone, message: task_pb2.SampleDone) -> None:
    """Fills an empty message. Total: what a handler put into its sample that cannot travel is left out, and the sample
    says so, because an event that cannot be encoded would end every stream it is in.
    """
    try:
        _fill_sample(sample, message)
    except Exception as error:  # noqa: BLE001 - reading a handler's own objects may raise anything
        message.Clear()
        _fill_identity(sample, message)
        _fill_place(sample, message)
        message.error = f"the sample cannot be sent as it is: {words_of(error)}"


def _fill_identity(sample: SampleDone, message: task_pb2.SampleDone) -> None:
    message.task_id = sample.task_id
    if sample.sample_no:
        message.sample_no = sample.sample_no
    message.attempt_no = sample.attempt_no
    message.outcome = OUTCOMES.number_of[sample.outcome]


def _fill_place(sample: SampleDone, message: task_pb2.SampleDone) -> None:
    if sample.node_ip:
        message.node_ip = sample.node_ip
        message.gpu_ids.extend(sample.gpu_ids)
    if sample.started_unix_seconds:
        message.started_unix_seconds = sample.started_unix_seconds
    if sample.weight_epoch is not None:
        message.weight_epoch = sample.weight_epoch
        message.staleness = sample.staleness
    if sample.timings is not _NO_TIMINGS:
        _fill_timings(sample.timings, message.timings)


def _fill_sample(sample: SampleDone, message: task_pb2.SampleDone) -> None:
    _fill_identity(sample, message)
    if sample.reward is not NO_REWARD:
        encode_reward(sample.reward, message.reward)
    if sample.trajectory is not EMPTY_TRAJECTORY:
        encode_trajectory(sample.trajectory, message.trajectory)
    if sample.termination_reason:
        message.termination_reason = sample.termination_reason  # Whoever made the sample made it what UTF-8 carries.
    if sample.error:
        message.error = safe_text(sample.error)
    if sample.phase:
        message.phase = EPISODE_PHASES.number_of[EpisodePhase(sample.phase)]
    if sample.metrics:
        message.metrics.update(sample.metrics)
    _fill_place(sample, message)


def encode_reward(reward: Reward, message: task_pb2.Reward) -> None:
    """Fills an empty message. Of details what cannot travel is replaced by what is wrong with it."""
    message.score = float(reward.score)
    if reward.details:
        message.details_json = details_json(reward.details)


def _fill_timings(timings: Timings, message: task_pb2.Timings) -> None:
    message.wait_seconds = timings.wait_seconds
    message.run_seconds = timings.run_seconds
    if timings.generate_seconds:
        message.generate_seconds = timings.generate_seconds
    message.eval_seconds = timings.eval_seconds


def encode_trajectory(trajectory: Trajectory, message: task_pb2.Trajectory) -> None:
    """Fills an empty message."""
    message.token_ids = trajectory.token_id_bytes
    message.log_probs = trajectory.log_prob_bytes
    message.loss_mask = trajectory.loss_mask_bytes
    for turn in trajectory.turns:
        entry = message.turns.add()
        entry.start = turn.start
        entry.end = turn.end
        entry.source = safe_text(turn.source)
        if turn.text:
            entry.text = safe_text(turn.text)
        if turn.finish_reason is not None:
            entry.finish_reason = FINISH_REASONS.number_of[turn.finish_reason]
        if turn.log_prob_kind is not None:
            entry.log_prob_kind = LOG_PROB_KINDS.number_of[turn.log_prob_kind]
    for span in trajectory.weight_spans:
        part = message.weight_spans.add()
        part.version = safe_text(span.version)
        part.start = span.start
        part.end = span.end


# Wire to domain


def decode_sample(message: task_pb2.SampleDone) -> SampleDone:
    """Raises InvalidArgumentError for an outcome of a newer server."""
    node_ip = message.node_ip
    return SampleDone(
        task_id=message.task_id,
        sample_no=message.sample_no,
        attempt_no=message.attempt_no,
        outcome=OUTCOMES.member(message.outcome, "outcome"),
        reward=decode_reward(message.reward) if message.HasField("reward") else NO_REWARD,
        trajectory=decode_trajectory(message.trajectory) if message.HasField("trajectory") else EMPTY_TRAJECTORY,
        termination_reason=message.termination_reason,
        error=message.error,
        phase=EPISODE_PHASES.member_or_none(message.phase, "phase") or "",
        node_ip=node_ip,
        gpu_ids=tuple(message.gpu_ids) if node_ip else (),
        timings=_decode_timings(message.timings) if message.HasField("timings") else _NO_TIMINGS,
        started_unix_seconds=message.started_unix_seconds,
        weight_epoch=message.weight_epoch if message.HasField("weight_epoch") else None,
        staleness=message.staleness,
        metrics=dict(message.metrics) if message.metrics else NO_METRICS,
    )


def decode_reward(message: task_pb2.Reward) -> Reward:
    details_json = message.details_json
    return Reward(score=message.score, details=_decode_details(details_json) if details_json else {})


def _decode_details(details_json: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(details_json, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        raise InvalidArgumentError(f"is not a JSON object: {error}", "reward.details_json") from error


def _decode_timings(message: task_pb2.Timings) -> Timings:
    return Timings(
        wait_seconds=message.wait_seconds,
        run_seconds=message.run_seconds,
        generate_seconds=message.generate_seconds,
        eval_seconds=message.eval_seconds,
    )


def decode_trajectory(message: task_pb2.Trajectory) -> Trajectory:
    """Raises InvalidArgumentError when the arrays are not of one length."""
    token_ids, log_probs, loss_mask = message.token_ids, message.log_probs, message.loss_mask
    if not len(token_ids) == len(log_probs) == 4 * len(loss_mask):
        lengths = f"{len(token_ids)}, {len(log_probs)} and {len(loss_mask)} bytes"
        raise InvalidArgumentError(f"token_ids, log_probs and loss_mask disagree: {lengths}", "trajectory")
    return Trajectory(
        token_id_bytes=token_ids,
        log_prob_bytes=log_probs,
        loss_mask_bytes=loss_mask,
        turns=tuple([_decode_turn(turn) for turn in message.turns]),
        weight_spans=tuple(WeightSpan(span.version, span.start, span.end) for span in message.weight_spans),
    )


def _decode_turn(message: task_pb2.Turn) -> Turn:
    return Turn(
        start=message.start,
        end=message.end,
        source=message.source,
        text=message.text,
        finish_reason=FINISH_REASONS.member_or_none(message.finish_reason, "turn.finish_reason"),
        log_prob_kind=LOG_PROB_KINDS.member_or_none(message.log_prob_kind, "turn.log_prob_kind"),
    )
