"""One attempt from its plan to its report, and the score of one group likewise.

Invariant: a phase has its whole time whatever the pauses: its deadline moves by as long as its clock stood still.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, Timings
from py_scheduler.domain.runners.runner import NOTHING_SHOWN
from py_scheduler.domain.task import Task
from py_scheduler.execution.stopping import RUNNING, Stoppable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.training.iteration import IterationContext


class PlannedAttempt(msgspec.Struct, frozen=True, gc=False):
    """An attempt that waits for its turn: samples [first_sample_no, first_sample_no + sample_count) of a task.

    submission_id, namespace: whose it is. batch_key: its place in the order of service. queued_at: monotonic seconds.
    iteration: what its submitter said of the step.
    """

    ref: AttemptRef
    task: Task
    first_sample_no: int
    sample_count: int
    submission_id: str
    namespace: str
    batch_key: tuple[float, int]
    queued_at: float
    iteration: IterationContext | None = None

    def next_attempt(self, queued_at: float) -> PlannedAttempt:
        """The same samples, tried again."""
        ref = AttemptRef(self.ref.task_id, self.ref.subtask_no, self.ref.attempt_no + 1)
        return msgspec.structs.replace(self, ref=ref, queued_at=queued_at)


class RunningAttempt(Stoppable):
    """An attempt that runs, and the sample it has come to. Its times are monotonic seconds.

    phase_deadline: when the present phase times out, unless its clock stands still by then. attempt_deadline: likewise
    for the attempt as a whole. payload: of its samples that ran to their end. shown: what its handler lets people see
    of it. workdirs: what its episodes have made of their own, to be removed after the attempt.

    The clock of a phase in numbers: `run_timeout_seconds = 60` from second 0 gives the deadline 60. A pause of the
    generation backend from 20 to 50 stops the clock; at 50 the deadline becomes 90.
    """

    __slots__ = (
        "_arm",
        "_clock",
        "_clock_stopped_at",
        "attempt_deadline",
        "began_at",
        "began_unix_seconds",
        "gpu_ids",
        "node_ip",
        "payload",
        "phase",
        "phase_deadline",
        "planned",
        "ref",
        "sample_no",
        "shown",
        "token",
        "workdirs",
    )

    def __init__(
        self,
        planned: PlannedAttempt,
        token: PlacementToken | None,
        worker_task: asyncio.Task[None],
        clock: Clock,
        arm: Callable[[float, RunningAttempt], None],
    ) -> None:
        """`arm` gets every deadline of a phase and of the attempt."""
        # As `super().__init__(worker_task)` would, without the call: this is on the way of every sample.
        self.state = RUNNING
        self.stop_deadline = 0.0
        self.worker_task = worker_task
        self.is_over = False
        self.stop_cause = None
        self.stop_reason = ""
        self.restarts_runner = False
        self.on_stop = None
        self.kill = None
        self._clock = clock
        self._arm = arm
        self._clock_stopped_at: float | None = None
        self.planned = planned
        self.ref = planned.ref
        self.token = token
        self.node_ip = token.node_ip if token is not None else ""
        self.gpu_ids: tuple[int, ...] = tuple(token.gpu_ids) if token is not None else ()
        self.began_at = clock.monotonic()
        self.began_unix_seconds = clock.unix_time()
        self.sample_no = planned.first_sample_no
        self.phase = "run"
        self.phase_deadline: float | None = None
        self.attempt_deadline: float | None = None
        self.payload = b""
        self.shown: Mapping[str, str] = NOTHING_SHOWN
        self.workdirs: list[Path] = []

    def begin_phase(self, phase: str, timeout_seconds: float | None) -> None:
        self.phase = phase
        self.phase_deadline = None
        if timeout_seconds is not None:
            now = self._clock.monotonic()
            self.phase_deadline = now + timeout_seconds
            if self._clock_stopped_at is not None:
                if self.attempt_deadline is not None:
                    self.attempt_deadline += now - self._clock_stopped_at
                self._clock_stopped_at = now
            self._arm(self.phase_deadline, self)

    def limit(self, timeout_seconds: float) -> None:
        """Gives the attempt so much time from its start."""
        self.attempt_deadline = self.began_at + timeout_seconds
        self._arm(self.attempt_deadline, self)

    def stop_clock(self) -> None:
        """Neither the phase nor the attempt takes time from now on."""
        if self._clock_stopped_at is None:
            self._clock_stopped_at = self._clock.monotonic()

    def start_clock(self) -> None:
        stopped_at, self._clock_stopped_at = self._clock_stopped_at, None
        if stopped_at is None:
            return
        stood_still = self._clock.monotonic() - stopped_at
        if self.phase_deadline is not None:
            self.phase_deadline += stood_still
            self._arm(self.phase_deadline, self)
        if self.attempt_deadline is not None:
            self.attempt_deadline += stood_still
            self._arm(self.attempt_deadline, self)

    @property
    def clock_stands_still(self) -> bool:
        return self._clock_stopped_at is not None

    @property
    def remaining_seconds(self) -> float | None:
        """Left of the phase; None without a limit."""
        if self.phase_deadline is None:
            return None
        now = self._clock.monotonic() if self._clock_stopped_at is None else self._clock_stopped_at
        return max(0.0, self.phase_deadline - now)


class AttemptReport(msgspec.Struct, frozen=True):
    """How an attempt ended: its state, the samples that ran, and what to say about it.

    payload: what its runner made for the trainer, of all its samples together; empty when it made nothing.
    """

    state: AttemptState
    samples: tuple[SampleDone, ...]
    message: str = ""
    payload: bytes = b""


def unfinished_sample(running: RunningAttempt, outcome: Outcome, error: str) -> SampleDone:
    """The record of the sample that an attempt was at when it was given up."""
    return SampleDone(
        task_id=running.ref.task_id,
        sample_no=running.sample_no,
        attempt_no=running.ref.attempt_no,
        outcome=outcome,
        error=error,
        phase=running.phase,
        node_ip=running.node_ip,
        gpu_ids=running.gpu_ids,
        timings=Timings(wait_seconds=running.began_at - running.planned.queued_at),
        started_unix_seconds=running.began_unix_seconds,
    )


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


class RunningGroup(Stoppable):
    """A whole task whose samples a handler scores together. samples: in the order of sample_no."""

    __slots__ = ("samples", "task", "task_id")

    def __init__(self, task_id: str, task: Task, samples: Sequence[SampleDone]) -> None:
        super().__init__(None)
        self.task_id = task_id
        self.task = task
        self.samples = samples
