"""Plays one sample: run, then eval, and turns whatever the handler does into one SampleDone.

This is the one boundary where a handler's exceptions are caught.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING

from py_scheduler.domain.results import (
    NO_REWARD,
    AgentResult,
    AttemptState,
    Outcome,
    Reward,
    SampleDone,
    Timings,
)
from py_scheduler.execution.outcomes import classify_abort, classify_termination, describe

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import Clock
    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.execution.episode import HandlerEpisode
    from py_scheduler.execution.evaluator import AttemptBoard

logger = logging.getLogger(__name__)


class _Play:
    """What is known of a sample while it is played."""

    __slots__ = ("eval_at", "outcome", "result", "reward", "run_at")

    def __init__(self, run_at: float) -> None:
        self.run_at = run_at
        self.eval_at: float | None = None
        self.result: AgentResult | None = None
        self.reward = NO_REWARD
        self.outcome = Outcome.INFRA_OTHER


async def play_sample(
    running: RunningAttempt, episode: HandlerEpisode, spec: EvaluatorSpec, board: AttemptBoard, clock: Clock
) -> tuple[AttemptState, SampleDone]:
    """Never raises for what the handler does; lets only the end of the worker itself pass."""
    play = _Play(clock.monotonic())
    error = ""
    try:
        await _run_then_eval(play, running, episode, spec, board, clock)
        state = AttemptState.SUCCEEDED
    except asyncio.CancelledError as cancelled:
        if running.stop_cause is None:
            if running.worker.task.cancelling():
                raise
            error = describe(cancelled) + ": raised by the handler itself"
        state = AttemptState.FAILED
    except (KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as raised:  # SystemExit of a handler must not end the service
        play.outcome, error, state = classify_abort(raised), describe(raised), AttemptState.FAILED
        logger.debug("sample %s/%d raised", episode.sample.task_id, episode.sample.sample_no, exc_info=raised)
    if running.stop_cause is not None:
        _absorb_cancellation(running)
        state, play.outcome, error = running.stop_cause.attempt_state, running.stop_cause.outcome, running.stop_reason
        play.reward = NO_REWARD
    return state, _sample_done(play, running, episode, error, clock.monotonic())


async def _run_then_eval(
    play: _Play,
    running: RunningAttempt,
    episode: HandlerEpisode,
    spec: EvaluatorSpec,
    board: AttemptBoard,
    clock: Clock,
) -> None:
    board.phase_begins(running, "run", spec.run_timeout_seconds)
    episode.phase_deadline = running.phase_deadline
    result = await spec.handler.run(episode)
    if not isinstance(result, AgentResult):
        raise TypeError(f"{type(spec.handler).__name__}.run returned {type(result).__name__}, not AgentResult")
    play.result = result
    if running.stop_cause is not None:
        return
    play.eval_at = clock.monotonic()
    board.phase_begins(running, "eval", spec.eval_timeout_seconds)
    episode.phase_deadline = running.phase_deadline
    reward = await spec.handler.eval(episode, result)
    if not isinstance(reward, Reward):
        raise TypeError(f"{type(spec.handler).__name__}.eval returned {type(reward).__name__}, not Reward")
    if not math.isfinite(reward.score):
        raise ValueError(f"{type(spec.handler).__name__}.eval gave the score {reward.score}")
    play.reward = reward
    play.outcome = classify_termination(reward.score, result.termination_reason, spec.solve_threshold)


def _absorb_cancellation(running: RunningAttempt) -> None:
    """The stop was meant for the attempt, not for its worker."""
    task = running.worker.task
    while task.cancelling() and not running.worker.is_closing:
        task.uncancel()


def _sample_done(play: _Play, running: RunningAttempt, episode: HandlerEpisode, error: str, now: float) -> SampleDone:
    sample = episode.sample
    run_end = play.eval_at if play.eval_at is not None else now
    return SampleDone(
        task_id=sample.task_id,
        sample_no=sample.sample_no,
        attempt_no=episode.attempt_no,
        outcome=play.outcome,
        reward=play.reward,
        trajectory=episode.trajectory(),
        termination_reason=play.result.termination_reason if play.result else "",
        error=error,
        phase=running.phase if error else "",
        node_ip=running.node_ip,
        gpu_ids=running.gpu_ids,
        timings=Timings(
            wait_seconds=play.run_at - running.planned.queued_at,
            run_seconds=run_end - play.run_at,
            generate_seconds=episode.generate_seconds,
            eval_seconds=now - run_end,
        ),
    )
