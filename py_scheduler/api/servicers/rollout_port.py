"""What the API needs of who executes steps: `interfaces.step_service.StepService`, or a stand-in for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from py_scheduler.domain.requests import EventFrame
    from py_scheduler.domain.training.samples import TrainingSample
    from py_scheduler.domain.training.steps import StepReport, StepRequest


class RolloutPort(Protocol):
    def follow(
        self, request: StepRequest, after_sequence: int | None
    ) -> AsyncGenerator[EventFrame | StepReport, None]: ...

    def saved_groups(self, rollout_id: int) -> AsyncGenerator[list[TrainingSample], None]: ...
