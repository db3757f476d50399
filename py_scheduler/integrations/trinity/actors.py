"""Trinity's WorkflowRunner actors as runners of ours."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayActorError, RayError
from trinity.explorer.workflow_runner import Status, WorkflowRunner

from py_scheduler.errors import RunnerLostError
from py_scheduler.interfaces.trinity import RunnerWrapper as OwnRunnerWrapper

if TYPE_CHECKING:
    from collections.abc import Awaitable

    from trinity.common.experience import Experience
    from trinity.common.workflows import Task, Workflow

logger = logging.getLogger(__name__)

_ALIVE_SECONDS = 30.0
"""How long an idle actor may take to say that it is alive."""
_FRESH_SECONDS = 0.1
"""An actor that has said something so recently is known to be alive: asking it again would take Ray as much of this
process's time as giving it a task does, before each of them.
"""


class WorkflowExitError(RuntimeError):
    """A workflow called `exit`."""


class GuardedWorkflowRunner(WorkflowRunner):  # type: ignore[misc]
    """Trinity's, except that `exit` in a workflow fails its run; it would stop the actor's event loop, for ever."""

    async def _run_workflow(self, workflow_instance: Workflow) -> list[Experience]:
        try:
            return await super()._run_workflow(workflow_instance)  # type: ignore[no-any-return]
        except (SystemExit, KeyboardInterrupt) as error:
            raise WorkflowExitError(f"the workflow ended by {error!r}") from error


class RayRunner:
    """Implements `interfaces.trinity.protocols.TrinityRunner` by an actor.

    leaves_threads: whether its runs are in threads, which go on when their task was stopped.
    """

    def __init__(self, actor: Any, *, leaves_threads: bool) -> None:
        self.actor = actor
        self.unfit_because = ""
        self._leaves_threads = leaves_threads
        self._answered_at = float("-inf")

    async def prepare(self) -> None:
        """Returns when the actor lives and has its models."""
        await _answer(self.actor.prepare.remote())

    async def get_runner_state(self) -> dict[str, Any]:
        """As the actor says."""
        return dict(await _answer(self.actor.get_runner_state.remote()))

    async def run_task(
        self, task: Task, batch_id: str, repeat_times: int, run_id_base: int, collect_partial_runs: bool
    ) -> tuple[Status, bytes]:
        """A cancellation is passed on to the actor, and leaves here when the actor's work has ended."""
        call = self.actor.run_task.remote(
            task=task,
            batch_id=batch_id,
            repeat_times=repeat_times,
            run_id_base=run_id_base,
            collect_partial_runs=collect_partial_runs,
        )
        try:
            status, payload = await _answer(call)
        except asyncio.CancelledError:
            ended = asyncio.wrap_future(call.future())
            ended.add_done_callback(_seen)
            ray.cancel(call)
            await asyncio.wait([ended])
            if self._leaves_threads:
                self.unfit_because = "threads of a stopped task may be at work in it"
            raise
        self._answered_at = time.monotonic()
        return status, payload

    async def confirm_alive(self) -> None:
        """Raises RunnerLostError."""
        if time.monotonic() - self._answered_at < _FRESH_SECONDS:
            return
        try:
            async with asyncio.timeout(_ALIVE_SECONDS):
                await _answer(self.actor.is_alive.remote())
        except TimeoutError:
            raise RunnerLostError(f"the actor did not answer within {_ALIVE_SECONDS:g} s") from None

    def kill(self) -> None:
        """Ends the actor's process."""
        try:
            ray.kill(self.actor)
        except (RayError, ValueError) as error:
            logger.debug("an actor that was to be killed had ended: %s", error)

    async def ended(self) -> None:
        """Ray sees to it."""


class RunnerWrapper(OwnRunnerWrapper):
    """`interfaces.trinity.RunnerWrapper` of an actor."""

    status_class = Status
    config: Any
    runner: RayRunner

    def _create_runner(self) -> RayRunner:
        actor = (
            ray.remote(GuardedWorkflowRunner)
            .options(
                num_cpus=0,
                namespace=self.config.ray_namespace,
                scheduling_strategy="SPREAD",
                runtime_env={"env_vars": self.config.explorer.env_vars},
            )
            .remote(self.config, self.rollout_model_id, self.auxiliary_model_ids, self.runner_id)
        )
        return RayRunner(actor, leaves_threads=self.config.explorer.concurrent_mode == "multi-threading")


def _seen(ended: asyncio.Future[Any]) -> None:
    if not ended.cancelled():
        ended.exception()


async def _answer(call: Awaitable[Any]) -> Any:
    """What an actor says. Raises RunnerLostError when it died."""
    try:
        return await call
    except RayActorError as error:
        raise RunnerLostError(f"the actor died: {error}") from error
