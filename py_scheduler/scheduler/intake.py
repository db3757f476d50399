"""From a submit request to planned batches. Everything that can be refused is refused here, before anything is written
down.
"""

from __future__ import annotations

import hashlib
import logging
from collections import defaultdict
from typing import TYPE_CHECKING, TypeVar

import msgspec

from py_scheduler.batching import BatchingStrategy, fifo_batching, fill_fifo
from py_scheduler.domain.events import AttemptRef
from py_scheduler.domain.limits import check_submit, checking_submit
from py_scheduler.domain.results import AttemptState
from py_scheduler.errors import InvalidArgumentError, ResourceExhaustedError, SchedulerError
from py_scheduler.execution.attempt import PlannedAttempt
from py_scheduler.placement import check_deadlock, short_words, tokens_in_budget
from py_scheduler.scheduler.slices import at_once

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.requests import AbortRequest, Delivery, SubmissionSelector, SubmitRequest
    from py_scheduler.domain.task import Batch, BatchId, Task
    from py_scheduler.domain.training.iteration import IterationContext
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.ledger.records import TaskRecord
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.log.event_log import EventLog
    from py_scheduler.scheduler.queue.quotas import Quotas
    from py_scheduler.scheduler.settings import EngineSettings

logger = logging.getLogger(__name__)

_RETRY_AFTER_SECONDS = 1.0
_PORTION = 256
_PORTION_BYTES = 64 << 10
_UNWRITABLE = (TypeError, ValueError, RecursionError, OverflowError)
_Item = TypeVar("_Item")
_encode_sorted = msgspec.msgpack.Encoder(order="deterministic").encode


class Plan(msgspec.Struct, frozen=True):
    """What a request will become: its batches with their specs, what to warn of, and the task types whose handler
    scores groups.
    """

    batches: list[tuple[EvaluatorSpec, Batch]]
    warnings: tuple[str, ...]
    group_scored: frozenset[str] = frozenset()


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
            at_once(self._guarding(plan.batches))
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
        if self._may_be_too_big():
            yield from self._guarding(plan.batches)
        return plan

    def guard(self, batches: Iterable[Batch]) -> None:
        """Raises UnplaceableError when a batch could never be admitted."""
        if self._may_be_too_big():
            at_once(self._guarding([(self._specs.get(batch.task_type, self._fallback), batch) for batch in batches]))

    def _may_be_too_big(self) -> bool:
        """With a budget for 8 samples at once and room for 8, no batch is too big: of 100 samples, 8 run at a time.
        With room for 6, a batch of 7 would wait for ever.
        """
        if self._pool is not None:
            self._follow(self._pool)
        return bool(self._most_subtasks)

    def _guarding(self, batches: Sequence[tuple[EvaluatorSpec, Batch]]) -> Generator[None, None, None]:
        biggest = yield from _biggest_batches(batches)
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
    """What may be open, unread or kept when more tasks come."""

    def __init__(self, quotas: Quotas, ledger: LedgerState, event_log: EventLog, settings: EngineSettings) -> None:
        self._quotas = quotas
        self._ledger = ledger
        self._event_log = event_log
        self._settings = settings

    def check(self, tasks: int, samples: int, namespace: str, *, keeps_results: bool) -> None:
        """Raises ResourceExhaustedError while so many more would be too many. keeps_results: theirs are collected."""
        ledger, settings = self._ledger, self._settings
        if self._quotas.there_are_any:
            self._check_quota(namespace, tasks)
        for what, are_open, more, limit in (
            ("tasks", ledger.open_tasks, tasks, settings.max_queued_tasks),
            ("samples", ledger.open_samples, samples, settings.max_queued_samples),
        ):
            if are_open + more > limit:
                raise ResourceExhaustedError(
                    f"{are_open} {what} are open, {more} more would exceed max_queued_{what} ({limit}):"
                    " wait for some to finish",
                    _RETRY_AFTER_SECONDS,
                )
        if keeps_results:
            self._check_kept()

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


def _check_fits(pool: PlacementPool | None, spec: EvaluatorSpec, samples: int) -> None:
    check_deadlock(
        pool,
        evaluator_id=spec.evaluator_id,
        budget=spec.resource,
        per_sample=spec.sample_resource,
        max_batch_samples=samples,
    )


def waiting_attempts(
    plan: Plan, records: Sequence[TaskRecord], queued_at: float
) -> Iterator[tuple[EvaluatorSpec, list[PlannedAttempt]] | None]:
    """The attempts of these tasks that are to be started, batch by batch; batches without any are left out. None: it
    may be interrupted here too.
    """
    # One Task object may stand for several tasks: the last of a list is the first of them.
    by_task: defaultdict[int, list[TaskRecord]] = defaultdict(list)
    backwards = records[::-1]
    for begin in range(0, len(records), _PORTION):
        for record in backwards[begin : begin + _PORTION]:
            by_task[id(record.task)].append(record)
        if begin + _PORTION < len(records):
            yield None
    for spec, batch in plan.batches:
        attempts: list[PlannedAttempt] = []
        made = 0
        for task in batch.tasks:
            record = by_task[id(task)].pop()
            submission = record.submission
            for subtask_no, subtask in enumerate(record.subtasks):
                if subtask.state is not AttemptState.QUEUED:
                    continue
                attempts.append(
                    PlannedAttempt(
                        AttemptRef(record.task_id, subtask_no, subtask.attempt_no),
                        task,
                        subtask.first_sample_no,
                        subtask.sample_count,
                        submission.submission_id,
                        submission.key.namespace,
                        submission.batch_key,
                        queued_at,
                        record.iteration,
                    )
                )
            if len(attempts) - made >= _PORTION:
                made = len(attempts)
                yield None
        if spec.admits_subtasks_alone:
            yield from ((spec, [attempt]) for attempt in attempts)
        elif attempts:
            yield spec, attempts


def request_digest(request: SubmitRequest) -> bytes:
    """What the same request has in common with itself when it is sent again.

    The order of the keys of a JSON object says nothing: {"a": 1, "b": 2} and {"b": 2, "a": 1} are the same metadata.
    """
    try:
        content = _encode_sorted((*_said_before(request), request.tasks, *_said_after(request)))
    except _UNWRITABLE as error:
        # A batch_id of np.int64(1) cannot be written down either: where the limits know the fault, they name its field.
        check_submit(request)
        raise _unwritable(error) from error
    return hashlib.blake2b(content, digest_size=16).digest()


def digesting(request: SubmitRequest) -> Generator[None, None, bytes]:
    """`request_digest` in slices: of the same bytes, as they come one after another."""
    before, after, tasks = _said_before(request), _said_after(request), request.tasks
    hashed = hashlib.blake2b(_list_head(len(before) + 1 + len(after)), digest_size=16)
    try:
        hashed.update(b"".join(map(_encode_sorted, before)))
        hashed.update(_list_head(len(tasks)))
        size = 0
        for encoded in map(_encode_sorted, tasks):
            hashed.update(encoded)
            size += len(encoded)
            if size > _PORTION_BYTES:
                size = 0
                yield
        hashed.update(b"".join(map(_encode_sorted, after)))
    except _UNWRITABLE as error:
        yield from checking_submit(request)
        raise _unwritable(error) from error
    return hashed.digest()


def _said_before(request: SubmitRequest) -> tuple[str, BatchId]:
    return request.key.namespace, request.key.batch_id


def _said_after(request: SubmitRequest) -> tuple[IterationContext | None, Delivery]:
    return request.iteration, request.delivery


def _list_head(count: int) -> bytes:
    """What stands before the items of a list: a None is one byte."""
    encoded = _encode_sorted((None,) * count)
    return encoded[: len(encoded) - count]


def _unwritable(error: Exception) -> InvalidArgumentError:
    reason = f"only JSON values, with integers of 64 bits at most, can be stored: {error}"
    return InvalidArgumentError(reason, "tasks[].metadata")


def abort_digest(request: AbortRequest) -> bytes:
    """As `request_digest`. Whether and how long a call waits is no part of what it does."""
    selector = request.selector
    said = ("abort", *_named(selector), request.task_ids, request.keep_partial, request.restart_runners)
    return hashlib.blake2b(msgspec.msgpack.encode(said), digest_size=16).digest()


def discard_digest(selector: SubmissionSelector) -> bytes:
    """As `request_digest`."""
    return hashlib.blake2b(msgspec.msgpack.encode(("discard", *_named(selector))), digest_size=16).digest()


def _named(selector: SubmissionSelector) -> tuple[str, BatchId | None]:
    return selector.submission_id, selector.batch_id


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
