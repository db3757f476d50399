"""What the API needs: an engine (`scheduler.engine.Engine`) and whoever executes steps (`interfaces.step_service`)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Generator

    from py_scheduler.domain.collecting import CollectReply, CollectRequest
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.generation import (
        Endpoints,
        EndpointView,
        GenerationState,
        PauseMode,
        WeightUpdate,
    )
    from py_scheduler.domain.leases import (
        AcquireRequest,
        CapacityView,
        LeaseView,
        PlacementDemand,
        PlacementView,
        ReleaseReply,
        ReleaseRequest,
        RenewRequest,
    )
    from py_scheduler.domain.requests import (
        AbortReply,
        AbortRequest,
        EventFilter,
        EventFrame,
        ServerInfo,
        SubmissionSelector,
        SubmissionView,
        SubmitReply,
        SubmitRequest,
    )
    from py_scheduler.domain.resources import Resource
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.domain.task import SubmissionKey
    from py_scheduler.domain.training.samples import TrainingSample
    from py_scheduler.domain.training.steps import StepReport, StepRequest


class PlacementPort(Protocol):
    """Room for schedulers that live elsewhere."""

    async def acquire(self, request: AcquireRequest) -> LeaseView: ...

    def renew(self, request: RenewRequest) -> float: ...

    def release(self, request: ReleaseRequest) -> ReleaseReply: ...

    def capacity(self, per_sample: Resource) -> CapacityView: ...

    def explain(self, demand: PlacementDemand) -> PlacementView: ...


class GenerationPort(Protocol):
    """Pauses, weights and servers of the language models."""

    async def pause(self, role: str, mode: PauseMode) -> GenerationState: ...

    async def resume(self, role: str) -> GenerationState: ...

    async def update_weights(self, role: str, update: WeightUpdate) -> GenerationState: ...

    async def weights_changed(self, role: str, version: str) -> GenerationState: ...

    async def set_endpoints(self, role: str, endpoints: Endpoints | None) -> list[EndpointView]: ...

    def endpoints(self) -> dict[str, list[EndpointView]]: ...

    async def states(self, *roles: str) -> list[GenerationState]: ...


class ResultsPort(Protocol):
    """Results for whoever pulls them."""

    async def collect(self, request: CollectRequest) -> CollectReply: ...

    async def drain(self, request: CollectRequest) -> CollectReply: ...

    async def acknowledge(self, namespace: str, request_id: str) -> None: ...

    async def discard(self, selector: SubmissionSelector, request_id: str = "") -> None: ...


class EnginePort(Protocol):
    """The scheduler's engine."""

    @property
    def store_epoch(self) -> bytes: ...

    @property
    def oldest_sequence(self) -> int: ...

    @property
    def last_sequence(self) -> int: ...

    @property
    def can_record(self) -> bool: ...

    @property
    def can_lease(self) -> bool: ...

    @property
    def can_generate(self) -> bool: ...

    @property
    def leases(self) -> PlacementPort: ...

    @property
    def generation(self) -> GenerationPort: ...

    @property
    def results(self) -> ResultsPort: ...

    async def submit(self, request: SubmitRequest) -> SubmitReply: ...

    async def submit_as_read(
        self, key: SubmissionKey, reading: Generator[None, None, SubmitRequest], *, size: int
    ) -> SubmitReply: ...

    async def abort(self, request: AbortRequest) -> AbortReply: ...

    async def resume_training(self, namespace: str) -> int: ...

    def runner_views(self) -> list[RunnerView]: ...

    def acknowledge(self, event_filter: EventFilter, through_sequence: int) -> int: ...

    def submission(self, selector: SubmissionSelector) -> SubmissionView: ...

    async def explain_task(self, task_id: str, namespace: str) -> TaskExplanation: ...

    def watch(self, event_filter: EventFilter, after_sequence: int | None) -> AsyncIterator[EventFrame]: ...

    async def server_info(self, version: str) -> ServerInfo: ...


class RolloutPort(Protocol):
    """Whole steps, for whoever follows them."""

    def follow(
        self, request: StepRequest, after_sequence: int | None
    ) -> AsyncGenerator[EventFrame | StepReport, None]: ...

    def saved_groups(self, rollout_id: int) -> AsyncGenerator[list[TrainingSample], None]: ...
