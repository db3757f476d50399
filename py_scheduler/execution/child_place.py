"""One child's place among the runners of an evaluator, and the seat there that a slot takes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import msgspec

from py_scheduler.domain.runners import RunnerState, RunnerView
from py_scheduler.execution.play import play_group
from py_scheduler.execution.runner import lost_report, play_samples

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.results import Reward, SampleDone
    from py_scheduler.domain.runners import RunnerKey
    from py_scheduler.domain.task import Task
    from py_scheduler.execution.attempt import AttemptReport, RunningAttempt
    from py_scheduler.execution.child_session import ChildSession
    from py_scheduler.execution.workers import Worker


class Leave(Protocol):
    """Gives a place back. suspicion: why its child is to be replaced; empty: it is not."""

    def __call__(self, place: ChildPlace, *, suspicion: str) -> None: ...


class ChildPlace:
    """Where one child lives, and after it the next: kept over restarts.

    failed_tries: starts in a row that came to nothing. failed_rounds: how often in a row all tries did.
    has_played: the child that is there now, whether it was ever given to a slot.
    """

    def __init__(self, runner_id: str, key: RunnerKey) -> None:
        self.runner_id = runner_id
        self.key = key
        self.state = RunnerState.STARTING
        self.session: ChildSession | None = None
        self.running: RunningAttempt | None = None
        self.restarts = 0
        self.failed_tries = 0
        self.failed_rounds = 0
        self.has_played = False
        self.message = ""

    def view(self, kind: str, evaluator_id: str, now: float) -> RunnerView:
        """As it stands. now: monotonic seconds."""
        view = RunnerView(
            runner_id=self.runner_id,
            kind=kind,
            state=self.state,
            evaluator_id=evaluator_id,
            node_ip=self.key[0],
            gpu_ids=self.key[1] or (),
            pid=self.session.child.pid if self.session is not None else 0,
            restarts=self.restarts,
            message=self.message,
        )
        running = self.running
        if running is None:
            return view
        return msgspec.structs.replace(
            view,
            submission_id=running.planned.submission_id,
            task_id=running.ref.task_id,
            sample_no=running.sample_no,
            attempt_no=running.ref.attempt_no,
            begun_unix_seconds=running.began_unix_seconds,
            running_seconds=now - running.began_at,
            keys=dict(running.shown),
        )


class ChildSeat:
    """One child for one attempt: the next one begins with a ping again."""

    def __init__(self, leave: Leave, place: ChildPlace, session: ChildSession) -> None:
        self._leave = leave
        self._place = place
        self._session = session
        self._suspicion = ""
        self.is_usable = True

    async def play(self, running: RunningAttempt) -> AttemptReport:
        session, place = self._session, self._place
        self.is_usable = False
        session.worker, place.running = running.worker, running
        running.kill = lambda: session.kill("its handler ignored a stop")
        try:
            return await play_samples(running, session)
        finally:
            session.worker = place.running = None
            session.forget_episode()
            self._suspicion = "its work was stopped" if running.restarts_runner else ""

    async def play_group(
        self, worker: Worker, task_id: str, task: Task, samples: Sequence[SampleDone], spec: EvaluatorSpec
    ) -> tuple[tuple[Reward, ...], str]:
        self._session.worker = worker
        worker.kill = lambda: self._session.kill("its handler ignored a stop")
        try:
            return await play_group(worker, task_id, task, samples, spec, self._session)
        finally:
            self._session.worker = worker.kill = None

    def leave(self) -> None:
        self._leave(self._place, suspicion=self._suspicion)


class EmptySeat:
    """Where no child could be started: what is played there is lost, so that whoever waits hears why."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.is_usable = True

    async def play(self, running: RunningAttempt) -> AttemptReport:
        self.is_usable = False
        return lost_report(running, self._how)

    async def play_group(
        self,
        worker: Worker,  # noqa: ARG002 -- as of every seat
        task_id: str,  # noqa: ARG002
        task: Task,  # noqa: ARG002
        samples: Sequence[SampleDone],  # noqa: ARG002
        spec: EvaluatorSpec,  # noqa: ARG002
    ) -> tuple[tuple[Reward, ...], str]:
        return (), f"eval_group: {self._how}"

    def leave(self) -> None: ...
