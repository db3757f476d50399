"""The Scheduler that Trinity's rollout coordinator makes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trinity.explorer.workflow_runner import Status

from py_scheduler.integrations.trinity.actors import RunnerWrapper
from py_scheduler.interfaces.trinity import Scheduler as OwnScheduler

if TYPE_CHECKING:
    from trinity.common.config import Config


class Scheduler(OwnScheduler):
    """`interfaces.trinity.Scheduler` over Trinity's actors. Ray is initialised, and the models' actors are there."""

    runner_class = RunnerWrapper
    status_class = Status

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.namespace = config.ray_namespace
        self.default_batch_size = config.buffer.batch_size
