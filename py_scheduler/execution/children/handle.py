"""What a permit takes at a child runner: a child that runs one attempt, or the word that none could be started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from py_scheduler.execution.attempt import lost_report
from py_scheduler.execution.run_sample import run_samples, score_group

if TYPE_CHECKING:
    from collections.abc import Callable

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.results import Reward
    from py_scheduler.execution.attempt import AttemptReport, RunningAttempt, RunningGroup
    from py_scheduler.execution.children.session import ChildSession
    from py_scheduler.execution.children.slots import ChildSlot
    from py_scheduler.execution.episode import EpisodeServices
    from py_scheduler.execution.workers import Worker

_IGNORED_STOP = "its handler ignored a stop"


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

    async def run(
        self, running: RunningAttempt, worker: Worker, spec: EvaluatorSpec, services: EpisodeServices
    ) -> AttemptReport:
        session, slot = self._session, self._slot
        self.is_usable = False
        session.worker, slot.running = worker, running
        running.kill = lambda: session.kill(_IGNORED_STOP)
        try:
            return await run_samples(running, worker, spec, services, session)
        finally:
            session.worker = slot.running = None
            session.forget_episode()
            self._suspicion = "its work was stopped" if running.restarts_runner else ""

    async def score_group(
        self, group: RunningGroup, worker: Worker, spec: EvaluatorSpec
    ) -> tuple[tuple[Reward, ...], str]:
        session = self._session
        session.worker = worker
        group.kill = lambda: session.kill(_IGNORED_STOP)
        try:
            return await score_group(group, worker, spec, session)
        finally:
            session.worker = group.kill = None

    def leave(self) -> None:
        self._give_back(self._slot, self._suspicion)


class EmptyHandle:
    """Where no child could be started: an attempt there is lost, and its report says why."""

    def __init__(self, how: str) -> None:
        self._how = how
        self.is_usable = True

    async def run(
        self,
        running: RunningAttempt,
        worker: Worker,  # noqa: ARG002 -- as of every handle
        spec: EvaluatorSpec,  # noqa: ARG002
        services: EpisodeServices,  # noqa: ARG002
    ) -> AttemptReport:
        self.is_usable = False
        return lost_report(running, self._how)

    async def score_group(
        self,
        group: RunningGroup,  # noqa: ARG002 -- as of every handle
        worker: Worker,  # noqa: ARG002
        spec: EvaluatorSpec,  # noqa: ARG002
    ) -> tuple[tuple[Reward, ...], str]:
        return (), f"eval_group: {self._how}"

    def leave(self) -> None: ...
