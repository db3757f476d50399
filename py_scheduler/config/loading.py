"""Reads a file, turns the knobs, types the tables and checks them."""

from __future__ import annotations

import tomllib
from typing import TYPE_CHECKING, Any, get_args, get_origin

import msgspec

from py_scheduler.config.checks import check
from py_scheduler.config.conversion import collecting, convert_table, convert_with_parts, unknown_key
from py_scheduler.config.tables import Config, EvaluatorSettings
from py_scheduler.domain.quotas import NamespaceSettings
from py_scheduler.errors import ConfigError, FieldViolation
from py_scheduler.knobs import DEFAULT_ENV_CONCURRENCY, apply_overrides

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from py_scheduler.knobs import Override

_NO_HANDLER = "nothing.is.imported:Handler"


def load_config(path: Path, overrides: Iterable[Override] = (), *, needs_handlers: bool = True) -> Config:
    """Reads a file. needs_handlers: False for `simulate`, which imports none: evaluators may leave theirs out.

    Raises ConfigError with every fault that was found.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    return parse_config(text, overrides, str(path), needs_handlers=needs_handlers)


def parse_config(
    text: str, overrides: Iterable[Override] = (), name: str = "the configuration", *, needs_handlers: bool = True
) -> Config:
    """Reads the text of a file that errors call `name`, as `load_config` does. Raises ConfigError with every fault that
    was found.
    """
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"{name} is nested too deeply") from error
    return convert_config(tables, overrides, needs_handlers=needs_handlers)


def convert_config(
    tables: dict[str, Any], overrides: Iterable[Override] = (), *, needs_handlers: bool = True
) -> Config:
    """Types and checks what a file holds. Raises ConfigError with every fault that was found."""
    evaluators = tables.get("evaluator")
    if not needs_handlers and isinstance(evaluators, list):
        for table in evaluators:
            if isinstance(table, dict):
                table.setdefault("handler", _NO_HANDLER)
    faults = apply_overrides(overrides, tables)
    config = _convert_tables(tables, faults)
    if not faults:
        faults.extend(check(config))
    if faults:
        raise ConfigError(faults)
    return config


def _convert_tables(tables: dict[str, Any], faults: list[FieldViolation]) -> Config:
    """Converts table by table, so that one faulty table does not hide the faults of another."""
    parts: dict[str, Any] = {}
    types = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for key, table in tables.items():
        if key not in types:
            faults.append(unknown_key(key, Config))
        elif get_origin(types[key]) is tuple:
            parts[key] = _convert_list(table, get_args(types[key])[0], key, faults)
        elif key == "namespace" and isinstance(table, dict):
            parts[key] = {}
            for name, settings in table.items():
                with collecting(faults):
                    parts[key][name] = convert_table(settings, NamespaceSettings, f"{key}.{name}")
        elif key == "generation" and isinstance(table, dict):
            faults.extend(_not_tables(table))
            parts[key] = table
        else:
            with collecting(faults):
                parts[key] = convert_with_parts(table, types[key], key)
    return Config(**parts)


def _convert_list(tables: Any, target: type, key: str, faults: list[FieldViolation]) -> tuple[Any, ...]:
    if not isinstance(tables, list):
        faults.append(FieldViolation(key, f"must be a list of tables: write [[{key}]]"))
        return ()
    converted: list[Any] = []
    for number, table in enumerate(tables):
        with collecting(faults):
            converted.append(convert_table(_completed(table, target), target, f"{key}[{number}]"))
    return tuple(converted)


def _completed(table: Any, target: type) -> Any:
    """A budget without a concurrency gets one: that of a Resource is one sample's, as a demand has it."""
    if target is EvaluatorSettings and isinstance(table, dict) and isinstance(resource := table.get("resource"), dict):
        return table | {"resource": {"concurrency": DEFAULT_ENV_CONCURRENCY} | resource}
    return table


def _not_tables(roles: dict[str, Any]) -> Iterator[FieldViolation]:
    for role, table in roles.items():
        if not isinstance(table, dict):
            yield FieldViolation(f"generation.{role}", f"must be a table: write [generation.{role}]")
