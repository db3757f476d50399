"""Runs the samples of an attempt in this loop: run, then eval, and turns whatever the handler does into one SampleDone
to a sample. Scores groups likewise.

This is the one boundary where a handler's exceptions are caught.
"""

from __future__ import annotations

import asyncio
import logging
import math
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import msgspec

from py_scheduler.domain.results import (
    NO_METRICS,
    NO_REWARD,
    AgentResult,
    AttemptState,
    Outcome,
    Reward,
    SampleDone,
    Timings,
    classify_termination,
)
from py_scheduler.domain.task import Sample
from py_scheduler.domain.values.plain import are_plain, details_json, plain_number, safe_text
from py_scheduler.errors import RunnerLostError
from py_scheduler.execution.attempt import AttemptReport
from py_scheduler.execution.episode import HandlerEpisode
from py_scheduler.execution.outcomes import classify_abort, describe

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.execution.attempt import RunningAttempt, RunningGroup
    from py_scheduler.execution.episode import EpisodeServices
    from py_scheduler.execution.workers import Worker

logger = logging.getLogger(__name__)

_MAX_DETAILS_BYTES = 1 << 20
_MAX_GROUP_DETAILS_BYTES = 16 << 20
"""Of all rewards of a group: they travel in one event, which has to fit a message."""
_MAX_PAYLOAD_BYTES = 16 << 20
"""Of all samples of a SubTask: it travels in one event, which has to fit a message."""
_MAX_LOGGED = 1_000
_logged: set[tuple[str, str, str]] = set()
"""Evaluator, phase and description of the failures that the log has a traceback of."""

# Members by name: Python 3.11 looks them up through the metaclass, five times slower, and these are on the way of
# every sample.
_SUCCEEDED: Final = AttemptState.SUCCEEDED
_INFRA_OTHER: Final = Outcome.INFRA_OTHER
_Returned = TypeVar("_Returned", AgentResult, Reward)


class InlineRunner:
    """The event loop itself, and the handle there: as many handlers run in it at once as there are workers. Implements
    `execution.runner.Runners` and `RunnerHandle`.
    """

    kind = "inline"
    is_usable = True

    @property
    def standing_handle(self) -> InlineRunner:
        return self

    async def start(self) -> None: ...

    async def take_handle(self, _token: PlacementToken | None) -> InlineRunner:
        return self

    def run(
        self, running: RunningAttempt, worker: Worker, spec: EvaluatorSpec, services: EpisodeServices
    ) -> Coroutine[Any, Any, AttemptReport]:
        # Not a coroutine around a coroutine: this is on the way of every sample.
        return run_samples(running, worker, spec, services, spec.handler)

    def leave(self) -> None: ...

    async def score_group(
        self, group: RunningGroup, worker: Worker, spec: EvaluatorSpec
    ) -> tuple[tuple[Reward, ...], str]:
        return await score_group(group, worker, spec, spec.handler)

    def views(self) -> list[RunnerView]:
        return []

    async def close(self) -> None: ...


INLINE = InlineRunner()


async def run_samples(
    running: RunningAttempt, worker: Worker, spec: EvaluatorSpec, services: EpisodeServices, handler: BaseAgent
) -> AttemptReport:
    """Runs the samples of an attempt one after the other.

    The first sample that does not succeed ends the attempt, unless the task keeps those that succeed beside it. A stop
    always ends it, and so does the end of its runner.
    """
    planned = running.planned
    samples: list[SampleDone] = []
    report_state, message = _SUCCEEDED, ""
    for sample_no in range(planned.first_sample_no, planned.first_sample_no + planned.sample_count):
        running.sample_no = sample_no
        sample = Sample(task_id=planned.ref.task_id, sample_no=sample_no, task=planned.task)
        episode = HandlerEpisode(services, spec, sample, running)
        state, done = await run_sample(running, worker, episode, handler, spec, services.clock)
        samples.append(done)
        if state is not _SUCCEEDED:
            report_state, message = state, message or running.stop_reason or done.error
            is_over = running.stop_cause is not None or state is AttemptState.LOST
            if is_over or not planned.task.config.keeps_partial:
                break
    return AttemptReport(report_state, tuple(samples), message, running.payload)


class _Progress:
    """What is known of a sample while it runs."""

    __slots__ = ("eval_at", "outcome", "result", "reward", "run_at")

    def __init__(self, run_at: float) -> None:
        self.run_at = run_at
        self.eval_at: float | None = None
        self.result: AgentResult | None = None
        self.reward = NO_REWARD
        self.outcome = _INFRA_OTHER


async def run_sample(
    running: RunningAttempt,
    worker: Worker,
    episode: HandlerEpisode,
    handler: BaseAgent,
    spec: EvaluatorSpec,
    clock: Clock,
) -> tuple[AttemptState, SampleDone]:
    """Never raises for what the handler does; lets only the end of the worker itself pass."""
    progress = _Progress(clock.monotonic())
    error = ""
    try:
        await _run_then_eval(progress, running, worker, episode, handler, spec, clock)
        state = _SUCCEEDED
    except asyncio.CancelledError as cancelled:
        if worker.is_closing:
            raise
        error = describe(cancelled) + ": raised by the handler itself"
        state = AttemptState.FAILED
    except GeneratorExit:
        raise
    except RunnerLostError as lost:
        # The machinery failed, whatever its last request had met.
        error, state = safe_text(str(lost)), AttemptState.LOST
    except BaseException as raised:  # noqa: BLE001 -- no handler ends the service, by SystemExit or otherwise
        if worker.turn.is_over_for(progress.run_at, clock.monotonic()):
            await _next_turn(running, worker)
        # The failed generation says more than what a client's library, or a child process that ended, made of it.
        progress.outcome = classify_abort(episode.client_failure or raised)
        error, state = describe(raised), AttemptState.FAILED
        who = f"sample {episode.sample.sample_no} of task {episode.sample.task_id}"
        _log_failure(who, running.phase, spec, error, raised)
    now = clock.monotonic()
    if now >= worker.turn.ends_at and worker.turn.is_over_for(progress.run_at, now):
        await _next_turn(running, worker)
    episode.close()
    while not episode.is_quiet:
        await _wait_quiet(episode, worker)
    if worker.task.cancelling():
        await worker.absorb_cancellation()
    if running.stop_cause is not None:
        state, progress.outcome, error = (
            running.stop_cause.attempt_state,
            running.stop_cause.outcome,
            running.stop_reason,
        )
        progress.reward = NO_REWARD
    return state, _sample_done(progress, running, episode, error, now)


async def _run_then_eval(
    progress: _Progress,
    running: RunningAttempt,
    worker: Worker,
    episode: HandlerEpisode,
    handler: BaseAgent,
    spec: EvaluatorSpec,
    clock: Clock,
) -> None:
    running.begin_phase("run", spec.run_timeout_seconds)
    returned = await handler.run(episode)
    now = clock.monotonic()
    if now >= worker.turn.ends_at and worker.turn.is_over_for(progress.run_at, now):
        await _next_turn(running, worker)
    result = progress.result = checked_result(returned, handler)
    if running.stop_cause is not None:
        return
    progress.eval_at = now
    running.begin_phase("eval", spec.eval_timeout_seconds)
    reward = progress.reward = checked_reward(await handler.eval(episode, result), handler, "eval")
    if result.payload:
        if len(running.payload) + len(result.payload) > _MAX_PAYLOAD_BYTES:
            raise ValueError(f"{type(handler).__name__} gave over {_MAX_PAYLOAD_BYTES} bytes of payload in a SubTask")
        running.payload += result.payload
    progress.outcome = classify_termination(reward.score, result.termination_reason, spec.solve_threshold)


async def score_group(
    group: RunningGroup, worker: Worker, spec: EvaluatorSpec, handler: BaseAgent
) -> tuple[tuple[Reward, ...], str]:
    """The handler's rewards of a whole group, one to a sample, or else what went wrong.

    Like `run_sample` it never raises for what the handler does.
    """
    rewards: tuple[Reward, ...] = ()
    error = ""
    try:
        rewards = checked_rewards(await handler.eval_group(group.task, group.samples), len(group.samples), handler)
    except asyncio.CancelledError as cancelled:
        if worker.is_closing:
            raise
        error = f"eval_group: {describe(cancelled)}: raised by the handler itself"
    except GeneratorExit:
        raise
    except BaseException as raised:  # noqa: BLE001 -- as above
        error = f"eval_group: {describe(raised)}"
        _log_failure(f"task {group.task_id}", "eval_group", spec, error, raised)
    await worker.absorb_cancellation()
    return rewards, error


def checked_rewards(rewards: object, count: int, handler: BaseAgent) -> tuple[Reward, ...]:
    """What `eval_group` returned, if it is one reward to a sample. Raises TypeError, ValueError."""
    name = type(handler).__name__
    if not isinstance(rewards, list | tuple):
        raise TypeError(f"{name}.eval_group returned {type(rewards).__name__}, not a list of Reward")
    if len(rewards) != count:
        raise ValueError(f"{name}.eval_group returned {len(rewards)} rewards for {count} samples")
    checked = tuple([checked_reward(reward, handler, "eval_group") for reward in rewards])
    if sum(len(msgspec.json.encode(reward.details)) for reward in checked if reward.details) > _MAX_GROUP_DETAILS_BYTES:
        raise ValueError(f"{name}.eval_group gave over {_MAX_GROUP_DETAILS_BYTES} bytes of details in all")
    return checked


def _log_failure(who: str, phase: str, spec: EvaluatorSpec, error: str, raised: BaseException) -> None:
    """Logs the first failure of its kind with its traceback: a broken handler shows, and does not flood the log."""
    kind = (spec.evaluator_id, phase, error)
    level = logging.DEBUG if kind in _logged else logging.WARNING
    if len(_logged) < _MAX_LOGGED:
        _logged.add(kind)
    where = f"{who} raised in {phase} of {spec.evaluator_id!r}"
    logger.log(level, "%s (later ones like it are logged at debug level)", where, exc_info=raised)


def checked_result(value: object, handler: BaseAgent) -> AgentResult:
    """What `run` returned, if it is an AgentResult in every field, with names that can be stored. Raises TypeError."""
    if isinstance(value, AgentResult) and value.metrics:
        measured: Any = value.metrics
        if isinstance(measured, dict):
            measured = {name: plain_number(number) for name, number in measured.items()}
            value = msgspec.structs.replace(value, metrics=measured)
    result = _checked(value, AgentResult, handler, "run")
    if all(type(name) is str and name.isascii() for name in result.metrics):
        return result
    metrics = {safe_text(name): number for name, number in result.metrics.items()}
    return msgspec.structs.replace(result, metrics=metrics)


def checked_reward(value: object, handler: BaseAgent, method: str) -> Reward:
    """With the score as a number and details that can be sent and stored, whatever they were made of.

    Raises TypeError, ValueError.
    """
    name = type(handler).__name__
    if type(value) is Reward and type(value.score) is float and type(value.details) is dict and not value.details:
        reward = Reward(score=value.score)  # Most are like that; the other branch comes to the same.
    else:
        reward = _checked_with_details(value, handler, method)
    if not math.isfinite(reward.score):
        raise ValueError(f"{name}.{method} gave the score {reward.score}")
    return reward


def _checked_with_details(value: object, handler: BaseAgent, method: str) -> Reward:
    if isinstance(value, Reward):
        details: Any = value.details
        if isinstance(details, dict) and details:
            # A copy, so that neither a later change nor an odd object reaches what lies behind.
            details = _plain_details(details, f"{type(handler).__name__}.{method}")
        value = Reward(score=cast("float", plain_number(value.score)), details=details)
    return _checked(value, Reward, handler, method)


def _plain_details(details: dict[str, Any], method: str) -> dict[str, Any]:
    if are_plain(details):
        return details.copy()
    encoded = details_json(details)
    if len(encoded) > _MAX_DETAILS_BYTES:
        raise ValueError(f"{method} gave over {_MAX_DETAILS_BYTES} bytes of details")
    return msgspec.json.decode(encoded, type=dict[str, Any])


def _checked(value: object, kind: type[_Returned], handler: BaseAgent, method: str) -> _Returned:
    """What a handler returned, if every field has its type: constructors check none."""
    name = type(handler).__name__
    if not isinstance(value, kind):
        raise TypeError(f"{name}.{method} returned {type(value).__name__}, not {kind.__name__}")
    try:
        return msgspec.convert(msgspec.structs.asdict(value), kind)
    except msgspec.ValidationError as error:
        raise TypeError(f"{name}.{method} returned a {kind.__name__} that is not one: {error}") from error


async def _next_turn(running: RunningAttempt, worker: Worker) -> None:
    """Many handlers may be done at the same moment. They wait for a turn of the loop each, and no limit of theirs takes
    time meanwhile. A stop that comes meanwhile is in `running`.
    """
    running.stop_clock()
    try:
        await worker.turn.next()
    except asyncio.CancelledError:
        if worker.is_closing:
            raise
    finally:
        running.start_clock()


async def _wait_quiet(episode: HandlerEpisode, worker: Worker) -> None:
    """Waits until the tokens that clients of the episode have generated are in its record."""
    try:
        await episode.wait_quiet()
    except asyncio.CancelledError:
        if worker.is_closing:
            raise


def _text_only(said: object) -> str:
    if type(said) is str and said.isascii():
        return said  # Most are like that; the other branch comes to the same.
    return safe_text(said) if isinstance(said, str) else ""


def _sample_done(
    progress: _Progress, running: RunningAttempt, episode: HandlerEpisode, error: str, now: float
) -> SampleDone:
    sample = episode.sample
    run_end = progress.eval_at if progress.eval_at is not None else now
    return SampleDone(
        task_id=sample.task_id,
        sample_no=sample.sample_no,
        attempt_no=episode.attempt_no,
        outcome=progress.outcome,
        reward=progress.reward,
        trajectory=episode.trajectory(),
        termination_reason=_text_only(
            (progress.result and progress.result.termination_reason) or episode.termination_reason
        ),
        error=error,
        phase=running.phase if error else "",
        node_ip=running.node_ip,
        gpu_ids=running.gpu_ids,
        # The attempt looks at the wall clock once, at its begin; from there on its time is monotonic.
        started_unix_seconds=running.began_unix_seconds + (progress.run_at - running.began_at),
        weight_epoch=episode.weight_epoch,
        staleness=episode.staleness,
        timings=Timings(
            wait_seconds=progress.run_at - running.planned.queued_at,
            run_seconds=run_end - progress.run_at,
            generate_seconds=episode.generate_seconds,
            eval_seconds=now - run_end,
        ),
        metrics=(progress.result and progress.result.metrics) or NO_METRICS,
    )
