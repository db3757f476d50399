"""What of a handler's words and values can be sent and stored, decided once, where the handler returns them.

Invariants: text is what UTF-8 carries; details are a JSON object that every JSON reader takes, and the journal too,
however odd the objects were that they were made of.
"""

from __future__ import annotations

import math
from typing import Any, cast

import msgspec

_MAX_DEPTH = 64
"""Readers recurse, and not all of them from a shallow stack."""
_FEW_ENTRIES = 32
_SHORT = 1_000
"""Characters, each of which JSON may write as six."""
_INT_64 = 1 << 63
_UNREADABLE = "unreadable_details"


def safe_text(text: str) -> str:
    """What UTF-8 can carry of a text that a handler made, as a plain str: lone surrogates become question marks."""
    if type(text) is str and text.isascii():
        return text
    return str.encode(text, errors="replace").decode()


def words_of(error: BaseException) -> str:
    """What an exception says, whatever its own `__str__` does."""
    name = type(error).__name__
    try:
        return safe_text(f"{name}: {error}")
    except Exception:  # noqa: BLE001 - it may come from a handler
        return name


def plain_number(value: object) -> object:
    """Scalars of numpy and torch, and arrays of one element, as Python's own; anything else as it is."""
    if not callable(item := getattr(value, "item", None)):
        return value
    try:
        return item()
    except Exception:  # noqa: BLE001 - an array of several, or whatever it is: no number
        return value


def are_plain(details: dict[Any, Any]) -> bool:
    """Whether they are few and plain, so that they would come out of `details_json` as they are and in a few hundred
    KiB. Most are; to see that takes a fifth of the time.
    """
    return type(details) is dict and len(details) <= _FEW_ENTRIES and all(map(_is_plain, details, details.values()))


def _is_plain(name: object, value: object) -> bool:
    if not _is_short_text(name):
        return False
    kind = type(value)
    if kind is float:
        return math.isfinite(cast("float", value))
    if kind is int:
        return -_INT_64 <= cast("int", value) < _INT_64
    return kind is bool or value is None or _is_short_text(value)


def _is_short_text(text: object) -> bool:
    return type(text) is str and len(text) <= _SHORT and text.isascii()


def details_json(details: object) -> bytes:
    """Details as a JSON object. Numbers and arrays of numpy are numbers and lists; an entry that JSON cannot carry is
    replaced by what is wrong with it.
    """
    try:
        encoded = _json(details)
        if encoded.startswith(b"{"):
            return encoded
        raise TypeError(f"{type(details).__name__} is no JSON object")
    except Exception as error:  # noqa: BLE001 - a scorer may say anything, and its objects raise anything
        if not isinstance(details, dict):
            return msgspec.json.encode({_UNREADABLE: words_of(error)})
    entries = {_name_of(key): msgspec.Raw(_json_or_fault(value)) for key, value in details.items()}
    return msgspec.json.encode(entries)


def _json(value: object) -> bytes:
    """Raises whatever is wrong with a value that does not come back out of JSON, or that the journal cannot carry."""
    encoded = msgspec.json.encode(value, enc_hook=plain_value)
    decoded = msgspec.json.decode(encoded)
    # What comes out of JSON can be too much still: integers of any length.
    msgspec.msgpack.encode(decoded)
    # Counting is cheap and bounds the depth; only what has many brackets is looked at closely.
    if encoded.count(b"[") + encoded.count(b"{") > _MAX_DEPTH and _depth(decoded) > _MAX_DEPTH:
        raise ValueError(f"it is nested more than {_MAX_DEPTH} deep")
    return encoded


def _json_or_fault(value: object) -> bytes:
    try:
        return _json(safe_text(value) if type(value) is str else value)
    except Exception as error:  # noqa: BLE001 - as above
        return msgspec.json.encode(f"{_UNREADABLE}: {words_of(error)}")


def _name_of(key: object) -> str:
    try:
        return safe_text(str(key))
    except Exception as error:  # noqa: BLE001 - as above
        return words_of(error)


def plain_value(value: Any) -> Any:
    """For encoders: arrays and scalars of numpy and torch as lists and numbers. Raises TypeError for anything else."""
    if callable(to_list := getattr(value, "tolist", None)):
        return to_list()
    raise TypeError(f"{type(value).__name__} is no JSON value")


def _depth(value: object) -> int:
    """Without recursion: of lists and dicts in one another, the value itself included."""
    depth, level = 0, [value]
    while level:
        depth += 1
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, dict) else outer if isinstance(outer, list) else ())
        ]
    return depth
