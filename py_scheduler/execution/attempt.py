"""One attempt from its plan to its report.

Invariants: a stop is asked for at most once, and the cancellation it causes never leaves the attempt: the resident
worker lives on. A phase has its whole time whatever the pauses: its deadline moves by as long as its clock stood still.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.results import AttemptState, Outcome, SampleDone, Timings
from py_scheduler.domain.runners.runner import NOTHING_SHOWN
from py_scheduler.domain.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from py_scheduler.domain.events import StopCause
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.resources import PlacementToken
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.execution.evaluator import Evaluator
    from py_scheduler.execution.workers import Worker


class PlannedAttempt(msgspec.Struct, frozen=True, gc=False):
    """An attempt that waits for its turn: samples [first_sample_no, first_sample_no + sample_count) of a task.

    submission_id, namespace, batch_key: whose it is, and its place in the order of service. queued_at: monotonic
    seconds. iteration: what its submitter said of the step.
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


class RunningAttempt:
    """An attempt that a worker is at, and the sample it has come to. Its times are monotonic seconds.

    phase_deadline: when the present phase times out, unless its clock stands still by then. attempt_deadline: likewise
    for the attempt as a whole. stop_deadline: when a worker that was told to stop is given up.
    restarts_runner: once it is told to stop, whether what it runs on is to be replaced before it takes other work.
    """

    __slots__ = (
        "_arm",
        "_clock",
        "_clock_stopped_at",
        "attempt_deadline",
        "began_at",
        "began_unix_seconds",
        "evaluator",
        "gpu_ids",
        "is_over",
        "is_stranded",
        "kill",
        "node_ip",
        "on_stop",
        "payload",
        "phase",
        "phase_deadline",
        "planned",
        "ref",
        "restarts_runner",
        "sample_no",
        "shown",
        "stop_cause",
        "stop_deadline",
        "stop_reason",
        "token",
        "workdirs",
        "worker",
    )

    def __init__(
        self,
        planned: PlannedAttempt,
        evaluator: Evaluator,
        token: PlacementToken | None,
        worker: Worker,
        clock: Clock,
        arm: Callable[[float, RunningAttempt], None],
    ) -> None:
        """`arm` is told of every deadline of a phase."""
        self._clock = clock
        self._arm = arm
        self._clock_stopped_at: float | None = None
        self.planned = planned
        self.ref = planned.ref
        self.evaluator = evaluator
        self.token = token
        self.node_ip = token.node_ip if token is not None else ""
        self.gpu_ids: tuple[int, ...] = tuple(token.gpu_ids) if token is not None else ()
        self.worker = worker
        self.began_at = clock.monotonic()
        self.began_unix_seconds = clock.unix_time()
        self.sample_no = planned.first_sample_no
        self.phase = "run"
        self.phase_deadline: float | None = None
        self.attempt_deadline: float | None = None
        self.restarts_runner = False
        self.stop_deadline: float | None = None
        self.stop_cause: StopCause | None = None
        self.stop_reason = ""
        self.on_stop: Callable[[], None] | None = None
        """For what is at work beside the handler and would not be cancelled with it."""
        self.kill: Callable[[], None] | None = None
        """Ends by force what runs it, when it can be: the way out when a stop is ignored."""
        self.payload = b""
        """Of its samples that were played to their end."""
        self.shown: Mapping[str, str] = NOTHING_SHOWN
        """What its handler lets people see of it."""
        self.workdirs: list[Path] = []
        """What its episodes have made of their own, to be removed after the attempt."""
        self.is_over = False
        self.is_stranded = False
        """Given up: its task has ended without it, its room comes back only when the handler does."""

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

    def stop(self, cause: StopCause, reason: str, *, restarts_runner: bool = False) -> bool:
        """Cancels what the handler is waiting for. False when it was told before or is over."""
        if self.is_over or self.stop_cause is not None:
            return False
        self.stop_cause = cause
        self.stop_reason = reason
        self.restarts_runner = restarts_runner
        if self.on_stop is not None:
            self.on_stop()
        # A handler that, in its own turn, causes its own stop is not waiting: the check after its phase sees the cause.
        if asyncio.current_task() is not self.worker.task:
            self.worker.task.cancel()
        return True


class AttemptReport(msgspec.Struct, frozen=True):
    """How an attempt ended: its state, the samples that were played, and what to say about it.

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
