"""A runner and its life: made, prepared, put to work, replaced.

Invariant: `runner` is replaced only after what it was at has been stopped or killed; so no attempt runs beside the next
one, except in a thread of this process, which nothing can stop and which nobody listens to any more.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from py_scheduler.interfaces.trinity.engine import process_host
from py_scheduler.interfaces.trinity.pinned import run_alone
from py_scheduler.interfaces.trinity.runners.process import TrinityProcessRunner, is_of_processes
from py_scheduler.interfaces.trinity.runners.workflow_runner import Status, WorkflowRunner

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Sequence

    from py_scheduler.interfaces.trinity.mirrors import TaskWrapper
    from py_scheduler.interfaces.trinity.protocols import RunStatus, TrinityConfig, TrinityRunner
    from py_scheduler.interfaces.trinity.runners.pooled import PooledRunner

    RunOnce = Callable[[PooledRunner, TaskWrapper, int, int, float, bool], Awaitable[tuple[RunStatus, bytes, float]]]

logger = logging.getLogger(__name__)


class RunnerWrapper:
    """One of a scheduler's runners. `state`: what `update_state` last heard of it.

    Another kind of runner is a subclass whose `_create_runner` makes it (`protocols.TrinityRunner`).
    status_class: of what `run_with_retry` returns.
    """

    status_class: type[Any] = Status

    def __init__(
        self, runner_id: int, rollout_model_id: int, auxiliary_model_ids: Sequence[int], config: TrinityConfig
    ) -> None:
        self.runner_id = runner_id
        self.rollout_model_id = rollout_model_id
        self.auxiliary_model_ids = list(auxiliary_model_ids)
        self.config = config
        self.state: dict[str, Any] = {}
        self.run_once: RunOnce | None = None
        """Of the scheduler that this runner belongs to: submits one sub-task that only this runner may run."""
        self.runner: TrinityRunner = self._create_runner()

    def _create_runner(self) -> TrinityRunner:
        made_of = (self.config, self.rollout_model_id, self.auxiliary_model_ids, self.runner_id)
        if is_of_processes(self.config):
            return TrinityProcessRunner(process_host(), *made_of)
        return WorkflowRunner(*made_of)

    async def update_state(self) -> None:
        """Asks the runner for its state; `running_time`: seconds since it began what it is, or was last, at.

        The original goes on counting after the end.
        """
        state = await self.runner.get_runner_state()
        began_at, ended_at = state.get("begin_time") or 0.0, state.get("terminate_time")
        state["running_time"] = ((ended_at or time.time()) - began_at) if began_at else 0.0
        self.state = state

    async def prepare(self) -> None:
        """Returns when the runner can take work. Raises what its preparation raises."""
        await self.runner.prepare()

    async def run_with_retry(
        self, task: TaskWrapper, repeat_times: int, run_id_base: int, timeout: float, collect_partial_runs: bool
    ) -> tuple[RunStatus, bytes, int, float]:
        """Plays one sub-task on this runner and no other: runs `run_id_base` and on, `repeat_times` of them.

        timeout: seconds for each try. It is one sub-task of the scheduler's engine like any other, with its retries:
        a timed-out try is stopped, or its runner replaced, before the next begins. (The original leaves it at work
        beside its retry.) Returns the status, the experiences as bytes, `runner_id`, and the seconds it took.
        Raises FailedPreconditionError when the scheduler is not running.
        """
        if self.run_once is None:
            status, payload, seconds = await run_alone(
                self, task, repeat_times, run_id_base, timeout, collect_partial_runs
            )
        else:
            status, payload, seconds = await self.run_once(
                self, task, repeat_times, run_id_base, timeout, collect_partial_runs
            )
        return status, payload, self.runner_id, seconds

    async def restart_runner(self) -> None:
        """Ends the runner, whatever it is at, and returns when another one in its place is prepared.

        Raises what the preparation raises; `runner` is then one that was not prepared. (The original starts the new one
        beside the old, and a runner whose restart failed stays busy for ever.)
        """
        self.kill()
        await self.ended()
        self.state = {}
        self.runner = self._create_runner()
        await self.prepare()

    # For the engine's handles

    async def confirm_alive(self) -> None:
        """Raises RunnerLostError when the runner cannot take work."""
        await self.runner.confirm_alive()

    @property
    def unfit_because(self) -> str:
        """Why it may not be given another task, as after each; empty while it may."""
        return self.runner.unfit_because

    def kill(self) -> None:
        """Ends the runner at once. One in this process has nothing to be ended: it is left alone."""
        self.runner.kill()

    async def ended(self) -> None:
        """After `kill`: returns when nothing of it is left that could be waited for."""
        await self.runner.ended()

    async def run_task(
        self, task: TaskWrapper, repeat_times: int, run_id_base: int, collect_partial_runs: bool
    ) -> tuple[RunStatus, bytes]:
        """One try. When it is cancelled it stops the work, and ends with it. Raises RunnerLostError."""
        return await self.runner.run_task(
            task_to_run(task, repeat_times), str(task.batch_id), repeat_times, run_id_base, collect_partial_runs
        )


def task_to_run(task: TaskWrapper, repeat_times: int) -> Any:
    """The task as its workflow sees it in a sub-task of so many runs."""
    return replace(task.task, rollout_args=replace(task.task.rollout_args, n=repeat_times))
