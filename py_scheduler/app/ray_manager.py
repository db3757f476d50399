"""SchedulerRolloutManager (seed 1): a Ray actor that hosts a TaskScheduler, for training loops that live inside Ray.

    Manager = rollout_manager_actor()                       # a Ray actor class
    manager = Manager.options(name="rollouts").remote(Path("server.toml").read_text(), "/shared/run")
    ray.get(manager.start.remote())
    for rollout_id in range(ray.get(manager.next_rollout_id.remote()), 5):
        result = ray.get(manager.execute_rollout.remote(rollout_id))

The scheduler in it is plain async Python, as in any other process: the actor takes no CPU and no GPU of Ray's accounts,
and only the backends that it asks hold an allocation of theirs.

Invariant: between `start` and `close` one task of the actor's own loop holds one TaskScheduler, whichever calls come
and go; what was started is ended by `close`, and otherwise with the actor.
"""

from __future__ import annotations

import importlib
import logging
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py_scheduler.app.serving import in_process
from py_scheduler.config import parse_config
from py_scheduler.domain.generation import Endpoints, PauseMode, WeightUpdate
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.execution.held_open import HeldOpen

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from py_scheduler.domain.generation import EndpointView, GenerationState
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.interfaces.step_results import EvalResult, RolloutResult
    from py_scheduler.interfaces.task_scheduler import TaskScheduler

_log = logging.getLogger(__name__)


class SchedulerRolloutManager:
    """Hosts one TaskScheduler. Usable without Ray too: nothing here knows where it runs.

    config: the text of a configuration file, so that any node can host it. base_dir: what its relative paths count
    from, on the node of the actor; its handlers may lie there.
    """

    def __init__(self, config: str, base_dir: str = ".") -> None:
        self._config = parse_config(config)
        self._base_dir = Path(base_dir).resolve()
        self._held = HeldOpen(self._opened, "rollout manager")

    async def start(self) -> int:
        """Starts engines, runners and scheduler; the iteration that is next. Again, it only says that.

        Raises ConfigError, EngineUnavailableError, RunnerStartError.
        """
        return (await self._held.open()).next_rollout_id

    async def close(self) -> None:
        """Aborts what is open and ends everything; may be followed by `start`."""
        await self._held.close()

    @asynccontextmanager
    async def _opened(self) -> AsyncIterator[TaskScheduler]:
        if str(self._base_dir) not in sys.path:
            sys.path.append(str(self._base_dir))
        async with in_process(self._config, self._base_dir) as scheduler:
            _log.info("the rollout manager is ready, iteration %d is next", scheduler.next_rollout_id)
            yield scheduler

    async def next_rollout_id(self) -> int:
        return self._started.next_rollout_id

    async def execute_rollout(
        self, rollout_id: int, groups: int | None = None, samples: int | None = None
    ) -> RolloutResult:
        """As `TaskScheduler.execute_rollout`."""
        return await self._started.execute_rollout(rollout_id, groups=groups, samples=samples)

    async def execute_eval(self, rollout_id: int, samples: int | None = None) -> EvalResult:
        """As `TaskScheduler.execute_eval`; may run beside a rollout."""
        return await self._started.execute_eval(rollout_id, samples=samples)

    async def pause(self, role: str = "student", mode: str = "abort") -> GenerationState:
        """Holds generation before new weights are written. Raises as the gateway's `pause`."""
        return await self._started.engine.generation.pause(role, PauseMode(mode))

    async def update_weights(self, model_path: str, weight_version: str, role: str = "student") -> GenerationState:
        update = WeightUpdate(model_path=model_path, weight_version=weight_version)
        return await self._started.engine.generation.update_weights(role, update)

    async def weights_changed(self, weight_version: str, role: str = "student") -> GenerationState:
        """Within a pause: you have put these weights there yourself."""
        return await self._started.engine.generation.weights_changed(role, weight_version)

    async def set_endpoints(
        self, role: str, urls: Sequence[str] | None, control_urls: Sequence[str] = ()
    ) -> list[EndpointView]:
        """As `GenerationClient.set_endpoints`."""
        endpoints = None if urls is None else Endpoints(urls=tuple(urls), control_urls=tuple(control_urls))
        return await self._started.engine.generation.set_endpoints(role, endpoints)

    async def resume(self, role: str = "student") -> GenerationState:
        return await self._started.engine.generation.resume(role)

    async def runners(self) -> list[RunnerView]:
        return self._started.engine.runner_views()

    @property
    def _started(self) -> TaskScheduler:
        if (scheduler := self._held.entered) is None:
            raise FailedPreconditionError("the rollout manager is not started (any more): call start first")
        return scheduler


def rollout_manager_actor(**options: Any) -> Any:
    """The manager as a Ray actor class; options as for `ray.remote`, under which it takes no CPU.

    Raises FailedPreconditionError without Ray.
    """
    try:
        ray = importlib.import_module("ray")
    except ImportError as error:
        raise FailedPreconditionError("Ray is not installed: install the extra 'ray' of py-scheduler") from error
    return ray.remote(**{"num_cpus": 0} | options)(SchedulerRolloutManager)
