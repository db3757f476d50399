"""Submits that are too large to be parsed in one turn of the loop.

The parser takes a message whole and holds the interpreter meanwhile: 100 000 tasks take it 50 ms, and a thread would
not help. So a large submit is parsed as its envelope, which is the same message but that its tasks are bytes. That
copies them, at 64 MiB within 25 ms. Then these are parsed and decoded, some at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from py_scheduler._generated.rollout_scheduler.v1 import scheduler_service_pb2 as service
from py_scheduler.wire.common.damage import damage_error
from py_scheduler.wire.requests import SubmitReader
from py_scheduler.wire.tasks import SubmitChunk

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Iterator, Sequence

    from py_scheduler.domain.requests import SubmitRequest
    from py_scheduler.domain.task import SubmissionKey

LARGE_BYTES = 64 << 10
"""A submit that is larger is read through its envelope."""
_TOGETHER_TASKS = 64
_TOGETHER_BYTES = 32 << 10
"""The tasks that are parsed in one go end with the one that brings them to either."""


def _envelope_class() -> Any:
    pool: Any = descriptor_pool.DescriptorPool()
    for file in _with_imports(service.DESCRIPTOR):
        proto = descriptor_pb2.FileDescriptorProto()
        file.CopyToProto(proto)
        if file is service.DESCRIPTOR:
            (request,) = [message for message in proto.message_type if message.name == "SubmitTasksRequest"]
            (tasks,) = [field for field in request.field if field.name == "tasks"]
            tasks.type = descriptor_pb2.FieldDescriptorProto.TYPE_BYTES
            tasks.ClearField("type_name")
        pool.AddSerializedFile(proto.SerializeToString())
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(service.SubmitTasksRequest.DESCRIPTOR.full_name))


def _with_imports(file: Any) -> dict[Any, None]:
    """File descriptors, each after what it imports."""
    files: dict[Any, None] = {}
    for imported in file.dependencies:
        files |= _with_imports(imported)
    return files | {file: None}


SubmitEnvelope: Any = _envelope_class()


def decode_envelope(envelope: Any, max_tasks: int) -> tuple[SubmissionKey, Generator[None, None, SubmitRequest]]:
    """The key, and what reads the rest in slices. Both raise what `decode_submit_request` raises."""
    reader = SubmitReader(envelope, max_tasks)
    return reader.key, _reading(reader, envelope.tasks)


def _reading(reader: SubmitReader, encoded: Iterable[bytes]) -> Generator[None, None, SubmitRequest]:
    first_task = 0
    for some in _portions(encoded):
        raw = SubmitEnvelope(tasks=some).SerializeToString()
        try:
            reader.tasks.read(service.SubmitTasksRequest.FromString(raw).tasks)
        except DecodeError:
            message = service.SubmitTasksRequest()
            error = damage_error(raw, message.DESCRIPTOR)
            raise SubmitChunk(first_task, message).with_list_index(error) from None
        first_task += len(some)
        yield
    return reader.request()


def _portions(encoded: Iterable[bytes]) -> Iterator[Sequence[bytes]]:
    some: list[bytes] = []
    size = 0
    for task in encoded:
        some.append(task)
        size += len(task)
        if len(some) >= _TOGETHER_TASKS or size >= _TOGETHER_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some
