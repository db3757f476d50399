"""What a scheduler is made of and how things stand, as it is shown to clients. Whoever looks changes nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.domain.limits import MAX_WAITING_SHOWN
from py_scheduler.domain.requests import EvaluatorSpecView, GenerationBackendView, ServerInfo, SubmissionView
from py_scheduler.domain.results import AttemptState, TaskState
from py_scheduler.errors import GenerationError
from py_scheduler.scheduler.leases.manager import node_view
from py_scheduler.scheduler.ledger.records import submission_and_number

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from py_scheduler.domain.evaluator import EvaluatorSpec
    from py_scheduler.domain.explanations import TaskExplanation
    from py_scheduler.domain.generation import ModelInfo
    from py_scheduler.domain.ports import GenerationBackend
    from py_scheduler.domain.requests import SubmissionSelector
    from py_scheduler.domain.runners.runner import RunnerView
    from py_scheduler.execution.generation.gateway import GenerationGateway
    from py_scheduler.execution.runner import Runners
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.ledger.state import LedgerState
    from py_scheduler.scheduler.queue.explanations import WaitingReasons
    from py_scheduler.scheduler.retry_backoff import RetryBackoffs

logger = logging.getLogger(__name__)

_NOT_UP = "none of its servers is up"
_NO_MODEL_INFO = "the engine does not answer: the server's log says why"
_WORKFLOW_ID = "workflow_id"


class Views:
    """How submissions, tasks and runners stand."""

    def __init__(
        self, ledger: LedgerState, reasons: WaitingReasons, backoffs: RetryBackoffs, runners: Sequence[Runners]
    ) -> None:
        self._ledger = ledger
        self._reasons = reasons
        self._backoffs = backoffs
        self._runners = runners

    def submission(self, selector: SubmissionSelector) -> SubmissionView:
        """See `Engine.submission`."""
        record = self._ledger.require(selector)
        waiting = self._reasons.waiting(record.submission_id, MAX_WAITING_SHOWN)
        waiting += self._backoffs.waits(record.submission_id)[: MAX_WAITING_SHOWN - len(waiting)]
        attempts, done = record.attempts_in, record.done_tasks
        return SubmissionView(
            submission_id=record.submission_id,
            key=record.key,
            queued_attempts=attempts[AttemptState.QUEUED],
            leased_attempts=attempts[AttemptState.LEASED],
            running_attempts=attempts[AttemptState.RUNNING],
            open_tasks=len(record.open_tasks),
            succeeded_tasks=done[TaskState.SUCCEEDED],
            partial_tasks=done[TaskState.PARTIAL],
            failed_tasks=done[TaskState.FAILED],
            aborted_tasks=done[TaskState.ABORTED],
            waiting=tuple(waiting),
            scheduled_tasks=record.kept.scheduled_tasks,
            collectable_tasks=len(record.kept.collectable),
            unacknowledged_tasks=sum(len(collected.results) for collected in record.kept.unacknowledged.values()),
            kept_bytes=record.kept.size,
        )

    async def task(self, task_id: str, namespace: str) -> TaskExplanation:
        """See `Engine.explain_task`."""
        explanation = await self._reasons.explain_task(task_id, namespace)
        backoffs = self._backoffs.task_waits(explanation.submission_id, task_id)
        return msgspec.structs.replace(explanation, waits=explanation.waits + backoffs) if backoffs else explanation

    def runners(self) -> list[RunnerView]:
        """See `Engine.runner_views`."""
        return [self._with_workflow_id(view) for runners in self._runners for view in runners.views()]

    def _with_workflow_id(self, view: RunnerView) -> RunnerView:
        submission = self._ledger.submission(view.submission_id)
        if submission is None or _WORKFLOW_ID in view.keys:
            return view
        _, number = submission_and_number(view.task_id)
        workflow_id = f"{submission.key.batch_id}/{number}/{view.sample_no}"
        return msgspec.structs.replace(view, keys={_WORKFLOW_ID: workflow_id, **view.keys})


async def server_view(
    version: str,
    specs: Iterable[EvaluatorSpec],
    generation: GenerationGateway,
    backends: Mapping[str, GenerationBackend],
    pool: PlacementPool | None,
) -> ServerInfo:
    """See `Engine.server_info`. backends: by role."""
    return ServerInfo(
        version=version,
        evaluators=tuple(map(evaluator_view, specs)),
        engines=tuple(
            [await engine_view(role, engine, is_up=generation.is_up(role)) for role, engine in backends.items()]
        ),
        nodes=tuple(map(node_view, pool.nodes())) if pool is not None else (),
    )


def evaluator_view(spec: EvaluatorSpec) -> EvaluatorSpecView:
    return EvaluatorSpecView(
        evaluator_id=spec.evaluator_id,
        handler=spec.handler.handler_name,
        resource=spec.resource,
        sample_resource=spec.sample_resource,
        batch_size=spec.batch_size,
    )


async def engine_view(role: str, engine: GenerationBackend, *, is_up: bool) -> GenerationBackendView:
    """is_up: False for one that is known to have no server that could be asked."""
    error = _NOT_UP
    if is_up:
        try:
            return _model_view(role, await engine.model_info())
        except GenerationError as fault:
            # Its text holds addresses that are none of a client's business; the log has it.
            logger.warning("the engine in role %s does not say what it serves: %s", role, fault)
            error = _NO_MODEL_INFO
    return GenerationBackendView(
        role=role, model_name="", weight_version="", vocab_size=0, context_length=0, error=error
    )


def _model_view(role: str, info: ModelInfo) -> GenerationBackendView:
    return GenerationBackendView(
        role=role,
        model_name=info.name,
        weight_version=info.weight_version,
        vocab_size=info.vocab_size,
        context_length=info.context_length,
        streaming=info.streaming,
    )
