"""Says where a message that cannot be parsed is damaged.

The parser only says that it failed. This slow second reading finds the first string that is not UTF-8, so that the
answer can name its field; it runs for refused messages alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from google.protobuf.descriptor import FieldDescriptor

from py_scheduler.errors import InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from google.protobuf.descriptor import Descriptor

_VARINT, _FIXED64, _DELIMITED, _FIXED32 = 0, 1, 2, 5
_MAX_DEPTH = 32
_MAX_SEARCHED_BYTES = 64 << 10
"""The search reads byte by byte, a few microseconds each: for a large message its answer is not worth the stall."""


class _TruncatedError(ValueError):
    """The bytes end in the middle of a field, or are no fields at all."""


def damage_error(raw: bytes, descriptor: Descriptor) -> InvalidArgumentError:
    """The error for a message that its parser refused."""
    field = None
    if len(raw) <= _MAX_SEARCHED_BYTES:
        try:
            field = _find_bad_text(memoryview(raw), descriptor, "", 0)
        except _TruncatedError:
            field = None
    if field is None:
        return InvalidArgumentError(
            f"the bytes are no {descriptor.full_name}: they end early, are malformed, or hold text that is not UTF-8"
        )
    return InvalidArgumentError("is not valid UTF-8", field)


def _find_bad_text(raw: memoryview, descriptor: Descriptor, prefix: str, depth: int) -> str | None:
    seen: dict[str, int] = {}
    for number, value in _delimited_fields(raw):
        field = descriptor.fields_by_number.get(number)
        if field is None:
            continue
        path = f"{prefix}{field.name}"
        if field.is_repeated:
            index = seen[field.name] = seen.get(field.name, -1) + 1
            path = f"{path}[{index}]"
        if field.type == FieldDescriptor.TYPE_STRING and not _is_utf8(value):
            return path
        if field.message_type is not None and depth < _MAX_DEPTH:
            bad = _find_bad_text(value, field.message_type, f"{path}.", depth + 1)
            if bad is not None:
                return bad
    return None


def _is_utf8(value: memoryview) -> bool:
    try:
        str(value, "utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _delimited_fields(raw: memoryview) -> Iterator[tuple[int, memoryview]]:
    """Number and bytes of each length-delimited field; the others are stepped over."""
    position = 0
    while position < len(raw):
        tag, position = _read_varint(raw, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _DELIMITED:
            length, position = _read_varint(raw, position)
            if position + length > len(raw):
                raise _TruncatedError
            yield number, raw[position : position + length]
            position += length
        elif wire_type == _VARINT:
            _value, position = _read_varint(raw, position)
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        else:
            raise _TruncatedError


def _read_varint(raw: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if position >= len(raw):
            break
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:  # noqa: PLR2004 - the continuation bit
            return value, position
    raise _TruncatedError
