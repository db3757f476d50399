"""Cuts a list of tasks into SubmitTasks requests of bounded size, lazily: the list may be longer than memory.

The first request bears the caller's request id and the others ids derived from it, so that sending everything again is
recognised request by request.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import msgspec

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.domain.requests import Delivery
from py_scheduler.errors import FieldViolation, InvalidArgumentError
from py_scheduler.wire.common.enums import DELIVERIES
from py_scheduler.wire.tasks import encode_batch_id, encode_config, encode_iteration, encode_task

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from py_scheduler._generated.rollout_scheduler.v1 import task_pb2
    from py_scheduler.domain.task import SubmissionKey, Task, TaskConfig
    from py_scheduler.domain.training.iteration import IterationContext

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
