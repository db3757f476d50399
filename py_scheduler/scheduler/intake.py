"""From a submit request to planned batches. Everything that can be refused is refused here, before anything is written
down.
"""

from __future__ import annotations

import logging
import os
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from py_scheduler.batching import BatchingStrategy, fifo_batching, fill_fifo
from py_scheduler.domain.events import Moment
from py_scheduler.domain.limits import check_submit, checking_submit
from py_scheduler.domain.requests import Delivery
from py_scheduler.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, SchedulerError
from py_scheduler.placement import check_deadlock, short_words, tokens_in_budget
from py_scheduler.scheduler.ledger.commands import AcceptTasks
from py_scheduler.scheduler.slices import at_once

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.ports import Clock
    from py_scheduler.domain.requests import SubmitRequest
    from py_scheduler.domain.task import Batch, Task
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.queue.admission import Admission
    from py_scheduler.scheduler.queue.quotas import Quotas
    from py_scheduler.scheduler.settings import EngineSettings

logger = logging.getLogger(__name__)

TASKS_AT_ONCE = 1_000
"""A submit of so many tasks is taken in within one turn of the loop, and all of them wait for room when it returns."""
_SAMPLES_AT_ONCE = 10_000
"""Likewise, of all its tasks."""
_RETRY_AFTER_SECONDS = 1.0
_PORTION = 256
_Item = TypeVar("_Item")


class Plan(msgspec.Struct, frozen=True):
    """What a request will become: its batches with their specs, what to warn of, and the task types whose handler
    scores groups.
    """

    batches: list[tuple[EvaluatorSpec, Batch]]
    warnings: tuple[str, ...]
    group_scored: frozenset[str] = frozenset()
    biggest: Mapping[str, tuple[EvaluatorSpec, int]] = {}
    """Of each evaluator, by its id, how many subtasks its biggest batch has, where somebody will ask again."""


class Intake:
    """Validates, batches and guards. `specs` are the server's; the first of them runs tasks of an unknown type."""

    def __init__(
        self, specs: Sequence[EvaluatorSpec], pool: PlacementPool | None, batching_strategy: BatchingStrategy
    ) -> None:
        if not specs:
            raise InvalidArgumentError("at least one evaluator is needed", "specs")
        self._specs = {spec.evaluator_id: spec for spec in specs}
        if len(self._specs) != len(specs):
            raise InvalidArgumentError("two evaluators have the same evaluator_id", "specs")
        for spec in specs:
            # A spec of which not even one sample fits will fail each submit: say so before there is one.
            _check_fits(pool, spec, 1)
        self._fallback = specs[0]
        self._pool = pool
        self._layout: int | None = None
        """The pool's layout that the following is of."""
        self._may_be_resumed = False
        """Whether a node drains."""
        self._most_subtasks: dict[str, int] = {}
        """By evaluator, what a batch may have at most, where that is less than its budget would let run at once."""
        self._never: dict[str, str] = {}
        """By evaluator, why no sample of it can run on that layout; empty when one can. What was not asked is left out.
        """
        self._batching_strategy = batching_strategy
        self._warned: set[str] = set()
        self._group_scoring = {spec.evaluator_id for spec in specs if spec.handler.scores_groups}

    @property
    def specs(self) -> Mapping[str, EvaluatorSpec]:
        return self._specs

    def plan(self, request: SubmitRequest, batches: Sequence[Batch] | None = None) -> Plan:
        """`batches` takes the place of the strategy's. Raises InvalidArgumentError with every fault of the request,
        UnplaceableError when a batch could never be admitted.
        """
        if not request.is_checked:
            check_submit(request)
        plan = self.batch(request.tasks, batches)
        if self._may_be_too_big():
            self._check_biggest(at_once(_biggest_batches(plan.batches)))
        return plan

    def planning(self, request: SubmitRequest, batches: Sequence[Batch] | None = None) -> Generator[None, None, Plan]:
        """`plan` in slices; but a strategy of somebody's own is asked once about all of the tasks."""
        if not request.is_checked:
            yield from checking_submit(request)
        if batches is None and self._batching_strategy is fifo_batching:
            filled: list[Batch] = []
            filling: dict[tuple[str, bool], Batch] = {}
            for tasks in _portions(request.tasks):
                fill_fifo(tasks, self._specs, filled, filling)
                yield
            batches = filled
        else:
            batches = yield from self._checked(request.tasks, batches)
        resolved: list[tuple[EvaluatorSpec, Batch]] = []
        warnings: dict[str, None] = {}
        for some in _portions(batches):
            resolved += [(self._resolve(batch.task_type, warnings), batch) for batch in some]
            yield
        plan = self._plan_of(resolved, warnings)
        if self._pool is not None:
            plan = msgspec.structs.replace(plan, biggest=(yield from _biggest_batches(plan.batches)))
            self.guard_again(plan)
        return plan

    def guard_again(self, plan: Plan) -> None:
        """Of what `planning` made: nodes may have gone since. Raises UnplaceableError."""
        if self._may_be_too_big():
            self._check_biggest(plan.biggest)

    def guard(self, batches: Iterable[Batch]) -> None:
        """Raises UnplaceableError when a batch could never be admitted."""
        if self._may_be_too_big():
            resolved = [(self._specs.get(batch.task_type, self._fallback), batch) for batch in batches]
            self._check_biggest(at_once(_biggest_batches(resolved)))

    def _may_be_too_big(self) -> bool:
        """With a budget for 8 samples at once and room for 8, no batch is too big: of 100 samples, 8 run at a time.
        With room for 6, a batch of 7 would wait for ever.
        """
        if self._pool is not None:
            self._follow(self._pool)
        return bool(self._most_subtasks)

    def _check_biggest(self, biggest: Mapping[str, tuple[EvaluatorSpec, int]]) -> None:
        for spec, subtasks in biggest.values():
            if subtasks > self._most_subtasks.get(spec.evaluator_id, subtasks):
                _check_fits(self._pool, spec, subtasks)

    def nodes_have_changed(self) -> None:
        """A node that drained may have been removed, which leaves the layout as it is."""
        self._layout = None

    def _follow(self, pool: PlacementPool) -> None:
        """Measures the pool's layout, unless it is the one that was measured last."""
        if pool.layout_version == self._layout:
            return
        self._layout = pool.layout_version
        self._may_be_resumed = any(node.phase == "draining" for node in pool.nodes())
        self._never.clear()
        self._most_subtasks.clear()
        for spec in self._specs.values():
            most = pool.max_tokens_for(spec.sample_resource)
            if most < tokens_in_budget(spec.resource, spec.sample_resource):
                self._most_subtasks[spec.evaluator_id] = most

    def batch(self, tasks: Sequence[Task], batches: Sequence[Batch] | None = None) -> Plan:
        """Groups tasks by the strategy, unless they are grouped already, and finds each batch its spec."""
        if batches is None and self._batching_strategy is fifo_batching:
            batches = fifo_batching(tasks, self._specs)
        else:
            batches = at_once(self._checked(tasks, batches))
        warnings: dict[str, None] = {}
        resolved = [(self._resolve(batch.task_type, warnings), batch) for batch in batches]
        return self._plan_of(resolved, warnings)

    def _checked(
        self, tasks: Sequence[Task], batches: Sequence[Batch] | None
    ) -> Generator[None, None, Sequence[Batch]]:
        """Those of a caller, or else of the strategy."""
        if batches is None:
            batches = self._batching_strategy(tasks, self._specs)
        yield from _check_batches(batches, tasks)
        return batches

    def _plan_of(self, resolved: list[tuple[EvaluatorSpec, Batch]], warnings: Iterable[str]) -> Plan:
        if not self._group_scoring:
            return Plan(resolved, tuple(warnings))
        scored = {batch.task_type for spec, batch in resolved if spec.evaluator_id in self._group_scoring}
        return Plan(resolved, tuple(warnings), frozenset(scored))

    def spec_of(self, task: Task) -> EvaluatorSpec:
        """The evaluator that runs a task."""
        return self._specs.get(task.config.task_type, self._fallback)

    def why_never(self, spec: EvaluatorSpec) -> str:
        """Why no sample of this evaluator can ever run, with the way out; empty when one can, and where nodes come and
        go.
        """
        pool = self._pool
        if pool is None:
            return ""
        self._follow(pool)
        reason = self._never.get(spec.evaluator_id)
        if reason is None:
            reason = self._never[spec.evaluator_id] = self._look_why_never(pool, spec)
        return reason

    def _look_why_never(self, pool: PlacementPool, spec: EvaluatorSpec) -> str:
        if self._may_be_resumed or pool.max_tokens_for(spec.sample_resource):
            return ""
        short = short_words(pool.explain(spec.sample_resource, 1))
        why = f"short of {short}" if short else "none is left"
        return (
            f"no node that is left can hold a sample of evaluator {spec.evaluator_id!r} ({why}): add a node "
            "that can or lower what its samples hold, restart the server, and submit the task again"
        )

    def _resolve(self, task_type: str, warnings: dict[str, None]) -> EvaluatorSpec:
        spec = self._specs.get(task_type)
        if spec is not None:
            return spec
        warning = f"no evaluator is called {task_type!r}: its tasks run on {self._fallback.evaluator_id!r}"
        warnings[warning] = None
        if task_type not in self._warned:
            self._warned.add(task_type)
            logger.warning(warning)
        return self._fallback


class IntakeLimits:
    """What may be open, unread or kept when more tasks come, and whether any may."""

    def __init__(
        self, admission: Admission, quotas: Quotas, ledger: LedgerState, event_log: EventLog, settings: EngineSettings
    ) -> None:
        self._admission = admission
        self._quotas = quotas
        self._ledger = ledger
        self._event_log = event_log
        self._settings = settings

    def check(self, command: AcceptTasks) -> None:
        """Raises ResourceExhaustedError while its tasks would be too many, and FailedPreconditionError once the engine
        stops.
        """
        self._event_log.check_writable()
        self._event_log.check_keeps_up()
        if self._admission.is_stopped:
            raise FailedPreconditionError("the server is shutting down and takes no tasks: submit to another one")
        tasks, made = len(command.tasks), command.prepared
        samples = sum([task.config.repeat_times for task in command.tasks]) if made is None else made.samples
        if self._quotas.there_are_any:
            self._check_quota(command.key.namespace, tasks)
        ledger, settings = self._ledger, self._settings
        if ledger.open_tasks + tasks > settings.max_queued_tasks:
            raise _too_many("tasks", ledger.open_tasks, tasks, settings.max_queued_tasks)
        if ledger.open_samples + samples > settings.max_queued_samples:
            raise _too_many("samples", ledger.open_samples, samples, settings.max_queued_samples)
        if command.is_collected:
            self._check_kept()

    def check_waiting(self, namespace: str, waiting: Counter[str], more: int) -> None:
        """Raises ResourceExhaustedError when a submit of `more` bytes is too much beside those of `waiting`, bytes by
        namespace. One that finds none is let in however large it is.
        """
        limit, of_all, own = self._settings.max_waiting_submit_bytes, waiting.total(), waiting[namespace]
        if (of_all and of_all + more > limit) or (own and own + more > limit // 2):
            raise ResourceExhaustedError(
                f"submits of {of_all} bytes wait to be taken in, {own} of them of namespace {namespace!r}: "
                f"{more} more would exceed max_waiting_submit_bytes ({limit}), of which one namespace "
                "has half: wait for some to be answered",
                _RETRY_AFTER_SECONDS,
            )

    def _check_quota(self, namespace: str, more: int) -> None:
        quota, are_open = self._quotas.of(namespace), self._ledger.open_tasks_in(namespace)
        limit = quota.max_queued_tasks
        if limit is not None and are_open + more > limit:
            raise ResourceExhaustedError(
                f"{are_open} tasks of namespace {namespace!r} are open, {more} more would exceed its quota of "
                f"max_queued_tasks ({limit}): wait for some to finish",
                _RETRY_AFTER_SECONDS,
            )
        limit = quota.max_retained_bytes
        if limit is not None and (unread := self._event_log.unread_bytes(namespace)) > limit:
            raise ResourceExhaustedError(
                f"{unread} bytes of events of namespace {namespace!r} wait to be acknowledged, over its quota of "
                f"max_retained_bytes ({limit}): read them and call AckEvents",
                _RETRY_AFTER_SECONDS,
            )

    def _check_kept(self) -> None:
        kept, limit = self._ledger.results.kept_bytes, self._settings.max_kept_bytes
        if kept >= limit:
            raise ResourceExhaustedError(
                f"results of {kept} bytes wait to be collected or acknowledged, max_kept_bytes is {limit}:"
                " collect, acknowledge or discard some",
                _RETRY_AFTER_SECONDS,
            )


def _too_many(what: str, are_open: int, more: int, limit: int) -> ResourceExhaustedError:
    return ResourceExhaustedError(
        f"{are_open} {what} are open, {more} more would exceed max_queued_{what} ({limit}): wait for some to finish",
        _RETRY_AFTER_SECONDS,
    )


def is_large(request: SubmitRequest) -> bool:
    """Whether one turn of the loop is too little for it."""
    tasks = request.tasks
    return len(tasks) > TASKS_AT_ONCE or sum([task.config.repeat_times for task in tasks]) > _SAMPLES_AT_ONCE


def command_of(request: SubmitRequest, digest: bytes, plan: Plan, clock: Clock) -> AcceptTasks:
    """What the ledger is told to take in."""
    return AcceptTasks(
        request.request_id,
        digest,
        request.key,
        request.tasks,
        f"s{os.urandom(8).hex()}",
        clock.unix_time(),
        request.iteration,
        plan.group_scored,
        request.delivery is Delivery.COLLECT,
        Moment(clock.boot_id, clock.monotonic()),
        plan.warnings,
    )


def _check_fits(pool: PlacementPool | None, spec: EvaluatorSpec, samples: int) -> None:
    check_deadlock(
        pool,
        evaluator_id=spec.evaluator_id,
        budget=spec.resource,
        per_sample=spec.sample_resource,
        max_batch_samples=samples,
    )


def _check_batches(batches: Sequence[Batch], tasks: Sequence[Task]) -> Generator[None, None, None]:
    """A strategy is somebody's own code: it must place each task once, and only under its own type."""
    wanted: defaultdict[int, int] = defaultdict(int)
    for some in _portions(tasks):
        for task in some:
            wanted[id(task)] += 1
        yield
    for batch in batches:
        if not batch.tasks:
            raise SchedulerError("the batching strategy made an empty batch")
        for some in _portions(batch.tasks):
            for task in some:
                wanted[id(task)] -= 1
                if task.config.task_type != batch.task_type:
                    raise SchedulerError(
                        f"the batching strategy put a task of type {task.config.task_type!r}"
                        f" into a batch of {batch.task_type!r}"
                    )
            yield
    if any(wanted.values()):
        raise SchedulerError("the batching strategy did not put every task into exactly one batch")


def _biggest_batches(
    batches: Sequence[tuple[EvaluatorSpec, Batch]],
) -> Generator[None, None, dict[str, tuple[EvaluatorSpec, int]]]:
    """Of each evaluator, by its id, how many subtasks its biggest batch has."""
    biggest: dict[str, tuple[EvaluatorSpec, int]] = {}
    for spec, batch in batches:
        subtasks = 1
        if not spec.admits_subtasks_alone:
            subtasks = 0
            for some in _portions(batch.tasks):
                subtasks += sum([task.config.subtask_count for task in some])
                yield
        if subtasks > biggest.get(spec.evaluator_id, (spec, 0))[1]:
            biggest[spec.evaluator_id] = (spec, subtasks)
    return biggest


def _portions(items: Sequence[_Item]) -> Iterator[Sequence[_Item]]:
    """So many at a time as are at most a millisecond's work."""
    if len(items) <= _PORTION:
        yield items
        return
    for begin in range(0, len(items), _PORTION):
        yield items[begin : begin + _PORTION]
