"""What the Scheduler of seed 2 asks of its configuration, its tasks and their workflows; Trinity's own have all of it.

`workflows.py` and `config.py` beside this file have plain classes that fit, for whoever has no Trinity.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from py_scheduler.domain.task import BatchId


class TrinityModelConfig(Protocol):
    """A model that runners use. engine_num: how many engines serve it."""

    @property
    def engine_num(self) -> int: ...


class TrinityOverRolloutConfig(Protocol):
    """wait_after_min: seconds in which more may come once `min_num` tasks are there. return_partial_tasks: whether runs
    that succeeded are kept where others of their sub-task failed.
    """

    @property
    def wait_after_min(self) -> float: ...

    @property
    def return_partial_tasks(self) -> bool: ...


class TrinityDynamicTimeoutConfig(Protocol):
    """See `Scheduler.dynamic_timeout`."""

    @property
    def enable(self) -> bool: ...

    @property
    def warmup_min_steps(self) -> int: ...

    @property
    def ratio(self) -> float: ...


class TrinityExplorerConfig(Protocol):
    """max_timeout: seconds that one try may take, in which all of them share: see `Scheduler.default_timeout`.

    runner_state_report_interval: seconds between tables of the runners in the log; 0: none. One that has them may say
    more by `runner` and `process`; see `config.ExplorerConfig`.
    """

    @property
    def runner_per_model(self) -> int: ...

    @property
    def runner_prepare_concurrency(self) -> int: ...

    @property
    def runner_prepare_max_retries(self) -> int: ...

    @property
    def runner_state_report_interval(self) -> float: ...

    @property
    def max_timeout(self) -> float: ...

    @property
    def max_retry_times(self) -> int: ...

    @property
    def max_repeat_times_per_runner(self) -> int | None: ...

    @property
    def concurrent_mode(self) -> str: ...

    @property
    def rollout_model(self) -> TrinityModelConfig: ...

    @property
    def auxiliary_models(self) -> Sequence[TrinityModelConfig]: ...

    @property
    def over_rollout(self) -> TrinityOverRolloutConfig: ...

    @property
    def dynamic_timeout(self) -> TrinityDynamicTimeoutConfig: ...


class TrinityConfig(Protocol):
    """All that the scheduler reads is its explorer's."""

    @property
    def explorer(self) -> TrinityExplorerConfig: ...


class TrinityTask(Protocol):
    """A dataclass: a runner gets a copy with `batch_id`, `task_id` and `rollout_args.n` set.

    rollout_args: a dataclass with a field `n`; the sub-task's repeats stand there.
    """

    @property
    def workflow(self) -> Any: ...

    @property
    def repeat_times(self) -> int | None: ...

    @property
    def is_eval(self) -> bool: ...

    @property
    def batch_id(self) -> BatchId: ...

    @property
    def task_id(self) -> BatchId: ...

    @property
    def rollout_args(self) -> Any: ...


class RunStatus(Protocol):
    """What a runner says of the runs it was given. metrics: a dict from each run that succeeded, or from each of its
    experiences. message: why not all did.
    """

    @property
    def completed_runs(self) -> int: ...

    @property
    def total_runs(self) -> int: ...

    @property
    def metrics(self) -> Sequence[Mapping[str, float]]: ...

    @property
    def message(self) -> str | None: ...

    @property
    def ok(self) -> bool: ...


class TrinityRunner(Protocol):
    """What a RunnerWrapper has work done by: an object in this loop, a process, an actor. One task at a time."""

    @property
    def unfit_because(self) -> str:
        """Why it may not be given another task; empty while it may. Asked after each."""
        ...

    async def prepare(self) -> None:
        """Returns when it can take work."""
        ...

    async def confirm_alive(self) -> None:
        """Raises RunnerLostError when it cannot take work."""
        ...

    async def run_task(
        self, task: Any, batch_id: str, repeat_times: int, run_id_base: int, collect_partial_runs: bool
    ) -> tuple[RunStatus, bytes]:
        """One try. A cancelled call stops the work, and ends with it. Raises RunnerLostError when it died."""
        ...

    async def get_runner_state(self) -> dict[str, Any]: ...

    def kill(self) -> None:
        """Ends it at once, whatever it is at, if it can be ended."""
        ...

    async def ended(self) -> None:
        """After `kill`: returns when nothing of it is left that could be waited for."""
        ...
