"""The one way in which work that runs is stopped, be it an attempt or the score of a group.

    RUNNING --stop--> STOPPING --grace is over--> KILLED --grace is over--> STRANDED
                          `--------grace is over, nothing to kill--------------^

With `stop_grace_seconds = 5` and a stop at second 12: the handler is cancelled at 12 and has until 17 to come back. At
17 its runner is killed, if it is one that can be, and has until 22 to report. What has not come back by then is
STRANDED: its worker is given up, and its room stays taken until the handler returns. Work that comes back leaves the
ladder.

Invariants
  1. The first stop counts. A later one neither changes its cause nor shortens or extends its grace.
  2. From a stop on, the work's own limits (of a phase, of the attempt, of a group's eval) mean nothing: an abort half a
     second before a timeout leaves the handler its whole grace.
  3. `kill` is called at most once.
"""

from __future__ import annotations

import asyncio
from enum import Enum
from typing import TYPE_CHECKING, Final, Generic, TypeVar, assert_never

from py_scheduler.execution.deadlines import Deadlines

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.events import StopCause
    from py_scheduler.domain.ports import Clock


class StopState(Enum):
    """How far the stop of some work has come.

    Whoever does one thing or another by it names every state and ends in `assert_never`, so that mypy tells all of them
    of a new one.
    """

    RUNNING = "running"
    STOPPING = "stopping"
    KILLED = "killed"
    STRANDED = "stranded"

    @property
    def is_awaited(self) -> bool:
        """Whether who waits for the work's end waits on."""
        if self is RUNNING or self is STOPPING or self is KILLED:
            return True
        if self is STRANDED:
            return False
        assert_never(self)

    @property
    def ends_confirmed(self) -> bool:
        """Whether the handler of work that ends in this state is no longer at it, so that it may be tried again."""
        if self is RUNNING or self is STOPPING or self is KILLED:
            return True
        if self is STRANDED:
            return False
        assert_never(self)


# Members by name: Python 3.11 looks them up through the metaclass, five times slower, and each attempt has one.
RUNNING: Final = StopState.RUNNING
STOPPING: Final = StopState.STOPPING
KILLED: Final = StopState.KILLED
STRANDED: Final = StopState.STRANDED


class Stoppable:
    """Work that a worker is at and that can be told to stop.

    state, stop_deadline: the ladder's own; the deadline is when it goes on. worker_task: what a stop cancels; None
    until a worker has taken the work. stop_cause, stop_reason: of the stop, once there is one. restarts_runner: the
    stop asks for another runner before this one takes other work. on_stop: ends what is at work beside the handler and
    would not be cancelled with it. kill: ends by force what the work runs on; None where that cannot be done.
    """

    __slots__ = (
        "is_over",
        "kill",
        "on_stop",
        "restarts_runner",
        "state",
        "stop_cause",
        "stop_deadline",
        "stop_reason",
        "worker_task",
    )

    def __init__(self, worker_task: asyncio.Task[None] | None) -> None:
        self.state: StopState = RUNNING
        self.stop_deadline = 0.0
        self.worker_task = worker_task
        self.is_over = False
        self.stop_cause: StopCause | None = None
        self.stop_reason = ""
        self.restarts_runner = False
        self.on_stop: Callable[[], None] | None = None
        self.kill: Callable[[], None] | None = None


_AT_ONCE = 64
"""So much work is told to stop, or given up, within one turn of the loop: each handler takes some of the next one."""

WorkT = TypeVar("WorkT", bound=Stoppable)


class StopLadder(Generic[WorkT]):
    """Keeps the deadlines of all work of one kind, those of its stops and its own.

    on_limit: a limit of work that nobody has told to stop has come up; gets when it was. on_given_up: gets work
    for which nobody waits any more; its state says what is to become of it.
    """

    def __init__(
        self,
        clock: Clock,
        grace_seconds: float,
        on_limit: Callable[[WorkT, float], None],
        on_given_up: Callable[[WorkT], None],
    ) -> None:
        self._clock = clock
        self._grace_seconds = grace_seconds
        self._on_limit = on_limit
        self._on_given_up = on_given_up
        self._deadlines: Deadlines[WorkT] = Deadlines(clock, self._on_deadline, _AT_ONCE)

    def limit(self, when: float, work: WorkT) -> None:
        """Has `on_limit` called at that time (monotonic seconds), unless the work is over or stopping by then."""
        self._deadlines.add(when, work)

    def stop(self, work: WorkT, cause: StopCause, reason: str, *, restarts_runner: bool = False) -> None:
        """Cancels what the handler waits for, and begins its grace. Does nothing when it was told before or is over."""
        if work.is_over or work.state is not RUNNING:
            return
        work.state = STOPPING
        work.stop_cause = cause
        work.stop_reason = reason
        work.restarts_runner = restarts_runner
        self._begin_grace(work)
        if work.on_stop is not None:
            work.on_stop()
        # A handler that, in its own turn, causes its own stop is not waiting: the check after its phase sees the cause.
        if work.worker_task is not None and asyncio.current_task() is not work.worker_task:
            work.worker_task.cancel()

    def clear(self) -> None:
        """Nothing is limited or given up any more."""
        self._deadlines.clear()

    def _begin_grace(self, work: WorkT) -> None:
        work.stop_deadline = self._clock.monotonic() + self._grace_seconds
        self._deadlines.add(work.stop_deadline, work)

    def _on_deadline(self, work: WorkT, when: float) -> None:
        if work.state is RUNNING:
            self._on_limit(work, when)
        elif when >= work.stop_deadline:
            self._climb(work)
        # Else it is a limit from before the stop, which means nothing any more.

    def _climb(self, work: WorkT) -> None:
        """The grace of a step is over."""
        match work.state:
            case StopState.STOPPING if work.kill is not None:
                work.state = KILLED
                self._begin_grace(work)
                work.kill()
            case StopState.STOPPING | StopState.KILLED:
                work.state = STRANDED
                self._on_given_up(work)
            case StopState.RUNNING | StopState.STRANDED:
                pass  # No grace runs.
            case unknown:
                assert_never(unknown)
