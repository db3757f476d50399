"""Whole steps of a training loop, which the server executes: RolloutService."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from py_scheduler._generated.rollout_scheduler.v1 import rollout_service_pb2
from py_scheduler._generated.rollout_scheduler.v1.rollout_service_pb2_grpc import RolloutServiceStub
from py_scheduler.client.submissions import RolloutEvent, rollout_events
from py_scheduler.domain.training.steps import StepKind, StepReport
from py_scheduler.wire.events import decode_frame
from py_scheduler.wire.rollouts import decode_report, encode_step_request
from py_scheduler.wire.training_samples import decode_samples

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from py_scheduler.client.connection import Connection
    from py_scheduler.domain.requests import WatchedFrame
    from py_scheduler.domain.training.samples import TrainingSample
    from py_scheduler.domain.training.steps import StepRequest

StepEvent = RolloutEvent | StepReport
"""What a step yields: what a rollout yields, and at the end its report."""


class Steps:
    """The steps of one server. `SchedulerClient` says what each call does and raises."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    @property
    def _stub(self) -> RolloutServiceStub:
        return self._connection.stub(RolloutServiceStub)

    async def frames(self, request: StepRequest, cursor: bytes) -> AsyncGenerator[WatchedFrame | StepReport, None]:
        message = encode_step_request(request, cursor)

        def call() -> Any:
            method: Any = self._stub.ExecuteRollout if request.kind is StepKind.ROLLOUT else self._stub.ExecuteEval
            return method(message, metadata=self._connection.metadata)

        async with aclosing(self._connection.frames(call, message)) as messages:
            async for frame in messages:
                report = decode_report(frame)
                if report is not None:
                    yield report
                    return
                yield decode_frame(frame)

    async def events(self, request: StepRequest) -> AsyncGenerator[StepEvent, None]:
        async with aclosing(self.frames(request, b"")) as frames:
            async for frame in frames:
                if isinstance(frame, StepReport):
                    yield frame
                else:
                    for event in rollout_events(frame):
                        yield event

    async def saved_groups(self, rollout_id: int) -> AsyncGenerator[list[TrainingSample], None]:
        request = rollout_service_pb2.ReadSamplesRequest(rollout_id=rollout_id)
        call = self._stub.ReadSamples(request, metadata=self._connection.metadata)
        group: list[TrainingSample] = []
        last_no = 0
        async with self._connection.one_try(call, None):
            while (message := await self._connection.read(call)) is not None:
                for group_no, sample in decode_samples(message):
                    if group and group_no != last_no:
                        yield group
                        group = []
                    last_no = group_no
                    group.append(sample)
        if group:
            yield group
