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

- `Engine(..., runners={evaluator_id: Runners})`; an evaluator that is not named there runs `inline`, which is the event
  loop (`execution/run_sample.py`).
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
from typing import TYPE_CHECKING, Protocol

from py_scheduler.errors import RunnerStartError, first_of

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import AsyncExitStack

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.results import Reward
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.execution.attempt import AttemptReport, RunningAttempt, RunningGroup
    from py_scheduler.execution.episode import EpisodeServices
    from py_scheduler.execution.workers import Worker


class RunnerGoneError(Exception):
    """The node that a token names has no runners any more, or the server is ending."""


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
