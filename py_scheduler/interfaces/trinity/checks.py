"""What a Scheduler refuses before anything has changed: each fault names its field, and all are told at once."""

from __future__ import annotations

import math
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.limits import (
    MAX_COLLECT_SECONDS,
    MAX_DEADLINE_SECONDS,
    MAX_REPEAT_TIMES,
    MAX_RETRIES,
    MAX_TASKS_PER_SUBMISSION,
    MAX_VIOLATIONS,
    Range,
)
from py_scheduler.domain.runners.runner import is_forbidden
from py_scheduler.errors import FieldViolation, InvalidArgumentError
from py_scheduler.interfaces.trinity.config import ProcessConfig
from py_scheduler.interfaces.trinity.engine import default_timeout
from py_scheduler.interfaces.trinity.runners.process import is_of_processes, pickled

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from py_scheduler.interfaces.trinity.protocols import TrinityConfig, TrinityTask

_MAX_RUNNERS = 65_536
_MODES = ("sequential", "asynchronous", "multi-threading")
_KINDS = ("inline", "process")
_MAX_MIB = 1 << 40
_TASK_FIELDS = ("workflow", "repeat_times", "is_eval", "batch_id", "task_id", "rollout_args")
_COUNTS = {
    "runner_per_model": Range(1, _MAX_RUNNERS),
    "runner_prepare_concurrency": Range(1, _MAX_RUNNERS),
    "runner_prepare_max_retries": Range(0, MAX_RETRIES),
    "max_retry_times": Range(0, MAX_RETRIES),
    "rollout_model.engine_num": Range(1, _MAX_RUNNERS),
    "dynamic_timeout.warmup_min_steps": Range(0, MAX_TASKS_PER_SUBMISSION),
}
_NUMBERS = {
    "max_timeout": Range(0, MAX_DEADLINE_SECONDS, above_low=True),
    "runner_state_report_interval": Range(0, MAX_DEADLINE_SECONDS),
    "over_rollout.wait_after_min": Range(0, MAX_COLLECT_SECONDS),
    "dynamic_timeout.ratio": Range(0, MAX_DEADLINE_SECONDS, above_low=True),
}


def check_config(config: TrinityConfig) -> None:
    """Raises InvalidArgumentError."""
    explorer = config.explorer
    violations = list(_config_faults(explorer))
    if not violations and default_timeout(config) > MAX_DEADLINE_SECONDS:
        reason = f"times max_retry_times + 1 is {default_timeout(config):g}, must be at most {MAX_DEADLINE_SECONDS:g}"
        violations.append(FieldViolation("explorer.max_timeout", reason))
    if violations:
        raise InvalidArgumentError(violations)
    if is_of_processes(config):
        pickled(config, "config")


def _config_faults(explorer: Any) -> Iterator[FieldViolation]:
    for field, allowed in _COUNTS.items():
        yield from _number_fault(f"explorer.{field}", _at(explorer, field), allowed, whole=True)
    for field, allowed in _NUMBERS.items():
        yield from _number_fault(f"explorer.{field}", _at(explorer, field), allowed)
    for number, model in enumerate(explorer.auxiliary_models):
        field = f"explorer.auxiliary_models[{number}].engine_num"
        yield from _number_fault(field, _at(model, "engine_num"), Range(1, _MAX_RUNNERS), whole=True)
    size = explorer.max_repeat_times_per_runner
    if size is not None:
        field = "explorer.max_repeat_times_per_runner"
        yield from _number_fault(field, size, Range(1, MAX_REPEAT_TIMES), whole=True)
    yield from _choice_fault("explorer.concurrent_mode", explorer.concurrent_mode, _MODES)
    kind = getattr(explorer, "runner", "inline")
    yield from _choice_fault("explorer.runner", kind, _KINDS)
    if kind == "process":
        yield from _process_faults(getattr(explorer, "process", ProcessConfig()))


def _process_faults(process: Any) -> Iterator[FieldViolation]:
    seconds = _at(process, "start_seconds")
    yield from _number_fault("explorer.process.start_seconds", seconds, Range(0, MAX_DEADLINE_SECONDS, above_low=True))
    if (limit := _at(process, "max_resident_mib")) is not None:
        yield from _number_fault("explorer.process.max_resident_mib", limit, Range(0, _MAX_MIB, above_low=True))
    for name in _at(process, "environment") or ():
        if not isinstance(name, str) or is_forbidden(name):
            yield FieldViolation("explorer.process.environment", f"{name!r} is never handed to a runner: take it out")


def _choice_fault(field: str, value: object, choices: Sequence[str]) -> Iterator[FieldViolation]:
    if value not in choices:
        yield FieldViolation(field, f"is {value!r}, must be one of {', '.join(choices)}")


def check_tasks(tasks: Sequence[TrinityTask], *, are_sent: bool) -> None:
    """are_sent: whether they go to other processes. Raises InvalidArgumentError."""
    violations = [fault for number, task in enumerate(tasks) for fault in _task_faults(f"tasks[{number}]", task)]
    if violations:
        raise InvalidArgumentError(violations[:MAX_VIOLATIONS])
    if are_sent:
        for number, task in enumerate(tasks):
            pickled(task, f"tasks[{number}]")


def _task_faults(field: str, task: Any) -> Iterator[FieldViolation]:
    if missing := [name for name in _TASK_FIELDS if not hasattr(task, name)]:
        yield FieldViolation(field, f"is {type(task).__name__} without {', '.join(missing)}, must be a task")
        return
    yield from _number_fault(f"{field}.repeat_times", task.repeat_times, Range(1, MAX_REPEAT_TIMES), whole=True)
    if not isinstance(task.workflow, type):
        yield FieldViolation(f"{field}.workflow", f"is {task.workflow!r}, must be a class of workflows")
    if not (is_dataclass(task.rollout_args) and hasattr(task.rollout_args, "n")):
        reason = f"is {type(task.rollout_args).__name__}, must be a dataclass with a field n"
        yield FieldViolation(f"{field}.rollout_args", reason)


def check_wait(min_num: int | None, timeout: float | None) -> None:
    """Of a call that waits for results; a timeout below 0 is one of 0. Raises InvalidArgumentError."""
    violations: list[FieldViolation] = []
    if min_num is not None:
        violations += _number_fault("min_num", min_num, Range(0, MAX_TASKS_PER_SUBMISSION), whole=True)
    if timeout is not None and (not _is_number(timeout) or math.isnan(timeout)):
        violations.append(FieldViolation("timeout", f"is {timeout!r}, must be a number of seconds, or None"))
    if violations:
        raise InvalidArgumentError(violations)


def _number_fault(field: str, value: Any, allowed: Range, *, whole: bool = False) -> Iterator[FieldViolation]:
    kind = "a whole number, " if whole else "a number, "
    if not _is_number(value) or (whole and not isinstance(value, int)) or value not in allowed:
        yield FieldViolation(field, f"is {value!r}, must be {kind}{allowed}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _at(holder: Any, path: str) -> Any:
    """None where there is no such thing."""
    for name in path.split("."):
        holder = getattr(holder, name, None)
    return holder
