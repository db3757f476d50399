"""Steps that are asked for from afar: each runs once, however often it is asked for, and is followed from anywhere.

Invariants
  1. One request_id is one step. Whoever asks again while it runs joins it; whoever asks when it is over is told its
     report again. A step that failed is forgotten, so that asking again tries again.
  2. A follower gets every event of the step after its cursor, then the report; a step goes on without followers.
  3. What is kept of finished steps is bounded by their number; their events are the event log's matter.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from contextlib import aclosing
from typing import TYPE_CHECKING, Self, cast

from py_scheduler.domain.requests import EventFilter, EventFrame
from py_scheduler.domain.training.steps import StepKind, StepReport, StepRequest
from py_scheduler.errors import AlreadyExistsError, FailedPreconditionError, SchedulerError
from py_scheduler.interfaces.task_run import Trace
from py_scheduler.rollout.files.store import RolloutStore

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from py_scheduler.domain.training.samples import TrainingSample
    from py_scheduler.interfaces.task_scheduler import TaskScheduler

_log = logging.getLogger(__name__)


class _Step:
    """A step under way or over: then it has a report, or the reason why there is none."""

    def __init__(self, request: StepRequest, trace: Trace) -> None:
        self.request = request
        self.trace = trace
        self.followers = 0
        self.over = asyncio.Event()
        self.report: StepReport | None = None
        self.failure: BaseException | None = None
        self.task: asyncio.Task[None]

    @property
    def can_be_cancelled(self) -> bool:
        return not self.over.is_set() and not self.trace.is_final


class StepService:
    """Executes the steps of a TaskScheduler for callers that come and go. Use as `async with`."""

    def __init__(self, scheduler: TaskScheduler) -> None:
        self._scheduler = scheduler
        self._steps: OrderedDict[str, _Step] = OrderedDict()
        self._tasks = asyncio.TaskGroup()
        self._is_stopping = False

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self.stop()
        await self._tasks.__aexit__(None, None, None)

    def stop(self) -> None:
        """Cancels every step and leaves its tasks to the engine, which is about to end; nothing is begun any more."""
        self._is_stopping = True
        self._scheduler.leaves_tasks = True
        for step in self._steps.values():
            if step.can_be_cancelled:
                step.task.cancel()

    async def follow(
        self, request: StepRequest, after_sequence: int | None
    ) -> AsyncGenerator[EventFrame | StepReport, None]:
        """Frames of the step's events after a sequence (None: from its first), then its report.

        Begins the step unless its request is known. Ends without a report when the server is stopping. Raises
        AlreadyExistsError (the request_id with another content), CursorExpiredError, FailedPreconditionError, and what
        the step raises.
        """
        step = self._known(request) or self._begin(request)
        step.followers += 1
        try:
            async with aclosing(self._frames(step, after_sequence)) as frames:
                async for frame in frames:
                    yield frame
            if step.report is not None:
                yield step.report
            elif step.failure is not None:
                raise step.failure
        finally:
            step.followers -= 1
            if request.cancel_on_disconnect and not step.followers:
                self._cancel(step)

    async def saved_groups(self, rollout_id: int) -> AsyncGenerator[list[TrainingSample], None]:
        """The groups that an iteration handed out, read from its file one after the other.

        Raises FailedPreconditionError without an artifact folder, NotFoundError when they are not saved.
        """
        root = self._scheduler.artifact_root
        if root is None:
            raise FailedPreconditionError("this server keeps no samples: set rollout.artifact_dir")
        store = RolloutStore(root, file_format=self._scheduler.settings.file_format)
        groups = await self._scheduler.folder.run(lambda: store.load(rollout_id))
        while (group := await self._scheduler.folder.run(lambda: next(groups, None))) is not None:
            yield group

    # Steps

    def _known(self, request: StepRequest) -> _Step | None:
        step = self._steps.get(request.request_id)
        if step is not None and step.request.content != request.content:
            raise AlreadyExistsError(
                f"request_id {request.request_id!r} was used for another step: send a fresh request_id"
            )
        return step

    def _begin(self, request: StepRequest) -> _Step:
        if self._is_stopping:
            raise FailedPreconditionError("the server is shutting down and begins no step: ask another one")
        if request.kind is StepKind.EVAL:
            self._scheduler.check_has_eval_sources()
        for other in self._steps.values():
            if other.request.kind is request.kind and not other.over.is_set():
                raise FailedPreconditionError(
                    f"{other.request.kind} {other.request.rollout_id} is under way: wait for it, or follow it with its "
                    f"request_id {other.request.request_id!r}"
                )
        before_sequence = self._scheduler.engine.last_sequence
        if request.kind is StepKind.ROLLOUT:
            self._scheduler.training_loop.refuse_if_done(request.request_id)
            if self._scheduler.training_loop.was_begun_before(request.request_id):
                # What had run of it by then is in the journal, if that survived.
                before_sequence = self._scheduler.engine.oldest_sequence - 1
        step = _Step(request, Trace(before_sequence, request.request_id))
        self._steps[request.request_id] = step
        step.task = self._tasks.create_task(self._run(step), name=f"{request.kind} {request.rollout_id}")
        # Besides at the end of `_run`, because a task that is cancelled before its first turn never comes there.
        step.task.add_done_callback(lambda _task: self._end(step))
        return step

    async def _run(self, step: _Step) -> None:
        try:
            step.report = await self._execute(step)
        except Exception as error:  # noqa: BLE001 -- told to whoever follows; one step's fault is not the server's end
            if not isinstance(error, SchedulerError):
                _log.exception("%s %d failed", step.request.kind, step.request.rollout_id)
            step.failure = error
        finally:
            self._end(step)

    def _end(self, step: _Step) -> None:
        if step.over.is_set():
            return
        if step.report is None:
            del self._steps[step.request.request_id]
            if step.failure is None and not self._is_stopping:
                step.failure = FailedPreconditionError(
                    "the step was cancelled, because the last client that followed it left: ask for it again"
                )
        step.over.set()
        step.trace.begun.set()
        self._forget_oldest()

    async def _execute(self, step: _Step) -> StepReport:
        request, trace = step.request, step.trace
        if request.kind is StepKind.ROLLOUT:
            result = await self._scheduler.execute_rollout(
                request.rollout_id, groups=request.groups, samples=request.samples, trace=trace
            )
            return result.report(request)
        measured = await self._scheduler.execute_eval(request.rollout_id, samples=request.samples, trace=trace)
        return measured.report(request)

    def _forget_oldest(self) -> None:
        finished = [request_id for request_id, step in self._steps.items() if step.over.is_set()]
        for request_id in finished[: -self._scheduler.settings.retained_reports]:
            del self._steps[request_id]

    def _cancel(self, step: _Step) -> None:
        if step.can_be_cancelled and not self._is_stopping:
            _log.info("%s %d is cancelled: its client left", step.request.kind, step.request.rollout_id)
            step.task.cancel()

    # Events

    async def _frames(self, step: _Step, after_sequence: int | None) -> AsyncGenerator[EventFrame, None]:
        """The step's events as far as it goes. The first frame comes at once and is empty: the step is there."""
        trace = step.trace
        position = trace.before_sequence if after_sequence is None else after_sequence
        yield EventFrame(after_sequence=position, through_sequence=position, records=())
        await trace.begun.wait()
        if not trace.submission_id:
            return
        event_filter = EventFilter(submission_id=trace.submission_id, namespace=self._scheduler.namespace)
        watch = cast("AsyncGenerator[EventFrame, None]", self._scheduler.engine.watch(event_filter, position))
        async with aclosing(watch) as frames, aclosing(_until_over(frames, step, position)) as until_over:
            async for frame in until_over:
                yield frame


async def _until_over(
    frames: AsyncGenerator[EventFrame, None], step: _Step, position: int
) -> AsyncGenerator[EventFrame, None]:
    """Frames until the step is over and its last event has been among them."""
    over = asyncio.create_task(step.over.wait())
    reading: asyncio.Task[EventFrame | None] | None = None
    try:
        while not (over.done() and position >= step.trace.last_sequence):
            reading = reading or asyncio.create_task(_next_of(frames))
            await asyncio.wait({reading} if over.done() else {reading, over}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                frame, reading = reading.result(), None
                if frame is None:
                    return
                position = frame.through_sequence
                yield frame
    finally:
        waiting = [task for task in (over, reading) if task is not None]
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)


async def _next_of(frames: AsyncGenerator[EventFrame, None]) -> EventFrame | None:
    return await anext(frames, None)
