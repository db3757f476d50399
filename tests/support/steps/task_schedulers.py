"""TaskSchedulers over the real engine, the tasks that they fetch, and what came back."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.domain.task import Task, TaskConfig
from py_scheduler.interfaces.task_scheduler import TaskScheduler
from py_scheduler.rollout.reuse import ReuseSettings
from py_scheduler.rollout.settings import RolloutSettings
from py_scheduler.rollout.sources.iterable import IterableSource
from py_scheduler.scheduler.engine import Engine
from py_scheduler.scheduler.settings import EngineSettings
from tests.support.agents.step_handlers import Rated
from tests.support.handlers import spec_of

if TYPE_CHECKING:
    from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
    from py_scheduler.domain.ports import Journal
    from py_scheduler.interfaces.step_results import RolloutResult
    from py_scheduler.placement import PlacementPool

ROLLED_OUT = RolloutSettings(groups_per_step=2, reuse=ReuseSettings(mode="never"))


def engine_of(
    *specs: EvaluatorSpec, pool: PlacementPool | None = None, journal: Journal | None = None, **settings: Any
) -> Engine:
    return Engine(
        specs=specs,
        pool=pool,
        generation_backends={},
        journal=journal or MemoryJournal(),
        clock=LoopClock(),
        settings=EngineSettings(**settings),
    )


def rows(name: str, count: int, repeat_times: int = 2, **metadata: Any) -> list[Task]:
    config = TaskConfig(task_type="agent", repeat_times=repeat_times, dataset=name)
    return [Task(config=config, prompt=f"{name} {number}", metadata=metadata) for number in range(count)]


def scheduler_of(
    handler: BaseAgent | None = None,
    source: list[Task] | None = None,
    evals: dict[str, list[Task]] | None = None,
    **more: Any,
) -> TaskScheduler:
    settings = more.pop("settings", ROLLED_OUT)
    return TaskScheduler(
        engine_of(spec_of(handler or Rated())),
        settings=settings,
        source=IterableSource("train", rows("train", 12) if source is None else source),
        eval_sources=[IterableSource(name, tasks, on_end="stop") for name, tasks in (evals or {}).items()],
        **more,
    )


def prompts(result: RolloutResult) -> list[str]:
    return [group.task.prompt for group in result.groups]
