"""From `module:Class` in the configuration to a handler, or from `module:function` to a batching strategy: what can go
wrong on the way, each told apart.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import traceback
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.evaluator import BaseAgent, HandlerElsewhere
from py_scheduler.errors import ConfigError, FieldViolation

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from types import ModuleType

    from py_scheduler.batching import BatchingStrategy

    Parts = Mapping[str, Callable[[object, str], object]]

_MAX_NAMES = 8
_METHODS = {"run": "self, episode", "eval": "self, episode, result", "eval_group": "self, task, samples"}
_OPTIONAL = ("eval_group",)


def make_handler(name: str, arguments: dict[str, Any], key: str, parts: Parts | None = None) -> BaseAgent:
    """Imports `module:Class` and makes one. Raises ConfigError with what went wrong where; `key` is the evaluator's.

    parts: what a constructor gets by the name of its parameter. Each is made from the argument of that name (None
    without one), and called by the key that is its second argument in errors.
    """
    found = _find_handler(name, key)
    wanted = inspect.signature(found).parameters
    made = {
        part: make(arguments.get(part), f"{key}.handler_args.{part}")
        for part, make in (parts or {}).items()
        if part in wanted
    }
    try:
        return found(**arguments | made)
    except Exception as error:  # a handler's constructor may raise anything
        reason = f"{name} does not take these arguments: {type(error).__name__}: {error}"
        raise ConfigError(reason, f"{key}.handler_args") from error


def handler_elsewhere(name: str, key: str) -> HandlerElsewhere:
    """Imports `module:Class` and makes none: its runners do. Raises ConfigError as `make_handler` does.

    What is wrong with a handler's module or class is so told before any runner is started.
    """
    found = _find_handler(name, key)
    return HandlerElsewhere(name, scores_groups=found.eval_group is not BaseAgent.eval_group)


def _find_handler(name: str, key: str) -> type[BaseAgent]:
    module_name, _, class_name = name.partition(":")
    found = _find(_import(module_name, f"{key}.handler"), class_name, f"{key}.handler", "class", _is_handler)
    if not (inspect.isclass(found) and issubclass(found, BaseAgent)):
        raise ConfigError(f"{name} is no subclass of py_scheduler.domain.evaluator.BaseAgent", f"{key}.handler")
    faults = [
        FieldViolation(f"{key}.handler", f"{name} {fault}: it must have `async def {method}({parameters})`")
        for method, parameters in _METHODS.items()
        if (fault := _method_fault(found, method))
    ]
    if faults:
        raise ConfigError(faults)
    return found


def load_strategy(name: str, key: str) -> BatchingStrategy:
    """Imports `module:function`. Raises ConfigError with what went wrong where."""
    module_name, _, function_name = name.partition(":")
    strategy: BatchingStrategy = _find(_import(module_name, key), function_name, key, "function", inspect.isfunction)
    if not callable(strategy):
        raise ConfigError(f"{name} cannot be called: it must be `def {function_name}(tasks, specs)`", key)
    return strategy


def load_factory(name: str, options: Mapping[str, Any], key: str) -> Callable[..., Any]:
    """Imports the `module:function` that makes a data set, to be called as function(epoch, **options).

    `key` is the data set's. Raises ConfigError with what went wrong where.
    """
    module_name, _, function_name = name.partition(":")
    field = f"{key}.factory"
    factory: Callable[..., Any] = _find(
        _import(module_name, field), function_name, field, "function", inspect.isfunction
    )
    if not callable(factory):
        raise ConfigError(f"{name} cannot be called: it must be `def {function_name}(epoch, **options)`", field)
    try:
        inspect.signature(factory).bind(0, **options)
    except TypeError as error:
        told = "".join(f", {option}=..." for option in options)
        reason = f"{name} cannot be called as {function_name}(epoch{told}): {error}"
        raise ConfigError(reason, f"{key}.options") from error
    except ValueError:  # some that are not written in Python do not say what they take
        pass
    return factory


def _import(module_name: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and _is_part_of(module_name, error.name):
            raise ConfigError(
                f"there is no module {error.name}: put its folder on PYTHONPATH, or the module into the folder of the "
                "configuration file",
                key,
            ) from error
        reason = f"importing {module_name} failed{_place(error)}: {type(error).__name__}: {error}"
        raise ConfigError(reason, key) from error


def _is_part_of(module_name: str, missing: str | None) -> bool:
    """Whether it is the module itself that is missing, or a package it is in, rather than something it imports."""
    return missing is not None and f"{module_name}.".startswith(f"{missing}.")


def _place(error: BaseException) -> str:
    """Where in whose code, without the import machinery."""
    if isinstance(error, SyntaxError) and error.filename:
        return f" at {error.filename}:{error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    theirs = [frame for frame in frames[1:] if "importlib" not in frame.filename]
    return f" at {theirs[-1].filename}:{theirs[-1].lineno}" if theirs else ""


def _find(module: ModuleType, path: str, key: str, kind: str, is_one: Callable[[Any], bool]) -> Any:
    found: Any = module
    for part in path.split("."):
        names = [name for name, value in vars(found).items() if is_one(value)]
        found = getattr(found, part, None)
        if found is None:
            raise ConfigError(f"module {module.__name__} has no {kind} {path}{_hint(part, names)}", key)
    return found


def _is_handler(value: object) -> bool:
    return inspect.isclass(value) and issubclass(value, BaseAgent) and value is not BaseAgent


def _hint(name: str, names: list[str]) -> str:
    if near := difflib.get_close_matches(name, names, n=1):
        return f"; did you mean {near[0]}?"
    return f"; it has {', '.join(names[:_MAX_NAMES])}" if names else ""


def _method_fault(handler_class: type[BaseAgent], method: str) -> str:
    function = getattr(handler_class, method)
    if function is getattr(BaseAgent, method):
        return "" if method in _OPTIONAL else f"has no method {method}"
    return "" if inspect.iscoroutinefunction(function) else f"defines {method} without async"
