"""Calls and their answers on the wire (scheduler_service.proto).

Decoders of requests judge everything that can be judged at the door, and raise InvalidArgumentError with every fault
at once.
"""

from __future__ import annotations

from itertools import islice

from py_scheduler._generated.rollout_scheduler.v1 import collecting_pb2, resource_pb2
from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.domain.limits import MAX_TASKS_PER_ABORT, MAX_WAITING_SHOWN, check_sample_count, name_fault
from py_scheduler.domain.requests import (
    AbortReply,
    AbortRequest,
    Delivery,
    EvaluatorSpecView,
    EventFilter,
    EventKind,
    GenerationBackendView,
    NodeView,
    ServerInfo,
    SubmissionSelector,
    SubmissionView,
    SubmitReply,
    SubmitRequest,
    WaitingBatch,
)
from py_scheduler.domain.resources import AMOUNTS, MAX_NAMES, NODE_AMOUNTS, Resource
from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId, SubmissionKey
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import InvalidArgumentError
from py_scheduler.wire.common.cursor import CursorCodec
from py_scheduler.wire.common.fields import DELIVERIES, EVENT_KINDS, Faults
from py_scheduler.wire.tasks import TaskReader, decode_batch_id, decode_iteration, encode_batch_id

MAX_REASON_LENGTH = 4_096
_NODE_FIELDS = (*NODE_AMOUNTS, *(f"free_{kind}" for kind in NODE_AMOUNTS))

# Submit


def decode_submit_request(message: service.SubmitTasksRequest, max_tasks: int) -> SubmitRequest:
    """Raises InvalidArgumentError naming each faulty field; `max_tasks` bounds one call."""
    reader = SubmitReader(message, max_tasks)
    reader.tasks.read(message.tasks)
    return reader.request()


class SubmitReader:
    """A submit of which only `tasks` is still to be read. Raises InvalidArgumentError when these are too many."""

    __slots__ = ("_faults", "_iteration", "_message", "key", "tasks")

    def __init__(self, message: service.SubmitTasksRequest, max_tasks: int) -> None:
        self._message, self._faults = message, (faults := Faults())
        if fault := name_fault(message.request_id):
            faults.add("request_id", fault)
        self.key = SubmissionKey(
            decode_batch_id(message.batch_id, "batch_id", faults), decode_namespace(message.namespace, faults)
        )
        count = len(message.tasks)
        if not 1 <= count <= max_tasks:
            faults.add("tasks", f"holds {count}, must hold at least 1 and at most {max_tasks}: split the submission")
            faults.check()
        self._iteration = None
        if message.HasField("iteration"):
            self._iteration = decode_iteration(message.iteration, "iteration", faults)
        self.tasks = TaskReader(message.default_config if message.HasField("default_config") else None, faults)

    def request(self) -> SubmitRequest:
        """Once all tasks were read. Raises InvalidArgumentError naming each faulty field."""
        message, faults = self._message, self._faults
        delivery = None
        try:
            delivery = DELIVERIES.member_or_none(message.delivery, "delivery")
        except InvalidArgumentError as error:
            faults.add_all("", error.violations)
        faults.check()
        tasks = tuple(self.tasks.tasks)
        # Only now: of a number of repeats that is wrong by itself nobody needs to hear the sum.
        faults.add_all("", check_sample_count(tasks))
        faults.check()
        return SubmitRequest(
            request_id=message.request_id,
            key=self.key,
            tasks=tasks,
            iteration=self._iteration,
            delivery=delivery or Delivery.WATCH,
            is_checked=True,
        )


def decode_namespace(namespace: str, faults: Faults, path: str = "namespace") -> str:
    if fault := name_fault(namespace, required=False):
        faults.add(path, fault)
    return namespace or DEFAULT_NAMESPACE


def encode_submit_reply(reply: SubmitReply, namespace: str, store_epoch: bytes) -> service.SubmitTasksResponse:
    cursors = CursorCodec(store_epoch, EventFilter(submission_id=reply.submission_id, namespace=namespace))
    return service.SubmitTasksResponse(
        submission_id=reply.submission_id,
        task_ids=reply.task_ids,
        warnings=[safe_text(warning) for warning in reply.warnings],
        cursor=cursors.encode(reply.before_sequence),
    )


# Watch


def decode_filter(message: service.EventFilter) -> EventFilter:
    faults = Faults()
    namespace = decode_namespace(message.namespace, faults, "filter.namespace")
    if fault := name_fault(message.submission_id, required=False):
        faults.add("filter.submission_id", fault)
    kinds = set()
    if len(message.kinds) > len(EventKind):
        faults.add("filter.kinds", f"holds {len(message.kinds)}, there are {len(EventKind)} kinds: name each once")
    for number, kind in enumerate(message.kinds[: len(EventKind)]):
        try:
            kinds.add(EVENT_KINDS.member(kind, f"filter.kinds[{number}]"))
        except InvalidArgumentError as error:
            faults.add_all("", error.violations)
    faults.check()
    return EventFilter(submission_id=message.submission_id, kinds=frozenset(kinds), namespace=namespace)


def encode_filter(event_filter: EventFilter) -> service.EventFilter:
    return service.EventFilter(
        submission_id=event_filter.submission_id,
        kinds=sorted(EVENT_KINDS.number_of[kind] for kind in event_filter.kinds),
        namespace=event_filter.namespace,
    )


# Get


def decode_selector(
    message: service.GetSubmissionRequest | service.AbortSubmissionRequest | collecting_pb2.DiscardSubmissionRequest,
    faults: Faults,
) -> SubmissionSelector:
    namespace = decode_namespace(message.namespace, faults)
    submission_id, batch_id = message.submission_id, None
    if bool(submission_id) == message.HasField("batch_id"):
        faults.add("submission_id", "name the submission by exactly one of submission_id and batch_id")
    elif submission_id:
        if fault := name_fault(submission_id):
            faults.add("submission_id", fault)
    else:
        batch_id = decode_batch_id(message.batch_id, "batch_id", faults)
    return SubmissionSelector(submission_id=submission_id, batch_id=batch_id, namespace=namespace)


def decode_get_request(message: service.GetSubmissionRequest) -> SubmissionSelector:
    faults = Faults()
    selector = decode_selector(message, faults)
    faults.check()
    return selector


def encode_get_request(selector: SubmissionSelector) -> service.GetSubmissionRequest:
    batch_id = selector.batch_id
    return service.GetSubmissionRequest(
        submission_id=selector.submission_id,
        batch_id=None if batch_id is None else encode_batch_id(batch_id),
        namespace=selector.namespace,
    )


_COUNTS = (
    "queued_attempts",
    "leased_attempts",
    "running_attempts",
    "open_tasks",
    "succeeded_tasks",
    "partial_tasks",
    "failed_tasks",
    "aborted_tasks",
    "scheduled_tasks",
    "collectable_tasks",
    "unacknowledged_tasks",
    "kept_bytes",
)


def encode_submission(view: SubmissionView) -> service.GetSubmissionResponse:
    message = service.GetSubmissionResponse(
        submission_id=view.submission_id,
        batch_id=encode_batch_id(view.key.batch_id),
        **{count: getattr(view, count) for count in _COUNTS},
    )
    for batch in view.waiting[:MAX_WAITING_SHOWN]:
        message.waiting.add(
            task_ids=batch.task_ids,
            reason=safe_text(batch.reason),
            waiting_seconds=batch.waiting_seconds,
            bypassed=batch.bypassed,
        )
    return message


def decode_submission(message: service.GetSubmissionResponse, namespace: str) -> SubmissionView:
    batch_id: BatchId = message.batch_id.label or message.batch_id.step
    return SubmissionView(
        submission_id=message.submission_id,
        key=SubmissionKey(batch_id, namespace),
        waiting=tuple(
            WaitingBatch(
                task_ids=tuple(batch.task_ids),
                reason=batch.reason,
                waiting_seconds=batch.waiting_seconds,
                bypassed=batch.bypassed,
            )
            for batch in message.waiting
        ),
        **{count: getattr(message, count) for count in _COUNTS},
    )


# Abort


def decode_abort_request(message: service.AbortSubmissionRequest, timeout_seconds: float | None) -> AbortRequest:
    """`timeout_seconds` is what the call's deadline leaves for a wait."""
    faults = Faults()
    selector = decode_selector(message, faults)
    if message.request_id and (fault := name_fault(message.request_id)):
        faults.add("request_id", fault)
    if len(message.task_ids) > MAX_TASKS_PER_ABORT:
        count = len(message.task_ids)
        faults.add("task_ids", f"holds {count}, at most {MAX_TASKS_PER_ABORT} are taken: leave it empty for all tasks")
        faults.check()
    for number, task_id in enumerate(message.task_ids):
        if faults.are_many:
            break
        if fault := name_fault(task_id):
            faults.add(f"task_ids[{number}]", fault)
    if len(message.reason) > MAX_REASON_LENGTH:
        faults.add("reason", f"has {len(message.reason)} characters, at most {MAX_REASON_LENGTH} are taken")
    faults.check()
    return AbortRequest(
        selector=selector,
        request_id=message.request_id,
        task_ids=tuple(message.task_ids),
        reason=message.reason,
        wait=message.wait,
        timeout_seconds=timeout_seconds,
        keep_partial=message.keep_partial,
        restart_runners=message.restart_runners,
    )


def encode_abort_request(request: AbortRequest) -> service.AbortSubmissionRequest:
    """Without the timeout, which travels as the call's deadline."""
    selector = request.selector
    return service.AbortSubmissionRequest(
        submission_id=selector.submission_id,
        batch_id=None if selector.batch_id is None else encode_batch_id(selector.batch_id),
        namespace=selector.namespace,
        task_ids=request.task_ids,
        request_id=request.request_id,
        reason=request.reason,
        wait=request.wait,
        keep_partial=request.keep_partial,
        restart_runners=request.restart_runners,
    )


def encode_abort_reply(reply: AbortReply) -> service.AbortSubmissionResponse:
    return service.AbortSubmissionResponse(
        state=service.ABORT_STATE_ABORTING if reply.still_stopping else service.ABORT_STATE_ABORTED,
        aborted_tasks=reply.aborted_tasks,
        still_stopping=reply.still_stopping,
    )


def decode_abort_reply(message: service.AbortSubmissionResponse) -> AbortReply:
    return AbortReply(aborted_tasks=message.aborted_tasks, still_stopping=tuple(message.still_stopping))


# Training


def decode_resume_training_request(message: service.ResumeTrainingRequest) -> str:
    """The namespace."""
    faults = Faults()
    namespace = decode_namespace(message.namespace, faults)
    faults.check()
    return namespace


def encode_resume_training_reply(weight_epoch: int) -> service.ResumeTrainingResponse:
    return service.ResumeTrainingResponse(weight_epoch=weight_epoch)


# Server info


def encode_server_info(info: ServerInfo) -> service.GetServerInfoResponse:
    message = service.GetServerInfoResponse(version=info.version)
    for evaluator in info.evaluators:
        message.evaluators.add(
            evaluator_id=evaluator.evaluator_id,
            handler=evaluator.handler,
            resource=encode_resource(evaluator.resource),
            sample_resource=encode_resource(evaluator.sample_resource),
            batch_size=evaluator.batch_size or 0,
        )
    for engine in info.engines:
        message.engines.add(
            role=engine.role,
            model_name=safe_text(engine.model_name),
            weight_version=safe_text(engine.weight_version),
            vocab_size=engine.vocab_size,
            context_length=engine.context_length,
            error=safe_text(engine.error),
            streaming=safe_text(engine.streaming),
        )
    message.nodes.extend(map(encode_node, info.nodes))
    return message


def decode_server_info(message: service.GetServerInfoResponse) -> ServerInfo:
    return ServerInfo(
        version=message.version,
        evaluators=tuple(
            EvaluatorSpecView(
                evaluator_id=evaluator.evaluator_id,
                handler=evaluator.handler,
                resource=_decode_whole(evaluator.resource),
                sample_resource=_decode_whole(evaluator.sample_resource),
                batch_size=evaluator.batch_size or None,
            )
            for evaluator in message.evaluators
        ),
        engines=tuple(
            GenerationBackendView(
                role=engine.role,
                model_name=engine.model_name,
                weight_version=engine.weight_version,
                vocab_size=engine.vocab_size,
                context_length=engine.context_length,
                error=engine.error,
                streaming=engine.streaming,
            )
            for engine in message.engines
        ),
        nodes=tuple(map(decode_node, message.nodes)),
    )


def encode_node(node: NodeView) -> resource_pb2.Node:
    return resource_pb2.Node(
        node_ip=node.node_ip,
        gpu_ids=node.gpu_ids,
        free_gpus=node.free_gpus,
        named=node.named,
        free_named=node.free_named,
        labels=node.labels,
        **{field: getattr(node, field) for field in _NODE_FIELDS},
    )


def decode_node(message: resource_pb2.Node) -> NodeView:
    return NodeView(
        node_ip=message.node_ip,
        gpu_ids=tuple(message.gpu_ids),
        free_gpus=tuple(message.free_gpus),
        named=dict(message.named),
        free_named=dict(message.free_named),
        labels=dict(message.labels),
        **{field: getattr(message, field) for field in _NODE_FIELDS},
    )


def encode_resource(resource: Resource) -> resource_pb2.Resource:
    """What `check_extras` finds nothing wrong with."""
    return resource_pb2.Resource(
        concurrency=resource.concurrency,
        named=resource.named,
        required_labels=resource.required_labels,
        **{kind: getattr(resource, kind) for kind in AMOUNTS},
    )


def decode_resource(message: resource_pb2.Resource, concurrency: int) -> Resource:
    """Reads without judging. Of names one more than is allowed is enough for a check to refuse them."""
    return Resource(
        concurrency=concurrency,
        named=dict(islice(message.named.items(), MAX_NAMES + 1)),
        required_labels=dict(islice(message.required_labels.items(), MAX_NAMES + 1)),
        **{kind: getattr(message, kind) for kind in AMOUNTS},
    )


def _decode_whole(message: resource_pb2.Resource) -> Resource:
    return decode_resource(message, message.concurrency)
