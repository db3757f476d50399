"""What a permit takes at a child runner: a child that plays one attempt, or the word that none could be started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.execution.play import play_group
from py_scheduler.execution.runner import lost_report, play_samples

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.results import Reward, SampleDone
    from py_scheduler.domain.task import Task
    from py_scheduler.execution.attempt import AttemptReport, RunningAttempt
    from py_scheduler.execution.children.session import ChildSession
    from py_scheduler.execution.children.slots import ChildSlot
    from py_scheduler.execution.workers import Worker


class ChildHandle:
    """One child for one attempt: the next one begins with a ping again.

    give_back: takes the slot, and why its child is to be replaced (empty: it is not).
    """

    def __init__(self, give_back: Callable[[ChildSlot, str], None], slot: ChildSlot, session: ChildSession) -> None:
        self._give_back = give_back
        self._slot = slot
        self._session = session
        self._suspicion = ""
        self.is_usable = True

    async def play(self, running: RunningAttempt) -> AttemptReport:
        session, slot = self._session, self._slot
        self.is_usable = False
        session.worker, slot.running = running.worker, running
        running.kill = lambda: session.kill("its handler ignored a stop")
        try:
            return await play_samples(running, session)
        finally:
            session.worker = slot.running = None
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
        self._give_back(self._slot, self._suspicion)


class EmptyHandle:
    """Where no child could be started: what is played there is lost, so that whoever waits hears why."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.is_usable = True

    async def play(self, running: RunningAttempt) -> AttemptReport:
        self.is_usable = False
        return lost_report(running, self._how)

    async def play_group(
        self,
        worker: Worker,  # noqa: ARG002 -- as of every handle
        task_id: str,  # noqa: ARG002
        task: Task,  # noqa: ARG002
        samples: Sequence[SampleDone],  # noqa: ARG002
        spec: EvaluatorSpec,  # noqa: ARG002
    ) -> tuple[tuple[Reward, ...], str]:
        return (), f"eval_group: {self._how}"

    def leave(self) -> None: ...
