"""The seam between the scheduler and whatever executes handlers (design words: Runner).

How an attempt reaches a runner, and what the author of one has to know:

    permit (concurrency + token) -> worker -> Evaluator.drain:
        handle = await runners.take_handle(token)   waits until a runner that is known to be alive is this permit's
                                                    alone; nothing is taken from the queue before, so nothing is lost
        running = board.begin(...)                  the ledger: LEASED -> RUNNING; running.began_at, .planned, .token
        report = await handle.run(running, worker, spec, services)   AttemptReport(state, samples, message)
        board.end(running, report)                  the ledger decides: SampleDone, a retry, quarantine
        ... the next attempt of the batch, with the same handle while `handle.is_usable` ...
        handle.leave()                              once, whatever happened

- `Engine(..., runners={evaluator_id: Runners})`; an evaluator that is not named there runs `inline`.
- `run` never raises for what user code does: that is a FAILED report. A runner that died is a LOST report, whose
  message says how it ended; the ledger's loss budget does the rest. Where an attempt did not succeed, the ledger makes
  up the samples that its report lacks.
- Stops (`execution/stopping.py`): the stop is written into `running`, then the worker's task is cancelled, so `run`
  sees CancelledError at its await. It passes the stop on, waits until the work has really ended, and returns
  `stopped_report(running)`. The cancellation must not leave `run` (`await worker.absorb_cancellation()`), unless
  `worker.is_closing`: then `run` kills what it has started and lets CancelledError pass.
  `running.restarts_runner` asks for another runner before this one takes other work.
- `run` sets `running.kill` at its beginning when the work can be ended by force. It is called, once, when
  `stop_grace_seconds` after a stop have passed, and `run` must return soon after. Without it, or when even that does
  not help, the attempt ends without its worker, and its token is stranded until `run` returns.
- Phase timeouts are the attempt's: `running.begin_phase("run", seconds)` arms one.
- `take_handle` raises RunnerGoneError when the token's node is gone for good: the permit ends, and the rest of the
  batch is placed anew. Where no runner can be started it gives a handle at which every attempt is lost (`lost_report`)
  rather
  than wait for ever: the task's own budget bounds how often that happens.

Invariants
  1. A handle is one runner's, and one permit's at a time.
  2. A permit that has a handle calls `leave` exactly once.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any, Final, Protocol

from py_scheduler.domain.results import AttemptState
from py_scheduler.domain.task import Sample
from py_scheduler.errors import RunnerStartError, first_of
from py_scheduler.execution.attempt import AttemptReport
from py_scheduler.execution.episode import HandlerEpisode
from py_scheduler.execution.run_sample import run_sample, score_group

if TYPE_CHECKING:
    from collections.abc import Coroutine, Iterable
    from contextlib import AsyncExitStack

    from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.results import Reward, SampleDone
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.execution.attempt import RunningAttempt, RunningGroup
    from py_scheduler.execution.episode import EpisodeServices
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
        """Whether the runner is still alive and as small as it should be; if not, the permit takes another handle."""
        ...

    async def run(
        self, running: RunningAttempt, worker: Worker, spec: EvaluatorSpec, services: EpisodeServices
    ) -> AttemptReport: ...

    async def score_group(
        self, group: RunningGroup, worker: Worker, spec: EvaluatorSpec
    ) -> tuple[tuple[Reward, ...], str]:
        """As `execution.run_sample.score_group`."""
        ...

    def leave(self) -> None: ...


class Runners(Protocol):
    """All runners of one evaluator."""

    kind: str

    @property
    def standing_handle(self) -> RunnerHandle | None:
        """A handle that any number of permits may have at once; None: handles have to be taken."""
        ...

    async def start(self) -> None:
        """Before anything runs. Raises RunnerStartError; then nothing is left half running."""
        ...

    async def take_handle(self, token: PlacementToken | None) -> RunnerHandle:
        """Waits for a runner that is alive, where the token says. Raises RunnerGoneError."""
        ...

    def views(self) -> list[RunnerView]: ...

    async def close(self) -> None:
        """Ends all of them, at once."""
        ...


class InlineRunner:
    """The event loop itself, and the handle there: as many handlers run in it at once as there are workers."""

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
