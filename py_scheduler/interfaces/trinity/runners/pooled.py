"""What the pool, the engine and a start ask of a RunnerWrapper, which may so know the engine without a circle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from py_scheduler.interfaces.trinity.mirrors import TaskWrapper
    from py_scheduler.interfaces.trinity.protocols import RunStatus, TrinityConfig


class PooledRunner(Protocol):
    """One runner and its life. RunnerWrapper tells what each call does."""

    runner_id: int
    config: TrinityConfig
    state: dict[str, Any]
    status_class: type[Any]

    @property
    def unfit_because(self) -> str: ...

    async def prepare(self) -> None: ...

    async def restart_runner(self) -> None: ...

    async def confirm_alive(self) -> None: ...

    async def update_state(self) -> None: ...

    async def run_task(
        self, task: TaskWrapper, repeat_times: int, run_id_base: int, collect_partial_runs: bool
    ) -> tuple[RunStatus, bytes]: ...

    def kill(self) -> None: ...

    async def ended(self) -> None: ...
