"""The seam between the scheduler and whatever executes handlers (design words: Runner).

How an attempt reaches a runner, and what whoever writes one has to know:

    permit (permit + token) -> worker -> Evaluator.drain:
        handle = await runners.take_handle(token)    waits until a runner that is known to be alive is ours alone;
                                                 nothing has been taken from the queue yet, so nothing can be lost
        running = board.begin(...)               the ledger: LEASED -> RUNNING; running.began_at, .planned, .token
        report = await handle.play(running)        AttemptReport(state, samples, message)
        board.end(running, report)               the ledger decides: SampleDone, a retry, quarantine
        ... the next attempt of the batch, with the same handle while `handle.is_usable` ...
        handle.leave()                             once, whatever happened

- `Engine(..., runners={evaluator_id: Runners})`; an evaluator that is not named there runs `inline`.
- `play` never raises for what user code does: that is a FAILED report. A runner that died is a LOST report, whose
  message says how it ended; the ledger's loss budget does the rest. Samples that are missing in the report of an
  attempt that did not succeed are made up by the ledger.
- Stops: `running.stop(...)` was called and the worker's task is cancelled, so `play` sees CancelledError at its await.
  It passes the stop on, waits until the work has really ended, and returns `running.stop_cause.attempt_state` (see
  `stopped_report`); the cancellation must not leave `play` (`await absorb_cancellation(running.worker)`), unless
  `running.worker.is_closing`: then it kills what it has started and lets CancelledError pass.
  `running.restarts_runner` asks for the runner to be replaced before it takes other work.
- Set `running.kill` at the beginning of `play` when the work can be ended by force: it is called, once, when
  `stop_grace_seconds` after a stop have passed, and `play` must return soon after. Without it (or when even that does
  not help) the attempt ends without its worker and its token is stranded until `play` returns.
- Phase timeouts are the attempt's: `running.begin_phase("run", seconds)` arms one.
- `take_handle` may raise RunnerGoneError when the token's node is gone for good: the permit ends, what is left of the
  batch is placed anew. Where no runner can be started it gives a handle at which everything is lost (`lost_report`),
  rather
  than wait for ever: a task's own budget bounds how often that happens.

Invariants
  1. A handle is one runner's, and one permit's at a time.
  2. Whoever has a handle calls `leave` exactly once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from py_scheduler.domain.results import AttemptState, Outcome
from py_scheduler.domain.task import Sample
from py_scheduler.errors import RunnerStartError, first_of
from py_scheduler.execution.attempt import AttemptReport, unfinished_sample
from py_scheduler.execution.episode import HandlerEpisode
from py_scheduler.execution.play import play_group, play_sample

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable, Sequence
    from contextlib import AsyncExitStack

    from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.results import Reward, SampleDone
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.domain.task import Task
    from py_scheduler.execution.attempt import RunningAttempt
    from py_scheduler.execution.workers import Worker


class RunnerGoneError(Exception):
    """The node that a token names has no runners any more, or the server is ending."""


# Members by name: Python 3.11 looks them up through the metaclass, five times slower, and these are on the way of
# every sample.
_SUCCEEDED: Final = AttemptState.SUCCEEDED


class RunnerHandle(Protocol):
    """One runner, taken by one permit."""

    @property
    def is_usable(self) -> bool:
        """Whether the runner is still alive and as small as it should be; if not, another handle is taken."""
        ...

    async def play(self, running: RunningAttempt) -> AttemptReport: ...

    async def play_group(
        self, worker: Worker, task_id: str, task: Task, samples: Sequence[SampleDone], spec: EvaluatorSpec
    ) -> tuple[tuple[Reward, ...], str]:
        """As `execution.play.play_group`."""
        ...

    def leave(self) -> None: ...


class Runners(Protocol):
    """All runners of one evaluator."""

    kind: str

    @property
    def standing_handle(self) -> RunnerHandle | None:
        """A handle that is always free, for any number of permits at once; None: handles have to be taken."""
        ...

    async def start(self) -> None:
        """Before anything is played. Raises RunnerStartError; then nothing is left half running."""
        ...

    async def take_handle(self, token: PlacementToken | None) -> RunnerHandle:
        """Waits for a runner that is alive, where the token says. Raises RunnerGoneError."""
        ...

    def views(self) -> list[RunnerView]: ...

    async def close(self) -> None:
        """Ends all of them, at once."""
        ...


class InlineRunner:
    """The loop itself, and the handle there: handlers run in it, as many at once as there are workers."""

    kind = "inline"
    is_usable = True

    @property
    def standing_handle(self) -> InlineRunner:
        return self

    async def start(self) -> None: ...

    async def take_handle(self, _token: PlacementToken | None) -> InlineRunner:
        return self

    def play(self, running: RunningAttempt) -> Coroutine[Any, Any, AttemptReport]:
        # Not a coroutine around a coroutine: this is on the way of every sample.
        return play_samples(running, running.evaluator.spec.handler)

    def leave(self) -> None: ...

    async def play_group(
        self, worker: Worker, task_id: str, task: Task, samples: Sequence[SampleDone], spec: EvaluatorSpec
    ) -> tuple[tuple[Reward, ...], str]:
        return await play_group(worker, task_id, task, samples, spec, spec.handler)

    def views(self) -> list[RunnerView]:
        return []

    async def close(self) -> None: ...


INLINE = InlineRunner()


async def start_runners(runners: Iterable[Runners], exits: AsyncExitStack) -> None:
    """All at once, and all or none; `exits` gets their ends. Raises RunnerStartError."""
    try:
        async with asyncio.TaskGroup() as tasks:
            for of_one in runners:
                exits.push_async_callback(of_one.close)
                tasks.create_task(of_one.start())
    except BaseExceptionGroup as group:
        await exits.aclose()
        raise first_of(group.subgroup(RunnerStartError) or group) from None


async def play_samples(running: RunningAttempt, handler: BaseAgent) -> AttemptReport:
    """Plays the samples of an attempt one after the other.

    The first that does not succeed ends it, unless the task keeps what succeeds beside it; a stop, or the end of its
    runner, ends it always.
    """
    planned, evaluator = running.planned, running.evaluator
    services, spec = evaluator.services, evaluator.spec
    samples: list[SampleDone] = []
    report_state, message = _SUCCEEDED, ""
    for sample_no in range(planned.first_sample_no, planned.first_sample_no + planned.sample_count):
        running.sample_no = sample_no
        sample = Sample(task_id=planned.ref.task_id, sample_no=sample_no, task=planned.task)
        episode = HandlerEpisode(services, spec, sample, running)
        state, done = await play_sample(running, episode, handler, spec, services.clock)
        samples.append(done)
        if state is not _SUCCEEDED:
            report_state, message = state, message or running.stop_reason or done.error
            is_over = running.stop_cause is not None or state is AttemptState.LOST
            if is_over or not planned.task.config.keeps_partial:
                break
    return AttemptReport(report_state, tuple(samples), message, running.payload)


def stopped_report(running: RunningAttempt) -> AttemptReport:
    """Of an attempt that was told to stop and has nothing to show."""
    cause = running.stop_cause
    assert cause is not None, "the attempt was not told to stop"
    sample = unfinished_sample(running, cause.outcome, running.stop_reason)
    return AttemptReport(cause.attempt_state, (sample,), running.stop_reason)


def lost_report(running: RunningAttempt, how: str) -> AttemptReport:
    """Of an attempt whose runner died; a stop that it was told before comes first."""
    if running.stop_cause is not None:
        return stopped_report(running)
    return AttemptReport(AttemptState.LOST, (unfinished_sample(running, Outcome.INFRA_OTHER, how),), how)
