"""The trainer of a simulation: submits its steps to an engine, as many ahead as it may, and hears how samples end."""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.events import AttemptEnded, TaskDone
from py_scheduler.domain.limits import MAX_SAMPLES_PER_CALL, MAX_TASKS_PER_CALL
from py_scheduler.domain.requests import EventFilter, EventKind, SubmissionSelector, SubmitRequest
from py_scheduler.domain.task import RetryPolicy, SubmissionKey, Task, TaskConfig
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError
from py_scheduler.simulation.spans import Spans

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from py_scheduler.scheduler.engine import Engine
    from py_scheduler.simulation.virtual_time import VirtualClock
    from py_scheduler.simulation.workload import SimulatedStep, SimulatedTask

_HEARD = frozenset({EventKind.ATTEMPT_ENDED, EventKind.TASK_DONE})
_REASONS_SHOWN = 3


class _Open:
    """A submission of which something is still to come: the tasks of a step, or its evals."""

    def __init__(self, step: int, key: SubmissionKey, submitted: float, *, is_eval: bool) -> None:
        self.step = step
        self.key = key
        self.is_eval = is_eval
        self.submitted = submitted
        self.submission_id = ""
        self.left = 0
        self.is_done = asyncio.Event()


class _Known(msgspec.Struct, frozen=True, gc=False):
    """What is known of an open task beside what its events say."""

    task_no: int
    client_key: str
    evaluator_id: str
    submission: _Open


class Trainer:
    """One run's. tasks: by client_key, those that are open; it is the simulated handler's view of the workload.

    ahead: how many steps may be submitted beyond the oldest that is not done; None: a step waits for no other.
    """

    def __init__(
        self,
        engine: Engine,
        clock: VirtualClock,
        tasks: dict[str, SimulatedTask],
        *,
        ahead: int | None,
        retry: RetryPolicy,
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._unix_start = clock.unix_time() - clock.monotonic()
        self._tasks = tasks
        self._ahead = ahead
        self._retry = retry
        self._first_evaluator = next(iter(engine.specs))
        self._known: dict[str, _Known] = {}
        self._open: dict[_Open, None] = {}
        self._hearing: dict[str, asyncio.Task[None]] = {}
        """By namespace."""
        self._calls = 0
        self.submitted_tasks = 0
        self.planned_samples = 0
        self.steps = 0
        self.outcomes: Counter[str] = Counter()
        self.states: Counter[str] = Counter()
        self.failed_attempts = 0
        self.failed_seconds = 0.0
        self.given_up = 0
        """Samples that the engine ended because no node was left for them."""
        self.why_given_up = ""
        self.last_end = 0.0
        self.spans = Spans()

    async def run(self, steps: Iterable[SimulatedStep]) -> None:
        """Returns when all of it has ended. Raises what a submit raises."""
        try:
            async with asyncio.TaskGroup() as group:
                await self._submit_all(steps, group)
                for hearing in self._hearing.values():
                    hearing.cancel()
        except BaseExceptionGroup as faults:
            raise faults.exceptions[0] from None  # One ends both, and is told as itself.

    async def _submit_all(self, steps: Iterable[SimulatedStep], group: asyncio.TaskGroup) -> None:
        """Returns when the last of it is done. group: of those who hear, one in each namespace."""
        before: deque[_Open] = deque()
        for number, step in enumerate(steps):
            while self._ahead is not None and len(before) > self._ahead:
                await before.popleft().is_done.wait()
            if (wait := step.at_seconds - self._clock.monotonic()) > 0:
                await asyncio.sleep(wait)
            self.steps += 1
            batch_id = number if step.batch_id is None else step.batch_id
            if step.tasks:
                key = SubmissionKey(batch_id, step.namespace)
                before.append(self._submit(number, key, step.tasks, is_eval=False))
            if step.evals:
                key = SubmissionKey(f"{batch_id}/eval" if step.tasks else batch_id, step.namespace)
                self._submit(number, key, step.evals, is_eval=True)
            if step.namespace not in self._hearing:
                self._hearing[step.namespace] = group.create_task(self._hear(step.namespace))
        while self._open:
            await next(iter(self._open)).is_done.wait()

    def why_idle(self) -> Exception:
        """What is left although nothing can happen any more: a deadlock, with the engine's own reasons."""
        said = []
        for submission in self._open:
            key = submission.key
            selector = SubmissionSelector(submission_id=submission.submission_id, namespace=key.namespace)
            view = self._engine.submission(selector)
            reasons = list(dict.fromkeys(waiting.reason for waiting in view.waiting))[:_REASONS_SHOWN]
            said.append(f"batch_id {key.batch_id}: {submission.left:,} open, {'; '.join(reasons) or 'none waits'}")
        return FailedPreconditionError(
            f"the simulation stopped at {self._clock.monotonic():.1f} s with work left: {'. '.join(said) or 'none'}"
        )

    def _submit(self, step: int, key: SubmissionKey, tasks: Sequence[SimulatedTask], *, is_eval: bool) -> _Open:
        submission = _Open(step, key, self._clock.monotonic(), is_eval=is_eval)
        self._open[submission] = None
        self._check(tasks)
        for chunk in _chunks(tasks):
            submission.left += len(chunk)
            first_no = self.submitted_tasks
            self.submitted_tasks += len(chunk)
            self.planned_samples += sum(len(task.run_seconds) for task in chunk)
            known = [
                _Known(number, str(number), task.evaluator_id or self._first_evaluator, submission)
                for number, task in enumerate(chunk, first_no)
            ]
            for one, task in zip(known, chunk, strict=True):
                self._tasks[one.client_key] = task
            reply = self._engine.accept(
                SubmitRequest(
                    request_id=f"simulated-{self._calls}",
                    key=key,
                    tasks=tuple(map(self._task, known, chunk)),
                )
            )
            self._calls += 1
            submission.submission_id = reply.submission_id
            self._known.update(zip(reply.task_ids, known, strict=True))
        self._close_if_done(submission)
        return submission

    def _check(self, tasks: Sequence[SimulatedTask]) -> None:
        known = self._engine.specs
        for name in dict.fromkeys(task.evaluator_id for task in tasks if task.evaluator_id):
            if name not in known:
                raise InvalidArgumentError(
                    f"a task is of the evaluator {name!r}, the configuration has {', '.join(known)}", "workload"
                )

    def _task(self, known: _Known, task: SimulatedTask) -> Task:
        return Task(
            config=TaskConfig(
                task_type=known.evaluator_id,
                repeat_times=len(task.run_seconds),
                is_eval=known.submission.is_eval,
                retry=self._retry,
            ),
            client_key=known.client_key,
        )

    async def _hear(self, namespace: str) -> None:
        async for frame in self._engine.watch(EventFilter(kinds=_HEARD, namespace=namespace), None):
            for record in frame.records:
                if isinstance(record.event, AttemptEnded):
                    self._attempt_ended(record.event)
                elif isinstance(record.event, TaskDone):
                    self._task_done(record.event)
            # What was heard need not be kept: a million samples take no more memory than a thousand.
            self._engine.acknowledge(EventFilter(namespace=namespace), frame.through_sequence)

    def _attempt_ended(self, event: AttemptEnded) -> None:
        if event.next_attempt_no:
            self.failed_attempts += 1
            self.failed_seconds += event.running_seconds
        known = self._known[event.task_id]
        submission = known.submission
        for sample in event.samples:
            if sample.started_unix_seconds:
                self.spans.add(
                    sample,
                    task_no=known.task_no,
                    step=submission.step,
                    is_eval=submission.is_eval,
                    evaluator_id=known.evaluator_id,
                    submitted=submission.submitted,
                    started=sample.started_unix_seconds - self._unix_start,
                )
            else:  # Nobody stops tasks here, so it was refused.
                self.given_up += 1
                self.why_given_up = self.why_given_up or event.message

    def _task_done(self, event: TaskDone) -> None:
        self.last_end = event.unix_seconds - self._unix_start
        self.states[event.state.value] += 1
        self.outcomes.update({outcome.value: count for outcome, count in event.outcomes.items()})
        known = self._known.pop(event.task_id)
        del self._tasks[known.client_key]
        known.submission.left -= 1
        self._close_if_done(known.submission)

    def _close_if_done(self, submission: _Open) -> None:
        if not submission.left:
            self._open.pop(submission, None)
            submission.is_done.set()


def _chunks(tasks: Sequence[SimulatedTask]) -> Iterator[Sequence[SimulatedTask]]:
    """As a client sends them: calls of bounded size."""
    start = samples = 0
    for number, task in enumerate(tasks):
        if number - start == MAX_TASKS_PER_CALL or samples + len(task.run_seconds) > MAX_SAMPLES_PER_CALL:
            yield tasks[start:number]
            start, samples = number, 0
        samples += len(task.run_seconds)
    if start < len(tasks):
        yield tasks[start:]
