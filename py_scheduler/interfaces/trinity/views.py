"""What tools read of a Scheduler, under the names of seed 2. All of it is read from the ledger at that moment."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import TYPE_CHECKING, Any, cast

from py_scheduler.domain.runners.table import aligned
from py_scheduler.interfaces.trinity.mirrors import CompletedTaskResult
from py_scheduler.scheduler.ledger.records import WAITING, sort_batch_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from py_scheduler.domain.collecting import TaskResult
    from py_scheduler.domain.task import BatchId
    from py_scheduler.interfaces.trinity.engine import TrinityEngine
    from py_scheduler.interfaces.trinity.mirrors import RunningTaskState, TaskWrapper
    from py_scheduler.interfaces.trinity.wrapper import RunnerWrapper
    from py_scheduler.scheduler.ledger.records import SubmissionRecord, SubTaskRecord

logger = logging.getLogger(__name__)

_STATE_SECONDS = 5.0
"""How long a runner may take to say how it is: one that is blocked by its workflow says nothing."""

PendingSubTask = tuple["TaskWrapper", int, int]
"""A task, how many of its runs, and the id of the first of them."""


class TrinityViews:
    """The read-only half of a Scheduler."""

    status_class: type[Any]
    _local: TrinityEngine

    # Runners

    @property
    def runners(self) -> dict[int, RunnerWrapper]:
        """By id, those that are being replaced included."""
        # The pool knows them as PooledRunners; those of a Scheduler are made by its `runner_class`.
        return cast("dict[int, RunnerWrapper]", dict(self._local.runners.runners))

    @property
    def busy_runners(self) -> dict[int, RunningTaskState]:
        """By id, what each is at."""
        return dict(self._local.runners.busy)

    @property
    def idle_runners(self) -> set[int]:
        """The ids of those that are alive and at nothing."""
        pool = self._local.runners
        return {runner_id for runner_id in pool.runners if pool.is_alive(runner_id) and runner_id not in pool.busy}

    # Tasks

    @property
    def pending_tasks(self) -> dict[BatchId, deque[PendingSubTask]]:
        """Sub-tasks that no runner is at, by batch, in order of service; the next one is at the right end."""
        found: dict[BatchId, deque[PendingSubTask]] = {}
        for record in self._submissions():
            waiting = deque(
                (wrapper, subtask.sample_count, subtask.first_sample_no)
                for wrapper, subtask in self._subtasks(record)
                if subtask.state in WAITING
            )
            if waiting:
                waiting.reverse()
                found[record.key.batch_id] = waiting
        for batch_id, wrappers in self._local.held.items():
            found[batch_id] = deque((wrapper, wrapper.total_runs, 0) for wrapper in reversed(wrappers))
        return dict(sorted(found.items(), key=lambda item: sort_batch_id(item[0])))

    @property
    def running_tasks(self) -> dict[BatchId, list[RunningTaskState]]:
        """Sub-tasks that runners are at, by batch."""
        found: dict[BatchId, list[RunningTaskState]] = {}
        for state in self._local.runners.busy.values():
            found.setdefault(state.task.batch_id, []).append(state)
        return found

    @property
    def completed_tasks(self) -> dict[BatchId, dict[BatchId, CompletedTaskResult]]:
        """What is to be drained, by batch and task id, in the order of completion."""
        found: dict[BatchId, dict[BatchId, CompletedTaskResult]] = {}
        for record in self._submissions():
            for result in record.kept.collectable.values():
                task_id = self._local.wrappers[result.client_key].task.task_id
                found.setdefault(record.key.batch_id, {})[task_id] = CompletedTaskResult(
                    record.key.batch_id, task_id, self._status(result), list(result.payloads)
                )
        return found

    @property
    def total_completed_steps(self) -> int:
        """Training batches of which every task was drained."""
        return self._local.engine.history.completed_steps

    @property
    def total_completed_tasks(self) -> int:
        """Training tasks that ended by themselves, well or not."""
        return self._local.engine.history.finished_tasks

    @property
    def total_completed_sub_tasks(self) -> int:
        """Sub-tasks of training tasks that ended by themselves, well or not."""
        return self._local.engine.history.finished_subtasks

    @property
    def total_running_time(self) -> float:
        """Seconds that runners were at those, retries included."""
        return self._local.engine.history.running_seconds

    def _submissions(self) -> Iterator[SubmissionRecord]:
        for batch_id in self._local.batch_ids:
            record = self._local.record_of(batch_id)
            if record is not None:
                yield record

    def _subtasks(self, record: SubmissionRecord) -> Iterator[tuple[TaskWrapper, SubTaskRecord]]:
        for task, wrapper in self._local.open_tasks(record):
            for subtask in task.subtasks:
                yield wrapper, subtask

    def _status(self, result: TaskResult) -> Any:
        metrics = [dict(result.metrics)]
        return self.status_class(result.succeeded_samples, result.planned_samples, metrics, result.message or None)

    # States of runners

    def get_key_state(self, key: str) -> dict[int, Any]:
        """Of each runner that has it, the value of one key: `workflow_id` ("batch/task/run"), `model_version`,
        `begin_time`, `terminate_time`, `running_time`, or what a workflow has set.
        """
        return {runner_id: state[key] for runner_id, state in self.get_all_state().items() if key in state}

    def get_runner_state(self, runner_id: int) -> dict[str, Any]:
        """What the runner said last; empty when there is no such runner."""
        runner = self._local.runners.runners.get(runner_id)
        return {} if runner is None else runner.state

    def get_all_state(self) -> dict[int, dict[str, Any]]:
        """By id, what each runner said last; those that said nothing yet are left out."""
        runners = self._local.runners.runners
        return {runner_id: runner.state for runner_id, runner in sorted(runners.items()) if runner.state}

    def print_all_state(self) -> None:
        """Writes all states to the log as a table."""
        for line in state_table({runner_id: runner.state for runner_id, runner in sorted(self.runners.items())}):
            logger.info(line)

    async def update_states(self) -> None:
        """Beyond the seed: asks every runner for its state. One that is blocked keeps what it said last."""
        await asyncio.gather(*[self._update_state(runner) for runner in self.runners.values()])

    async def _update_state(self, runner: RunnerWrapper) -> None:
        try:
            async with asyncio.timeout(_STATE_SECONDS):
                await runner.update_state()
        except Exception as error:  # noqa: BLE001 -- a table for people is not worth more than a line in the log
            logger.debug("runner %d did not say how it is: %r", runner.runner_id, error)

    async def report_states(self, interval_seconds: float) -> None:
        """Beyond the seed: writes the table again and again."""
        while True:
            await self.update_states()
            self.print_all_state()
            await asyncio.sleep(interval_seconds)


def state_table(states: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    """Its lines: a head, a rule, and a runner to each line; "-" where it has no such key."""
    keys = sorted({key for state in states.values() for key in state})
    rows = [["runner_id", *keys]]
    rows += [[str(runner_id), *(str(state.get(key, "-")) for key in keys)] for runner_id, state in states.items()]
    return aligned(rows)
