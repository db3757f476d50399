"""Any number of tasks through an engine, with few of them open at a time.

Tasks go in by windows: a window is submitted when the ones before it have made room. What is in memory is therefore
bounded by what can run at once, not by how many tasks there are.

Invariants
  1. Planned samples that are open, or finished and not handed over, are at most `max_open_samples`; one window may be
     more by itself.
  2. Every task is handed over once, as a Group, or the run raises.
  3. A run that is left early aborts what it has open, also what it was just handing in.
  4. The same tasks give the same windows, and these the same request ids: what a journal still knows is not run again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from itertools import chain
from typing import TYPE_CHECKING, TypeVar, cast

import msgspec

from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.requests import AbortRequest, EventFilter, EventKind, SubmissionSelector, SubmitRequest
from py_scheduler.errors import (
    AlreadyExistsError,
    CursorExpiredError,
    FailedPreconditionError,
    ResourceExhaustedError,
)
from py_scheduler.rollout.groups import group_of
from py_scheduler.scheduler.ledger.records import submission_and_number

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable, Iterable, Iterator

    from py_scheduler.domain.requests import EventFrame, SubmitReply
    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Batch, SubmissionKey, Task
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.rollout.groups import Group
    from py_scheduler.scheduler.engine import Engine

T = TypeVar("T")

_log = logging.getLogger(__name__)

WINDOW_SAMPLES = 256
"""A window is closed by the batch that plans its samples up to this. A constant, so that windows do not depend on the
cluster of the day (invariant 4)."""
_KINDS = frozenset({EventKind.ATTEMPT_ENDED, EventKind.TASK_DONE})


class RunTerms(msgspec.Struct, frozen=True, kw_only=True):
    """What a run's submits have in common.

    key: of the submission. request_prefix: the windows' request ids are this and their number.
    max_open_samples: see the invariants.
    """

    key: SubmissionKey
    request_prefix: str
    max_open_samples: int
    iteration: IterationContext | None = None

    def request_id(self, window_no: int) -> str:
        return f"{self.request_prefix}/{window_no}"


class Trace:
    """Where the events of a step are: for those who follow it in the event log while it runs.

    before_sequence: its first event comes after it. last_sequence: of its last event so far. request_id: under which a
    client asked for the step.
    """

    def __init__(self, before_sequence: int, request_id: str = "") -> None:
        self.before_sequence = self.last_sequence = before_sequence
        self.request_id = request_id
        self.submission_id = ""
        self.begun = asyncio.Event()
        """Set with the submission_id, and at the end of a step that never had one."""
        self.is_final = False
        """Whether the step has its result and only writes it down: a cancellation comes too late."""

    def submitted(self, reply: SubmitReply) -> None:
        if not self.submission_id:
            self.submission_id = reply.submission_id
            self.begun.set()

    def seen(self, sequence: int) -> None:
        self.last_sequence = max(self.last_sequence, sequence)


def windows_of(
    tasks: Iterable[Task], form: Callable[[list[Task]], list[Batch]], guard: Callable[[Iterable[Batch]], None] | None
) -> Iterator[list[Batch]]:
    """Batches by the window. Tasks in a sequence are batched all at once, and guarded before the first window (guard
    None: not at all); of those that an iterator makes, each window is batched by itself. Raises what `guard` raises.
    """
    if isinstance(tasks, Sequence):
        batches = form(list(tasks))
        if guard is not None:
            guard(batches)
        return _chunks(batches, _samples_of)
    return (form(chunk) for chunk in _chunks(tasks, _planned))


def acceptance_order(group: Group) -> int:
    """Sorts the groups of one run by when their tasks were taken in."""
    return submission_and_number(group.task_id)[1]


def _chunks(items: Iterable[T], weight: Callable[[T], int]) -> Iterator[list[T]]:
    chunk: list[T] = []
    samples = 0
    for item in items:
        chunk.append(item)
        samples += weight(item)
        if samples >= WINDOW_SAMPLES:
            yield chunk
            chunk, samples = [], 0
    if chunk:
        yield chunk


def _planned(task: Task) -> int:
    return task.config.repeat_times


def _samples_of(batch: Batch) -> int:
    return sum([task.config.repeat_times for task in batch.tasks])


class _OpenTask:
    """A task that was taken in, and the samples of it that are done: by number, since a frame may be read again."""

    __slots__ = ("samples", "task")

    def __init__(self, task: Task) -> None:
        self.task = task
        self.samples: dict[int, SampleDone] = {}

    def group(self, done: TaskDone) -> Group:
        return group_of(self.task, list(self.samples.values()), done)


class TaskRun:
    """One pass of windows through an engine. `groups` is to be read once."""

    def __init__(
        self,
        engine: Engine,
        windows: Iterator[list[Batch]],
        terms: RunTerms,
        trace: Trace | None,
        may_abort: Callable[[], bool],
    ) -> None:
        """may_abort: asked when the run is left early; when not, its open tasks are left to the engine."""
        self._engine = engine
        self._may_abort = may_abort
        self._windows = enumerate(windows)
        self._next = next(self._windows, None)
        self._terms = terms
        self._trace = trace or Trace(0)
        self._open: dict[str, _OpenTask] = {}
        self._open_samples = 0
        self._submission_id = ""
        self._frames: AsyncGenerator[EventFrame, None] | None = None
        self._through = 0

    async def groups(self) -> AsyncGenerator[Group, None]:
        """Each task's Group as the task completes.

        Raises what `Engine.submit` raises, but for a limit that is reached for now: then it waits.
        """
        try:
            while True:
                await self._fill()
                if not self._open:
                    return
                frame = await self._next_frame()
                if frame is None:
                    raise FailedPreconditionError("the engine was closed while tasks were running: start it again")
                self._through = frame.through_sequence
                for group in self._take(frame):
                    yield group
                    self._open_samples -= group.task.config.repeat_times
        finally:
            if self._frames is not None:
                await self._frames.aclose()
            await self._abort_open()

    # In

    async def _fill(self) -> None:
        """Submits windows while there is room for them."""
        while self._next is not None and self._has_room_for(self._next[1]):
            try:
                reply = await self._submit(*self._next)
            except ResourceExhaustedError as error:
                if error.retry_after_seconds is None:
                    raise
                _log.warning("%s waits: %s", self._terms.request_prefix, error)
                if self._open:
                    return  # to be tried again when something has happened
                await asyncio.sleep(error.retry_after_seconds)
                continue
            self._next = next(self._windows, None)
            if self._frames is None or reply.before_sequence < self._through:
                # The latter when it was run before the last restart: its events have gone by already.
                await self._watch_after(reply.before_sequence)

    def _has_room_for(self, window: list[Batch]) -> bool:
        samples = sum(map(_samples_of, window))
        return not self._open_samples or self._open_samples + samples <= self._terms.max_open_samples

    async def _submit(self, number: int, batches: list[Batch]) -> SubmitReply:
        terms = self._terms
        tasks = tuple(chain.from_iterable(batch.tasks for batch in batches))
        request_id = terms.request_id(number)
        request = SubmitRequest(request_id=request_id, key=terms.key, tasks=tasks, iteration=terms.iteration)
        try:
            reply = await self._engine.submit(request, batches)
        except asyncio.CancelledError:
            # It was taken in although nobody waited for the answer: asking again gives the ids, to be aborted.
            self._accept(await self._engine.submit(request, batches), tasks)
            raise
        except AlreadyExistsError as error:
            raise AlreadyExistsError(
                f"{terms.key.batch_id!r} was run before with other tasks (request {request_id!r}): "
                "use another batch_id or round_no"
            ) from error
        self._accept(reply, tasks)
        return reply

    def _accept(self, reply: SubmitReply, tasks: Sequence[Task]) -> None:
        for task_id, task in zip(reply.task_ids, tasks, strict=True):
            self._open[task_id] = _OpenTask(task)
            self._open_samples += task.config.repeat_times
        if self._submission_id not in ("", reply.submission_id):
            raise FailedPreconditionError(
                f"submission {self._submission_id} was forgotten while its tasks were still coming in: "
                "raise scheduler.retained_submissions"
            )
        self._submission_id = reply.submission_id
        self._trace.submitted(reply)

    # Out

    async def _next_frame(self) -> EventFrame | None:
        assert self._frames is not None, "what is open was submitted"
        try:
            return await anext(self._frames, None)
        except CursorExpiredError as error:
            raise FailedPreconditionError(
                "events of the run were dropped before they were read: raise scheduler.retained_events and "
                "scheduler.retained_bytes, to hold what the open samples say"
            ) from error

    async def _watch_after(self, sequence: int) -> None:
        if self._frames is not None:
            await self._frames.aclose()
        event_filter = EventFilter(submission_id=self._submission_id, kinds=_KINDS, namespace=self._terms.key.namespace)
        # The engine promises no more than an iterator; what `async def` with yield makes can be closed as well.
        self._frames = cast("AsyncGenerator[EventFrame, None]", self._engine.watch(event_filter, sequence))

    def _take(self, frame: EventFrame) -> list[Group]:
        groups = []
        for record in frame.records:
            event = record.event
            assert isinstance(event, AttemptEnded | TaskDone), "the filter lets nothing else through"
            task = self._open.get(event.task_id)
            if task is None:
                continue  # of another run under this batch_id
            if isinstance(event, AttemptEnded):
                task.samples.update((sample.sample_no, sample) for sample in event.samples)
            else:
                del self._open[event.task_id]
                groups.append(task.group(event))
            self._trace.seen(record.sequence)
        return groups

    async def _abort_open(self) -> None:
        """A closed engine ends its tasks itself, or leaves them to the next process."""
        if not self._open or not self._engine.takes_tasks or not self._may_abort():
            return
        request = AbortRequest(
            selector=SubmissionSelector(submission_id=self._submission_id, namespace=self._terms.key.namespace),
            task_ids=tuple(self._open),
            reason="its run was left",
            wait=True,
            timeout_seconds=self._engine.settings.stop_grace_seconds,
        )
        await self._engine.abort(request)
