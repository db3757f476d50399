"""A configuration for those who have no Trinity; the names and defaults are Trinity's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from py_scheduler.domain.runners.runner import DEFAULT_ENVIRONMENT


def _no_model(_engine_id: int) -> object:
    return None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model that runners use."""

    engine_num: int = 1
    """How many engines serve it; runners are shared out among them."""
    open_model: Callable[[int], object] = _no_model
    """Makes what workflows get as their `model`, of the engine with that number. A `model_version` that it has is noted
    with each experience."""


@dataclass(frozen=True, kw_only=True)
class OverRolloutConfig:
    """See `protocols.TrinityOverRolloutConfig`."""

    wait_after_min: float = 30.0
    return_partial_tasks: bool = False


@dataclass(frozen=True, kw_only=True)
class DynamicTimeoutConfig:
    """See `protocols.TrinityDynamicTimeoutConfig`."""

    enable: bool = False
    warmup_min_steps: int = 1
    ratio: float = 3.0


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """Of `process` runners."""

    start_seconds: float = 60.0
    """What one start may take, imports and opening the models included."""
    max_resident_mib: float | None = None
    """A process that holds more of the machine's memory after a task is replaced; None: never."""
    environment: tuple[str, ...] = DEFAULT_ENVIRONMENT
    """Names of the variables that it gets of this process's."""


@dataclass(frozen=True, kw_only=True)
class ExplorerConfig:
    """Trinity's keys are told in `protocols.TrinityExplorerConfig`; the first two are ours."""

    runner: str = "inline"
    """`inline`, in the scheduler's own loop, or `process`, each in a process of its own, which can be killed: for
    workflows that block, exit, or leak. What they are made of is sent there pickled, as `multiprocessing` does it."""
    process: ProcessConfig = ProcessConfig()
    """Of `process` runners."""
    runner_per_model: int = 8
    runner_prepare_concurrency: int = 8
    runner_prepare_max_retries: int = 2
    runner_state_report_interval: float = 0.0
    max_timeout: float = 1800.0
    max_retry_times: int = 2
    max_repeat_times_per_runner: int | None = None
    concurrent_mode: str = "sequential"
    rollout_model: ModelConfig = ModelConfig()
    auxiliary_models: Sequence[ModelConfig] = ()
    over_rollout: OverRolloutConfig = OverRolloutConfig()
    dynamic_timeout: DynamicTimeoutConfig = DynamicTimeoutConfig()


@dataclass(frozen=True, kw_only=True)
class Config:
    """Implements `protocols.TrinityConfig`."""

    explorer: ExplorerConfig = field(default_factory=ExplorerConfig)
