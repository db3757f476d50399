"""What a step asks of the TaskScheduler that it belongs to. So the scheduler knows its steps, and no step knows it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
    from pathlib import Path

    from py_scheduler.domain.task import BatchId, Task
    from py_scheduler.domain.training.data import DataSource
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.interfaces.artifact_folder import ArtifactFolder
    from py_scheduler.interfaces.task_run import Trace
    from py_scheduler.interfaces.training_loop import TrainingLoop
    from py_scheduler.rollout.groups import Group
    from py_scheduler.rollout.settings import RolloutSettings


class StepMoves(Protocol):
    """The moves that a step is made of, and the loop that it is a step of. TaskScheduler tells what each one does."""

    settings: RolloutSettings
    eval_sources: tuple[DataSource, ...]
    folder: ArtifactFolder
    training_loop: TrainingLoop
    leaves_tasks: bool

    @property
    def artifact_root(self) -> Path | None: ...

    def fetch(self, count: int) -> list[Task]: ...

    def distribute(self, datasets: Sequence[Iterable[Task]], *, samples: int | None = None) -> Iterator[Task]: ...

    def run_each(
        self,
        tasks: Iterable[Task],
        *,
        batch_id: BatchId | None = None,
        round_no: int = 0,
        request_prefix: str = "",
        iteration: IterationContext | None = None,
        trace: Trace | None = None,
    ) -> AsyncGenerator[Group, None]: ...

    def check_has_source(self) -> None: ...
