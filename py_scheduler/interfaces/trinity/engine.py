"""An engine whose nodes are runners: composed here, for a Scheduler or for a runner by itself.

Invariants
  1. A task of seed 2 is an object of the caller's own process. The engine knows it by a client key; what it is, stands
     here until neither the engine nor a caller has any use for it.
  2. Before the engine was opened, `held` has what is to be handed to it; from then on only its ledger says what is
     queued, running or finished.
  3. A batch's tasks are numbered on for as long as anything of it is held, open or to be collected.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from typing import TYPE_CHECKING

from py_scheduler.adapters.children.process_host import ProcessHost
from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.domain.collecting import CollectReply, CollectRequest
from py_scheduler.domain.evaluator import BaseAgent, EvaluatorSpec
from py_scheduler.domain.limits import check_submit
from py_scheduler.domain.requests import Delivery, SubmitRequest
from py_scheduler.domain.task import RetryPolicy, SubmissionKey, Task, TaskConfig
from py_scheduler.errors import SchedulerError
from py_scheduler.execution.held_open import HeldOpen
from py_scheduler.interfaces.trinity.runners.pool import RUN_ID_BASE, TrinityRunnerPool, slot_on
from py_scheduler.scheduler.engine import Engine
from py_scheduler.scheduler.ledger.dynamic_timeout import DynamicTimeoutSettings
from py_scheduler.scheduler.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from py_scheduler.domain.runners.runner import ChildHost
    from py_scheduler.domain.task import BatchId
    from py_scheduler.interfaces.trinity.mirrors import TaskWrapper
    from py_scheduler.interfaces.trinity.protocols import TrinityConfig
    from py_scheduler.scheduler.ledger.records import SubmissionRecord, TaskRecord

_WORKFLOW = "workflow"
PINNED = "pinned"
"""The namespace of sub-tasks that one runner only may run; there they are in no batch's way."""
_RETAINED_EVENTS = 1_024
_RETAINED_BYTES = 1 << 20
"""Nobody watches this engine: what was collected need not stay in its journal."""


def default_timeout(config: TrinityConfig) -> float:
    """Seconds: what all tries at a sub-task may take together."""
    return config.explorer.max_timeout * (config.explorer.max_retry_times + 1)


def process_host() -> ChildHost:
    """Of runners that are processes."""
    return ProcessHost()


class TrinityEngine:
    """The engine, its runners, and the tasks that they run. `wrappers`: by client key, until they are forgotten."""

    def __init__(self, config: TrinityConfig, runner_ids: Iterable[int], stop_grace_seconds: float = 5.0) -> None:
        self._config = config
        self.wrappers: dict[str, TaskWrapper] = {}
        self._keys = itertools.count()
        self._keys_of: dict[BatchId, set[str]] = {}
        self.runners = TrinityRunnerPool(lambda task: self.wrappers[task.client_key], self._on_room)
        specs = [_spec(_WORKFLOW, None), *(_spec(pinned_to(runner_id), runner_id) for runner_id in runner_ids)]
        self.engine = Engine(
            specs=specs,
            pool=self.runners.placement,
            generation_backends={},
            journal=MemoryJournal(retained_events=_RETAINED_EVENTS, retained_bytes=_RETAINED_BYTES),
            clock=LoopClock(),
            settings=_settings(config, stop_grace_seconds),
            runners={spec.evaluator_id: self.runners for spec in specs},
        )
        self.held: dict[BatchId, list[TaskWrapper]] = {}
        self.opened = asyncio.Event()
        self._task_nos: dict[BatchId, int] = {}
        self._open_engine = HeldOpen(lambda: self.engine, "engine of a Scheduler")

    def _on_room(self) -> None:
        self.engine.nodes_have_changed()

    async def open(self) -> None:
        """Starts the engine, unless it was, and hands in what was held; runners join it later.

        Raises what `submit` raises; what is not in then is still held.
        """
        if not self.opened.is_set():
            await self._open_engine.open()
            self.opened.set()
        for batch_id in list(self.held):
            self._accept(self.held[batch_id], batch_id)
            del self.held[batch_id]

    async def close(self) -> None:
        """Ends the engine and its runners, whatever they are at."""
        await self.runners.dismiss(0.0)
        await self._open_engine.close()

    def submit(self, wrappers: Sequence[TaskWrapper], batch_id: BatchId) -> None:
        """Hands tasks of one batch in, for any runner to run; they wait for `open` if need be.

        Raises what `Engine.accept` raises; then none is in.
        """
        if self.opened.is_set():
            self._accept(wrappers, batch_id)
        else:
            self._check(wrappers, batch_id)
            self.held.setdefault(batch_id, []).extend(wrappers)
        self._task_nos[batch_id] = self.next_task_no(batch_id) + len(wrappers)

    def next_task_no(self, batch_id: BatchId) -> int:
        """The first one that no task of the batch has."""
        return self._task_nos.get(batch_id, 0)

    def _accept(self, wrappers: Sequence[TaskWrapper], batch_id: BatchId) -> None:
        request = self.request(SubmissionKey(batch_id), self._configured(wrappers))
        try:
            self.engine.accept(request)
        except SchedulerError:
            self._forget(request)
            raise
        self._keys_of.setdefault(batch_id, set()).update(task.client_key for task in request.tasks)

    def _check(self, wrappers: Sequence[TaskWrapper], batch_id: BatchId) -> None:
        """What would be refused whenever it came."""
        request = self.request(SubmissionKey(batch_id), self._configured(wrappers))
        try:
            check_submit(request)
        finally:
            self._forget(request)

    def _configured(self, wrappers: Sequence[TaskWrapper]) -> list[tuple[TaskWrapper, TaskConfig]]:
        explorer = self._config.explorer
        return [
            (
                wrapper,
                TaskConfig(
                    task_type=_WORKFLOW,
                    repeat_times=wrapper.total_runs,
                    is_eval=bool(wrapper.task.is_eval),
                    max_samples_per_subtask=explorer.max_repeat_times_per_runner,
                    keeps_partial=explorer.over_rollout.return_partial_tasks,
                    attempt_timeout_seconds=default_timeout(self._config),
                    has_dynamic_timeout=True,
                    retry=RetryPolicy(max_retries=explorer.max_retry_times),
                ),
            )
            for wrapper in wrappers
        ]

    def _forget(self, request: SubmitRequest) -> None:
        for task in request.tasks:
            del self.wrappers[task.client_key]

    @property
    def batch_ids(self) -> list[BatchId]:
        """Of what is open or to be collected, in the order in which it was handed in."""
        return list(self._keys_of)

    def has_step(self, batch_id: BatchId) -> bool:
        """Whether anything of the batch waits, runs or is to be collected."""
        record = self.record_of(batch_id)
        return batch_id in self.held or (record is not None and not record.is_over)

    def record_of(self, batch_id: BatchId) -> SubmissionRecord | None:
        """What the ledger has of a batch."""
        return self.engine.ledger.submission_of_key(SubmissionKey(batch_id))

    def open_tasks(self, record: SubmissionRecord) -> list[tuple[TaskRecord, TaskWrapper]]:
        """A batch's tasks that are open, shown as they stand now."""
        found = [(task, self.wrappers[task.task.client_key]) for task in record.open_tasks.values()]
        for task, wrapper in found:
            wrapper.show(task)
        return found

    def forget_drained(self, batch_id: BatchId) -> None:
        """Drops the batch's tasks that are neither open nor kept for anybody any more."""
        record, known = self.record_of(batch_id), self._keys_of.pop(batch_id, set())
        left = set() if record is None else record.client_keys.union(_kept_keys(record))
        for client_key in known - left:
            del self.wrappers[client_key]
        if known & left:
            self._keys_of[batch_id] = known & left
        if not self.has_step(batch_id):
            self._task_nos.pop(batch_id, None)

    def request(
        self, key: SubmissionKey, tasks: list[tuple[TaskWrapper, TaskConfig]], run_id_base: int = 0
    ) -> SubmitRequest:
        """Of these tasks, each with a client key by which it is found in `wrappers`."""
        made = []
        metadata = {RUN_ID_BASE: run_id_base} if run_id_base else {}
        for wrapper, config in tasks:
            client_key = wrapper.client_key = str(next(self._keys))
            self.wrappers[client_key] = wrapper
            made.append(Task(config=config, client_key=client_key, metadata=metadata))
        return SubmitRequest(request_id=fresh_id(), key=key, tasks=tuple(made), delivery=Delivery.COLLECT)

    async def collect(self, request: CollectRequest) -> CollectReply:
        """Hands results out and acknowledges them at once: in one process nothing gets lost on the way."""
        # Who asks again and again without a wait of its own would otherwise never let the work go on.
        await asyncio.sleep(0)
        reply = await self.engine.results.collect(request)
        await self.engine.results.acknowledge(request.namespace, request.request_id)
        return reply


def _settings(config: TrinityConfig, stop_grace_seconds: float) -> EngineSettings:
    explorer = config.explorer
    dynamic = explorer.dynamic_timeout
    return EngineSettings(
        # Steps and evals stand in one order (seed 2, Order); what waits as long as a task may take goes first all the
        # same, so that nothing is starved by a backlog.
        eval_weight="by_batch_id",
        max_wait_seconds=explorer.max_timeout,
        has_fixed_nodes=False,
        stop_grace_seconds=stop_grace_seconds,
        wait_after_min_seconds=explorer.over_rollout.wait_after_min,
        dynamic_timeout=DynamicTimeoutSettings(ratio=dynamic.ratio, warmup_min_steps=dynamic.warmup_min_steps)
        if dynamic.enable
        else None,
        retained_events=_RETAINED_EVENTS,
        retained_bytes=_RETAINED_BYTES,
    )


def _kept_keys(record: SubmissionRecord) -> Iterable[str]:
    """Also of what is on its way to a caller: others may look after the batch meanwhile."""
    sets = [collected.results for collected in record.kept.unacknowledged.values()]
    return (result.client_key for results in [record.kept.collectable.values(), *sets] for result in results)


def _spec(evaluator_id: str, runner_id: int | None) -> EvaluatorSpec:
    slot = slot_on(runner_id)
    return EvaluatorSpec(
        evaluator_id=evaluator_id,
        handler=BaseAgent(),
        resource=slot_on(None),
        run_resource=slot,
        eval_resource=slot,
        admits_subtasks_alone=True,
    )


def pinned_to(runner_id: int) -> str:
    """The task type of what only this runner may run."""
    return f"{_WORKFLOW}-on-{runner_id}"


def fresh_id() -> str:
    """For requests that nobody sends again."""
    return os.urandom(8).hex()
