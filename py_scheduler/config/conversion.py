"""From untyped tables to Structs, with faults that name the dotted key and, for an unknown one, what was meant."""

from __future__ import annotations

import difflib
import re
from enum import EnumType
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeVar, get_origin

import msgspec

from py_scheduler.errors import ConfigError, FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Sequence

T = TypeVar("T")
StructT = TypeVar("StructT", bound=msgspec.Struct)


def convert_table(table: object, target: type[T], key: str) -> T:
    """A table as a Struct of type `target`. Raises ConfigError; `key` is the table's own dotted key."""
    try:
        return msgspec.convert(table, target)
    except msgspec.ValidationError as error:
        raise ConfigError(_all_violations(error, table, target, key)) from error


def _all_violations(first: msgspec.ValidationError, table: object, target: type, key: str) -> list[FieldViolation]:
    """msgspec stops at the first fault: so what is in a table is looked at entry by entry, then what is missing."""
    if not (_is_struct(target) and isinstance(table, dict)):
        return _violations(first, table, target, key)
    found: list[FieldViolation] = []
    for name, value in table.items():
        entry = {name: value}
        try:
            msgspec.convert(entry, target)
        except msgspec.ValidationError as error:
            if not _MISSING.match(str(error)):
                found += _violations(error, entry, target, key)
    for field in msgspec.structs.fields(target):
        if field.required and field.name not in table:
            found.append(_missing(key, field.name))
    return found or _violations(first, table, target, key)


def convert_with_parts(table: object, target: type[StructT], key: str) -> StructT:
    """Like `convert_table`, but each table inside, and each of a mapping of tables, is converted by itself, so that no
    fault hides another's.

    Those tables must have defaults. Raises ConfigError with the faults of all.
    """
    if not isinstance(table, dict):
        return convert_table(table, target, key)
    faults: list[FieldViolation] = []
    types = {field.name: _struct_in(field.type) for field in msgspec.structs.fields(target)}
    inner = {name: part for name, part in table.items() if types.get(name) and isinstance(part, dict)}
    mappings = {field.name for field in msgspec.structs.fields(target) if get_origin(field.type) is dict}
    parts: dict[str, Any] = {}
    for name, part in inner.items():
        if name in mappings:
            parts[name] = {}
            for entry, value in part.items():
                where = f"{key}.{name}.{entry}"
                with collecting(faults):
                    if not isinstance(value, dict):
                        raise ConfigError([FieldViolation(where, f"must be a table: write [{key}.{name}.NAME]")])
                    parts[name][entry] = convert_table(value, types[name], where)
        else:
            with collecting(faults):
                parts[name] = convert_table(part, types[name], f"{key}.{name}")
    with collecting(faults):
        whole = convert_table({name: value for name, value in table.items() if name not in inner}, target, key)
        if not faults:
            return msgspec.structs.replace(whole, **parts)
    raise ConfigError(faults)


_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>(?:key )?[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_ANY_ENTRY = "[...]"
_TYPE_WORDS: dict[Any, str] = {float: "a number", int: "a whole number"}
_INDEX = re.compile(r"\[[^\]]*\]")
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


def _violations(error: msgspec.ValidationError, table: object, target: type, key: str) -> list[FieldViolation]:
    match = _MESSAGE.match(str(error))
    what, path = (match["what"], match["path"] or "$") if match else (str(error), "$")
    inner = path.removeprefix("$")
    if inner.endswith(_ANY_ENTRY):
        inner = inner.removesuffix(_ANY_ENTRY) + _entry_at_fault(table, inner.removesuffix(_ANY_ENTRY), what)
    where = (key + inner).removeprefix(".")
    if isinstance(error.__cause__, InvalidArgumentError):
        # The table's own type looked at it, and knows every fault.
        return [FieldViolation(f"{where}.{fault.field}", fault.description) for fault in error.__cause__.violations]
    found = _type_at(target, inner)
    if what.startswith("Invalid enum value") and (choices := _choices(found)):
        return [FieldViolation(where, f"is {what.removeprefix('Invalid enum value ')}, must be one of {choices}")]
    return [_violation(what, where, found.__struct_fields__ if _is_struct(found) else ())]


def _entry_at_fault(table: Any, mapping_path: str, what: str) -> str:
    """The name, as the end of a path, of the entry that is not of the type: msgspec names the mapping alone."""
    for name in filter(None, mapping_path.split(".")):
        table = table.get(name) if isinstance(table, dict) else None
    wanted = next((kind for kind in (int, str) if what.startswith(f"Expected `{kind.__name__}`")), None)
    entries = table.items() if wanted is not None and isinstance(table, dict) else ()
    return next((f".{name}" for name, value in entries if type(value) is not wanted), "")


def _violation(what: str, where: str, known: Sequence[str]) -> FieldViolation:
    if unknown := _UNKNOWN.match(what):
        return _unknown_key(f"{where}.{unknown['name']}".removeprefix("."), unknown["name"], known)
    if missing := _MISSING.match(what):
        return _missing(where, missing["name"])
    return FieldViolation(where, f"must be {what.removeprefix('Expected ')}" if what.startswith("Expected ") else what)


def _missing(where: str, name: str) -> FieldViolation:
    return FieldViolation(f"{where}.{name}".removeprefix("."), "is missing: it has no default")


def unknown_key(name: str, target: type[msgspec.Struct]) -> FieldViolation:
    """The fault of a key that a Struct of type `target`, the whole file, does not have."""
    return _unknown_key(name, name, target.__struct_fields__)


def _unknown_key(where: str, name: str, known: Sequence[str]) -> FieldViolation:
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}" if known else "remove it"
    return FieldViolation(where, f"unknown key: {hint}")


def _type_at(target: Any, inner_path: str) -> Any:
    """What a path such as `.resource` leads to below a Struct: a Struct if the field holds any, else its annotation."""
    for name in filter(None, _INDEX.sub("", inner_path).split(".")):
        fields = {field.name: field.type for field in msgspec.structs.fields(target)} if _is_struct(target) else {}
        annotation = fields.get(name)
        target = _struct_in(annotation) or annotation
    return target


def _choices(annotation: Any) -> str:
    """The values of an enumeration or a Literal, also where another type would do."""
    members = annotation if isinstance(annotation, EnumType) else getattr(annotation, "__args__", ())
    told = (_choices(member) or _TYPE_WORDS.get(member, str(member)) for member in members if member is not NoneType)
    return ", ".join(told)


def _struct_in(annotation: Any) -> Any:
    """The Struct that a field holds, alone, or None, or many of; None for a field that holds none."""
    return next((part for part in (annotation, *getattr(annotation, "__args__", ())) if _is_struct(part)), None)


def _is_struct(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, msgspec.Struct)


class collecting:  # noqa: N801 - reads as a statement
    """Takes the violations of a ConfigError raised inside, and goes on behind the block."""

    def __init__(self, faults: list[FieldViolation]) -> None:
        self._faults = faults

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if isinstance(error, InvalidArgumentError):
            self._faults.extend(error.violations)
            return True
        return False
