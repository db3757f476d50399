"""The child's side of a `process` runner: a WorkflowRunner, run as `child_main` runs any handler.

What comes in was pickled by the process that started this one, of its user's own objects, as `multiprocessing` does
it. Nothing goes back pickled.
"""

from __future__ import annotations

import asyncio
import multiprocessing.spawn
import pickle  # noqa: TID251 -- no client's: from the parent process alone, over a socket that only these two have
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler.domain.evaluator import BaseAgent
from py_scheduler.domain.results import AgentResult
from py_scheduler.domain.values.metrics import plain_metrics
from py_scheduler.domain.values.plain import details_json, safe_text, words_of
from py_scheduler.interfaces.trinity.runners.workflow_runner import WorkflowRunner

if TYPE_CHECKING:
    from collections.abc import Sequence

    from py_scheduler.domain.evaluator import Episode
    from py_scheduler.domain.results import Reward

STATE = "state"
"""Under this key the child shows its state, as JSON."""
_STATE_SECONDS = 1.0
"""Between two looks at what a workflow says of itself: nothing tells when that changes."""


class WorkflowSaid(msgspec.Struct, frozen=True, kw_only=True):
    """A status and its experiences. unfit_because: see `protocols.TrinityRunner`."""

    completed_runs: int
    total_runs: int
    metrics: list[dict[str, float]]
    message: str | None
    experiences: bytes
    unfit_because: str


class WorkflowAgent(BaseAgent):
    """Opens the models when it is made. config: pickled. main_path: the parent's program; see `_read`."""

    def __init__(
        self,
        *,
        config: bytes,
        rollout_model_id: int,
        auxiliary_model_ids: Sequence[int],
        runner_id: int,
        main_path: str,
    ) -> None:
        self._main_path = main_path
        self._runner = WorkflowRunner(
            self._read(config, "the configuration"), rollout_model_id, auxiliary_model_ids, runner_id
        )
        self._runner.open_models()

    async def run(self, episode: Episode) -> AgentResult:
        """Plays one `WorkflowRunner.run_task`. When it is cancelled it ends once no thread of it is at work."""
        arguments = self._read(episode.sample.task.data, "the task")
        telling = asyncio.ensure_future(self._tell_state(episode))
        try:
            status, experiences = await self._runner.run_task(*arguments)
        except asyncio.CancelledError:
            await self._runner.threads_ended()
            raise
        finally:
            telling.cancel()
        await self._show_state(episode, "")
        said = WorkflowSaid(
            completed_runs=status.completed_runs,
            total_runs=status.total_runs,
            metrics=[plain_metrics(measured) for measured in status.metrics],
            message=None if status.message is None else safe_text(status.message),
            experiences=experiences,
            unfit_because=self._runner.unfit_because,
        )
        return AgentResult(payload=msgspec.msgpack.encode(said))

    async def eval(self, episode: Episode, result: AgentResult) -> Reward:
        """Never asked for."""
        raise NotImplementedError("workflows score their runs themselves")

    async def _tell_state(self, episode: Episode) -> None:
        said = ""
        while True:
            said = await self._show_state(episode, said)
            await asyncio.sleep(_STATE_SECONDS)

    async def _show_state(self, episode: Episode, said: str) -> str:
        state = details_json(await self._runner.get_runner_state()).decode()
        if state != said:
            episode.show(STATE, state)
        return state

    def _read(self, data: bytes, what: str) -> Any:
        """What the parent's program itself defines is found by running that program again under another name, as
        `multiprocessing` does. Raises TypeError.
        """
        try:
            if b"__main__" in data and self._main_path:
                multiprocessing.spawn.import_main_path(self._main_path)
            return pickle.loads(data)  # noqa: S301 -- see the import
        except Exception as error:
            is_unguarded = isinstance(error, RuntimeError) and b"__main__" in data
            hint = "; the program runs again there: start it under `if __name__ == '__main__':`" if is_unguarded else ""
            raise TypeError(f"{what} cannot be made in a process runner: {words_of(error)}{hint}") from error
