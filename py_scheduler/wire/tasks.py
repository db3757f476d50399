"""Tasks and their configuration on the wire (task.proto).

Decoding a plain task costs about a microsecond: a config is decoded once however many tasks carry it, and fields are
read once. `Faults` gets everything that is wrong; what is returned is only meant to be used when there is none.

A list of tasks is cut into SubmitTasks requests of bounded size, lazily: it may be longer than memory. The first
request bears the caller's request id and the others ids derived from it, so that sending everything again is recognised
request by request.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
from py_scheduler.domain.episodes.cascade import DATASET_CONFIG_KEY
from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.limits import (
    MAX_STOPS,
    check_batch_id,
    check_dataset_config,
    check_iteration,
    check_task_config,
    name_fault,
)
from py_scheduler.domain.requests import Delivery
from py_scheduler.domain.task import BatchId, RetryPolicy, Task, TaskConfig
from py_scheduler.domain.training.iteration import IterationContext
from py_scheduler.domain.values.plain import safe_text
from py_scheduler.errors import FieldViolation, InvalidArgumentError
from py_scheduler.wire.common.fields import DELIVERIES

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from google.protobuf.message import Message

    from py_scheduler.domain.task import SubmissionKey
    from py_scheduler.wire.common.fields import Faults

_SAMPLING_LISTS = ("stop", "stop_token_ids")
_SAMPLING_SCALARS = tuple(
    field.name for field in task_pb2.SamplingParams.DESCRIPTOR.fields if field.name not in _SAMPLING_LISTS
)
_STOPPING_SCALARS = ("max_turns", "max_context_len")
_RETRY_SCALARS = RetryPolicy.__struct_fields__

_NO_CONFIG = TaskConfig(task_type="absent")
_NO_SAMPLING = SamplingParams()
_NO_STOPPING = StoppingCriteria()
_DEFAULT_RETRY = RetryPolicy()


# Wire to domain


class TaskReader:
    """Reads the tasks of one request, all of them or some at a time. default_config: of those that have none."""

    __slots__ = ("_configs", "_default", "_faults", "_known_dataset_configs", "tasks")

    def __init__(self, default_config: task_pb2.TaskConfig | None, faults: Faults) -> None:
        self._faults = faults
        self._configs = _ConfigReader(faults)
        self._known_dataset_configs: set[bytes] = set()
        self._default = None if default_config is None else self._configs.read(default_config, "default_config")
        self.tasks: list[Task] = []

    def read(self, messages: Iterable[task_pb2.Task]) -> None:
        """Those that follow on what was read before."""
        faults, default, tasks = self._faults, self._default, self.tasks
        for number, message in enumerate(messages, len(tasks)):
            if faults.are_many:
                break
            if message.HasField("config"):
                config = self._configs.read(message.config, f"tasks[{number}].config")
            elif default is not None:
                config = default
            else:
                config = _NO_CONFIG
                absent = "is absent, and so is the request's default_config: send one of them"
                faults.add(f"tasks[{number}].config", absent)
            metadata_json = message.metadata_json
            metadata = _read_metadata(metadata_json, f"tasks[{number}].metadata_json", faults) if metadata_json else {}
            if DATASET_CONFIG_KEY in metadata:
                text = msgspec.json.encode(metadata[DATASET_CONFIG_KEY])
                if text not in self._known_dataset_configs:
                    self._known_dataset_configs.add(text)
                    faults.add_all(f"tasks[{number}]", check_dataset_config(metadata, config.dataset))
            client_key = message.client_key
            if client_key and (fault := name_fault(client_key)):
                faults.add(f"tasks[{number}].client_key", fault)
            tasks.append(
                Task(
                    config=config,
                    prompt=message.prompt,
                    data=message.data,
                    metadata=metadata,
                    client_key=client_key,
                )
            )


class _ConfigReader:
    """Decodes each distinct config of a request once."""

    __slots__ = ("_faults", "_known")

    def __init__(self, faults: Faults) -> None:
        self._faults = faults
        self._known: dict[bytes, TaskConfig] = {}

    def read(self, message: task_pb2.TaskConfig, path: str) -> TaskConfig:
        key = message.SerializeToString()
        config = self._known.get(key)
        if config is None:
            config = self._known[key] = decode_config(message)
            self._faults.add_all(path, check_task_config(config))
        return config


def decode_config(message: task_pb2.TaskConfig) -> TaskConfig:
    """Reads without judging: `limits.check_task_config` says what is wrong."""
    return TaskConfig(
        task_type=message.task_type,
        repeat_times=message.repeat_times if message.HasField("repeat_times") else 1,
        dataset=message.dataset,
        sampling=decode_sampling(message.sampling) if message.HasField("sampling") else _NO_SAMPLING,
        stopping=(
            StoppingCriteria(**_present(message.stopping, _STOPPING_SCALARS))
            if message.HasField("stopping")
            else _NO_STOPPING
        ),
        task_deadline_seconds=message.task_deadline_seconds if message.HasField("task_deadline_seconds") else None,
        retry=RetryPolicy(**_present(message.retry, _RETRY_SCALARS)) if message.HasField("retry") else _DEFAULT_RETRY,
        is_eval=message.is_eval,
        max_samples_per_subtask=(
            message.max_samples_per_subtask or None if message.HasField("max_samples_per_subtask") else 1
        ),
        keeps_partial=message.keeps_partial,
        attempt_timeout_seconds=(
            message.attempt_timeout_seconds if message.HasField("attempt_timeout_seconds") else None
        ),
        has_dynamic_timeout=message.has_dynamic_timeout,
    )


def decode_sampling(message: task_pb2.SamplingParams) -> SamplingParams:
    return SamplingParams(
        # One more than is allowed is enough for the check to refuse, however many were sent.
        stop=tuple(message.stop.values[: MAX_STOPS + 1]) if message.HasField("stop") else None,
        stop_token_ids=(
            tuple(message.stop_token_ids.values[: MAX_STOPS + 1]) if message.HasField("stop_token_ids") else None
        ),
        **_present(message, _SAMPLING_SCALARS),
    )


def _present(message: Message, fields: Iterable[str]) -> dict[str, Any]:
    return {field: getattr(message, field) for field in fields if message.HasField(field)}


def _read_metadata(metadata_json: bytes, path: str, faults: Faults) -> dict[str, Any]:
    try:
        metadata: Any = msgspec.json.decode(metadata_json)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        faults.add(path, f"is not JSON in UTF-8: {error}")
        return {}
    except RecursionError:
        faults.add(path, "is nested too deeply")
        return {}
    if type(metadata) is not dict:
        faults.add(path, f"must be a JSON object, not {type(metadata).__name__}")
        return {}
    return metadata


def decode_iteration(message: task_pb2.IterationContext, path: str, faults: Faults) -> IterationContext:
    iteration = IterationContext(rollout_id=message.rollout_id, beta=message.beta, t_max=message.t_max)
    faults.add_all(path, check_iteration(iteration))
    return iteration


def decode_batch_id(message: task_pb2.BatchId, path: str, faults: Faults) -> BatchId:
    kind = message.WhichOneof("id")
    if kind is None:
        faults.add(path, 'is absent: send a step (7) or a label ("7/gsm8k")')
        return 0
    batch_id: BatchId = message.step if kind == "step" else message.label
    faults.add_all(path, check_batch_id(batch_id))
    return batch_id


# Domain to wire


def encode_config(config: TaskConfig) -> task_pb2.TaskConfig:
    """Raises InvalidArgumentError for what the server would refuse anyway."""
    if violations := tuple(check_task_config(config)):
        raise InvalidArgumentError(violations)
    message = task_pb2.TaskConfig(
        task_type=config.task_type,
        repeat_times=config.repeat_times,
        dataset=config.dataset,
        task_deadline_seconds=config.task_deadline_seconds,
        is_eval=config.is_eval,
        keeps_partial=config.keeps_partial,
        attempt_timeout_seconds=config.attempt_timeout_seconds,
        has_dynamic_timeout=config.has_dynamic_timeout,
    )
    if config.max_samples_per_subtask != 1:
        message.max_samples_per_subtask = config.max_samples_per_subtask or 0
    if config.sampling != _NO_SAMPLING:
        message.sampling.CopyFrom(encode_sampling(config.sampling))
    if config.stopping != _NO_STOPPING:
        message.stopping.CopyFrom(task_pb2.StoppingCriteria(**_said(config.stopping)))
    if config.retry != _DEFAULT_RETRY:
        message.retry.CopyFrom(task_pb2.RetryPolicy(**_said(config.retry)))
    return message


def encode_sampling(params: SamplingParams) -> task_pb2.SamplingParams:
    said = _said(params)
    for field in _SAMPLING_LISTS:
        if field in said:
            said[field] = {"values": said[field]}
    return task_pb2.SamplingParams(**said)


def _said(params: msgspec.Struct) -> dict[str, Any]:
    return {field: value for field in params.__struct_fields__ if (value := getattr(params, field)) is not None}


def encode_task(task: Task, message: task_pb2.Task) -> None:
    """Fills a message with everything but the config.

    Raises InvalidArgumentError for metadata that is not JSON and for text that UTF-8 cannot carry.
    """
    try:
        if task.prompt:
            message.prompt = task.prompt
        if task.client_key:
            message.client_key = task.client_key
        if task.data:
            message.data = task.data
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(f"cannot be sent: {error}", _unsendable_field(task)) from error
    if task.metadata:
        try:
            message.metadata_json = msgspec.json.encode(task.metadata)
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"must hold JSON values only: {error}", "metadata") from error


def _unsendable_field(task: Task) -> str:
    for field in ("prompt", "client_key"):
        value = getattr(task, field)
        if not isinstance(value, str) or safe_text(value) != value:
            return field
    return "data"


def encode_iteration(iteration: IterationContext) -> task_pb2.IterationContext:
    """Raises InvalidArgumentError for one that the server would refuse anyway."""
    if violations := tuple(check_iteration(iteration)):
        raise InvalidArgumentError([FieldViolation(f"iteration.{v.field}", v.description) for v in violations])
    return task_pb2.IterationContext(rollout_id=iteration.rollout_id, beta=iteration.beta, t_max=iteration.t_max)


def encode_batch_id(batch_id: BatchId) -> task_pb2.BatchId:
    """Raises InvalidArgumentError for one that the server would refuse anyway."""
    if violations := tuple(check_batch_id(batch_id)):
        raise InvalidArgumentError([FieldViolation(f"batch_id.{v.field}", v.description) for v in violations])
    return task_pb2.BatchId(label=batch_id) if isinstance(batch_id, str) else task_pb2.BatchId(step=batch_id)


_CHUNK_SAMPLES = 100_000
"""A request is closed by the task that plans its samples up to this: well below what one call may plan."""
_TASK_INDEX = re.compile(r"^tasks\[(\d+)\]")


class SubmitChunk(msgspec.Struct, frozen=True):
    """One call's request; its tasks are those from `first_task` on of the whole list."""

    first_task: int
    request: service.SubmitTasksRequest

    def with_list_index(self, error: InvalidArgumentError) -> InvalidArgumentError:
        """The error with task numbers of the whole list, as its submitter counts them."""

        def shift(match: re.Match[str]) -> str:
            return f"tasks[{int(match[1]) + self.first_task}]"

        return type(error)([FieldViolation(_TASK_INDEX.sub(shift, v.field), v.description) for v in error.violations])


def encode_submission_chunks(
    tasks: Iterable[Task],
    key: SubmissionKey,
    request_id: str,
    max_tasks: int,
    max_bytes: int,
    iteration: IterationContext | None = None,
    delivery: Delivery = Delivery.WATCH,
) -> Iterator[SubmitChunk]:
    """A request is closed by `max_tasks`, or by the task that brings it to `max_bytes`; each bears what is said of all.

    Raises InvalidArgumentError for tasks that the server would refuse anyway, and for an empty list.
    """
    configs = _ConfigCache()
    head = service.SubmitTasksRequest(
        batch_id=encode_batch_id(key.batch_id),
        namespace=key.namespace,
        iteration=None if iteration is None else encode_iteration(iteration),
        delivery=DELIVERIES.number_of[delivery],
    )
    chunk: _OpenChunk | None = None
    chunk_no = 0
    for number, task in enumerate(tasks):
        if chunk is None:
            chunk = _OpenChunk(
                head, f"{request_id}/{chunk_no}" if chunk_no else request_id, configs, number, task.config
            )
        chunk.add(number, task)
        is_full = number - chunk.first_task + 1 >= max_tasks or chunk.samples >= _CHUNK_SAMPLES
        if is_full or chunk.size_bytes >= max_bytes:
            yield chunk.close()
            chunk, chunk_no = None, chunk_no + 1
    if chunk is not None:
        yield chunk.close()
    elif chunk_no == 0:
        raise InvalidArgumentError("is empty: there is nothing to submit", "tasks")


class _OpenChunk:
    """A request that still takes tasks. default_config: of its tasks, unless they bring another object."""

    __slots__ = ("_configs", "_default_config", "_request", "first_task", "samples", "size_bytes")

    def __init__(
        self,
        head: service.SubmitTasksRequest,
        request_id: str,
        configs: _ConfigCache,
        first_task: int,
        default_config: TaskConfig,
    ) -> None:
        self._configs = configs
        self._default_config = default_config
        self._request = service.SubmitTasksRequest(request_id=request_id)
        self._request.MergeFrom(head)
        self._request.default_config.CopyFrom(_at_task(configs, first_task, default_config))
        self.first_task = first_task
        self.samples = 0
        self.size_bytes = 0
        """Of the tasks."""

    def add(self, number: int, task: Task) -> None:
        message = self._request.tasks.add()
        if task.config is not self._default_config:
            message.config.CopyFrom(_at_task(self._configs, number, task.config))
        try:
            encode_task(task, message)
        except InvalidArgumentError as error:
            raise _prefixed(error, f"tasks[{number}]") from error
        self.size_bytes += message.ByteSize()
        self.samples += task.config.repeat_times

    def close(self) -> SubmitChunk:
        return SubmitChunk(self.first_task, self._request)


class _ConfigCache:
    """Encodes each config object once. Keeps the objects, so that an id is never another object's."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[int, tuple[TaskConfig, task_pb2.TaskConfig]] = {}

    def encode(self, config: TaskConfig) -> task_pb2.TaskConfig:
        known = self._known.get(id(config))
        if known is None:
            known = self._known[id(config)] = (config, encode_config(config))
        return known[1]


def _at_task(configs: _ConfigCache, number: int, config: TaskConfig) -> task_pb2.TaskConfig:
    try:
        return configs.encode(config)
    except InvalidArgumentError as error:
        raise _prefixed(error, f"tasks[{number}].config") from error


def _prefixed(error: InvalidArgumentError, prefix: str) -> InvalidArgumentError:
    return InvalidArgumentError([FieldViolation(f"{prefix}.{v.field}", v.description) for v in error.violations])
