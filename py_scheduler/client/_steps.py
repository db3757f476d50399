"""Whole steps of a training loop, executed by the server: RolloutService."""

from __future__ import annotations

import uuid
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from py_scheduler._generated.rollout_scheduler.v1 import (
    rollout_service_pb2,
    rollout_service_pb2_grpc,
    scheduler_service_pb2_grpc,
)
from py_scheduler.client._backoff import Backoff
from py_scheduler.client._rollout import RolloutEvent, rollout_events
from py_scheduler.client._streams import StreamClient
from py_scheduler.domain.training.steps import StepKind, StepReport, StepRequest
from py_scheduler.wire.events import decode_frame
from py_scheduler.wire.rollouts import decode_report, encode_step_request
from py_scheduler.wire.training_samples import decode_samples

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from py_scheduler.domain.requests import WatchedFrame
    from py_scheduler.domain.training.samples import TrainingSample

StepEvent = RolloutEvent | StepReport


class StepClient(StreamClient[scheduler_service_pb2_grpc.SchedulerServiceStub]):
    """The part of SchedulerClient that has the server execute steps."""

    stub_class = scheduler_service_pb2_grpc.SchedulerServiceStub

    async def execute_rollout(
        self,
        rollout_id: int,
        *,
        request_id: str | None = None,
        groups: int | None = None,
        samples: int | None = None,
        cancel_on_disconnect: bool = False,
    ) -> AsyncGenerator[StepEvent, None]:
        """Has the server roll out a whole training step on its own data sets: each `SampleDone` and `TaskDone` as it
        happens, and last the `StepReport`.

        The same request_id again joins the step, or is told its report once more; None makes a fresh one. groups,
        samples: in place of the server's settings. Leaving early leaves the step running, unless
        `cancel_on_disconnect` is set. Raises FailedPreconditionError (the server has no data set, or another step is
        under way), AlreadyExistsError, InvalidArgumentError, and what the step itself fails of.
        """
        request = StepRequest(
            kind=StepKind.ROLLOUT,
            rollout_id=rollout_id,
            request_id=request_id or uuid.uuid4().hex,
            groups=groups,
            samples=samples,
            cancel_on_disconnect=cancel_on_disconnect,
        )
        async with aclosing(self._step_events(request)) as events:
            async for event in events:
                yield event

    async def execute_eval(
        self,
        rollout_id: int,
        *,
        request_id: str | None = None,
        samples: int | None = None,
        cancel_on_disconnect: bool = False,
    ) -> AsyncGenerator[StepEvent, None]:
        """Has the server evaluate every prompt of its eval data sets; otherwise as `execute_rollout`.

        samples: copies of each prompt, in place of the server's setting.
        """
        request = StepRequest(
            kind=StepKind.EVAL,
            rollout_id=rollout_id,
            request_id=request_id or uuid.uuid4().hex,
            samples=samples,
            cancel_on_disconnect=cancel_on_disconnect,
        )
        async with aclosing(self._step_events(request)) as events:
            async for event in events:
                yield event

    async def step_frames(
        self, request: StepRequest, cursor: bytes = b""
    ) -> AsyncGenerator[WatchedFrame | StepReport, None]:
        """A step's frames from a cursor on (empty: from its first event), and then its report.

        For those who keep cursors: a frame's cursor goes on with the same request where the frame ended, in another
        process too. Raises what `execute_rollout` and `watch` raise.
        """
        message = encode_step_request(request, cursor)

        def call() -> Any:
            stub: Any = rollout_service_pb2_grpc.RolloutServiceStub(self._open_channel)
            method = stub.ExecuteRollout if request.kind is StepKind.ROLLOUT else stub.ExecuteEval
            return method(message, metadata=self._metadata)

        async with aclosing(self._messages(call, message)) as messages:
            async for frame in messages:
                report = decode_report(frame)
                if report is not None:
                    yield report
                    return
                yield decode_frame(frame)

    async def read_samples(self, rollout_id: int) -> AsyncGenerator[list[TrainingSample], None]:
        """The groups that a rollout handed out to train on, dummies included, as the server saved them.

        rollout_id: `samples_of` in the step's report. A broken connection is an error: read from the beginning again.
        Raises NotFoundError when that iteration's samples are not saved, FailedPreconditionError.
        """
        stub: Any = rollout_service_pb2_grpc.RolloutServiceStub(self._open_channel)
        request = rollout_service_pb2.ReadSamplesRequest(rollout_id=rollout_id)
        call = stub.ReadSamples(request, metadata=self._metadata)
        group: list[TrainingSample] = []
        last_no = 0
        async with self._one_try(call, Backoff(self._target, 0.0)):
            while (message := await self._read(call)) is not None:
                for group_no, sample in decode_samples(message):
                    if group and group_no != last_no:
                        yield group
                        group = []
                    last_no = group_no
                    group.append(sample)
        if group:
            yield group

    async def _step_events(self, request: StepRequest) -> AsyncGenerator[StepEvent, None]:
        async with aclosing(self.step_frames(request)) as frames:
            async for frame in frames:
                if isinstance(frame, StepReport):
                    yield frame
                else:
                    for event in rollout_events(frame):
                        yield event
