"""Random and broken messages of any type, from its descriptor alone; and every call that there is."""

from __future__ import annotations

import importlib
import math
import pkgutil
from typing import TYPE_CHECKING, Any

from google.protobuf import message_factory
from google.protobuf.descriptor import FieldDescriptor
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from py_scheduler._generated.rollout_scheduler import v1

if TYPE_CHECKING:
    import random
    from collections.abc import Sequence

    from google.protobuf.descriptor import Descriptor, MethodDescriptor, ServiceDescriptor
    from google.protobuf.message import Message

_DEEPEST = 5
_INTEGERS = (0, 1, 2, 3, 7, 100, 65_536, 2**31 - 1, -1, -(2**31))
_LARGE = (2**32, 2**53 + 1, 2**63 - 1, -(2**63))
_FLOATS = (0.0, 0.5, 1.0, 60.0, -1.0, 1e-9, 1e18, 1e308, math.inf, -math.inf, math.nan)
_TEXTS = (
    *(
        "",
        "default",
        "echo",
        "student",
        "7",
        "7/eval",
        "a" * 5_000,
        "\0",
        "\ud7ff\U0001f600",
        "'; DROP TABLE frame; --",
    ),
    *("../../etc/passwd", "/etc/passwd", "os:system", "tests.faults.messages:Message", "LD_PRELOAD", "{{7*7}}", "%s%n"),
)
_SIGNED = {FieldDescriptor.CPPTYPE_INT32, FieldDescriptor.CPPTYPE_INT64}
_WHOLE = {*_SIGNED, FieldDescriptor.CPPTYPE_UINT32, FieldDescriptor.CPPTYPE_UINT64}
_REAL = {FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT}


def services() -> list[ServiceDescriptor]:
    """Every service that a server has; what is added to the protos is here by itself."""
    modules = [importlib.import_module(f"{v1.__name__}.{found.name}") for found in pkgutil.iter_modules(v1.__path__)]
    files = [module.DESCRIPTOR for module in modules if module.__name__.endswith("_pb2")]
    files += [health_pb2.DESCRIPTOR, reflection_pb2.DESCRIPTOR]
    return [service for file in files for service in file.services_by_name.values()]


def methods() -> list[MethodDescriptor]:
    return [method for service in services() for method in service.methods]


def path_of(method: MethodDescriptor) -> str:
    return f"/{method.containing_service.full_name}/{method.name}"


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


class MessageMaker:
    """texts: beside the usual ones, so that ids are met which the server knows."""

    def __init__(self, chance: random.Random, texts: Sequence[str] = ()) -> None:
        self._chance = chance
        self.texts = [*_TEXTS]
        self.known = list(texts)

    def message(self, descriptor: Descriptor, depth: int = 0) -> Message:
        """With about every second field set, to what may be right or not."""
        made = message_factory.GetMessageClass(descriptor)()
        for field in descriptor.fields:
            if self._chance.random() < 0.6 and not (depth >= _DEEPEST and field.message_type):
                self._fill(made, field, depth)
        return made

    def _fill(self, made: Message, field: FieldDescriptor, depth: int) -> None:
        value: Any = getattr(made, field.name)
        if _is_map(field):
            key, item = field.message_type.fields
            for _ in range(self._chance.randint(0, 2)):
                if item.message_type is None:
                    value[self._value(key)] = self._value(item)
                else:
                    value[self._value(key)].CopyFrom(self.message(item.message_type, depth + 1))
        elif field.is_repeated:
            for _ in range(self._chance.randint(0, 3)):
                if field.message_type is None:
                    value.append(self._value(field))
                else:
                    value.add().CopyFrom(self.message(field.message_type, depth + 1))
        elif field.message_type is not None:
            value.CopyFrom(self.message(field.message_type, depth + 1))
        else:
            setattr(made, field.name, self._value(field))

    def _value(self, field: FieldDescriptor) -> Any:
        chance, kind = self._chance, field.cpp_type
        if kind == FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        if kind == FieldDescriptor.CPPTYPE_ENUM:
            return chance.choice([value.number for value in field.enum_type.values] + [99])
        if kind in _REAL:
            value = chance.choice(_FLOATS)
            return value if kind == FieldDescriptor.CPPTYPE_DOUBLE or abs(value) < 1e30 else 1.5
        if kind in _WHOLE:
            wide = kind in (FieldDescriptor.CPPTYPE_INT64, FieldDescriptor.CPPTYPE_UINT64)
            number = chance.choice(_INTEGERS + (_LARGE if wide else ()))
            return number if kind in _SIGNED else abs(number)
        text = chance.choice(self.known) if self.known and chance.random() < 0.4 else chance.choice(self.texts)
        return text if field.type == FieldDescriptor.TYPE_STRING else text.encode()

    def varied(self, good: Message) -> Message:
        """A copy with up to two of its fields, however deep, filled anew."""
        made = type(good)()
        made.CopyFrom(good)
        for _ in range(self._chance.randint(0, 2)):
            inner: Any = made
            while True:
                held = [value for field, value in inner.ListFields() if field.message_type and not _is_map(field)]
                if not held or self._chance.random() < 0.3:
                    break
                value = self._chance.choice(held)
                inner = value if hasattr(value, "DESCRIPTOR") else self._chance.choice(value)
            if inner.DESCRIPTOR.fields:
                field = self._chance.choice(inner.DESCRIPTOR.fields)
                inner.ClearField(field.name)
                self._fill(inner, field, 2)
        return made

    def broken(self, raw: bytes) -> bytes:
        """Some bytes of it changed, left out, repeated or put in."""
        content = bytearray(raw or b"\n\x02hi")
        for _ in range(self._chance.randint(1, 4)):
            at = self._chance.randrange(len(content) + 1)
            how = self._chance.randrange(5)
            if how == 0 and at < len(content):
                content[at] ^= 1 << self._chance.randrange(8)
            elif how == 1:
                del content[at:]
            elif how == 2:
                content[at:at] = self._chance.randbytes(self._chance.randint(1, 8))
            elif how == 3:
                content[at:at] = content[max(0, at - 8) : at]
            else:
                content[at : at + 2] = b"\xff\xfe"
        return bytes(content)
