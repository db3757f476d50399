"""The server's configuration: a typed TOML file, with flags and environment variables above it.

Every fault names its dotted key (`evaluator[1].resource.gpu`) and the way out, and all that can be found are told
at once.
Nothing is imported, opened or started here: `app` does that with what this module returns.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import msgspec

from py_scheduler.domain.generation import SamplingParams, StoppingCriteria
from py_scheduler.domain.limits import (
    MAX_MESSAGE_BYTES,
    MAX_TASKS_PER_CALL,
    check_sampling,
    check_stopping,
    name_fault,
)
from py_scheduler.domain.resources import Resource
from py_scheduler.errors import ConfigError, FieldViolation, InvalidArgumentError
from py_scheduler.scheduler.settings import EngineSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

T = TypeVar("T")

DEFAULT_LISTEN = "127.0.0.1:50051"
UNIX_PREFIX = "unix:"
_MAX_PORT = 65_535
_HANDLER = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_LOOPBACK = re.compile(r"^(127(\.\d{1,3}){3}|localhost|\[::1\])$")

_MAX_STOP_GRACE_SECONDS = 600.0

Positive = Annotated[float, msgspec.Meta(gt=0)]


class ServerSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[server]` table.

    listen: "host:port" (port 0: any free one) or "unix:/path". insecure_remote: take a host off loopback although there
    is neither TLS nor a token, so that whoever reaches the port can use the service.
    max_message_bytes: of one message, either way. max_tasks_per_call: of one SubmitTasks.
    drain_seconds: how long running samples may go on after SIGTERM; what does not end then has stop_grace_seconds
    more, and the process ends at most 8 seconds after that.
    event_loop: "auto" takes uvloop when it is installed.
    """

    listen: str = DEFAULT_LISTEN
    insecure_remote: bool = False
    reflection: bool = True
    max_message_bytes: Annotated[int, msgspec.Meta(ge=1 << 16, le=(1 << 31) - 1)] = MAX_MESSAGE_BYTES
    max_tasks_per_call: Annotated[int, msgspec.Meta(ge=1)] = MAX_TASKS_PER_CALL
    drain_seconds: Annotated[float, msgspec.Meta(ge=0, le=3600)] = 20.0
    event_loop: Literal["auto", "asyncio", "uvloop"] = "auto"
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class ClusterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The `[cluster]` table. Without a layout batches are not gated by placement.

    layout: a path to a JSON file, JSON text, or a table of nodes. num_cpus, memory_gb: of nodes that name none.
    """

    layout: str | dict[str, Any] | None = None
    num_cpus: Annotated[float, msgspec.Meta(ge=0)] | None = None
    memory_gb: Annotated[float, msgspec.Meta(ge=0)] | None = None


class EvaluatorSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One `[[evaluator]]` table: an EvaluatorSpec whose handler is named `module:Class` and made with `handler_args`.

    eval_resource: that of run, when absent. batch_size: tasks to a batch; 0 for no limit.
    """

    evaluator_id: str
    handler: str
    handler_args: dict[str, Any] = {}
    resource: Resource
    run_resource: Resource = Resource()
    eval_resource: Resource | None = None
    batch_size: Annotated[int, msgspec.Meta(ge=0)] = 1
    default_sampling: SamplingParams = SamplingParams()
    default_stopping: StoppingCriteria = StoppingCriteria()
    run_timeout_seconds: Positive | None = None
    eval_timeout_seconds: Positive | None = None
    solve_threshold: float = 1.0


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The whole file. `generation` maps a role (student, teacher) to its table, which the engine's adapter reads."""

    server: ServerSettings = ServerSettings()
    cluster: ClusterSettings = ClusterSettings()
    scheduler: EngineSettings = EngineSettings()
    sampling: SamplingParams = SamplingParams()
    stopping: StoppingCriteria = StoppingCriteria()
    generation: dict[str, dict[str, Any]] = {}
    evaluator: tuple[EvaluatorSettings, ...] = ()


class Knob(msgspec.Struct, frozen=True):
    """A setting that a flag or a variable may change. `keys` are dotted; `[]` stands for every evaluator."""

    flag: str
    keys: tuple[str, ...]
    parse: type[str | int | float]
    metavar: str
    help: str
    choices: tuple[str, ...] = ()

    @property
    def variable(self) -> str:
        return "PY_SCHEDULER_" + self.flag.removeprefix("--").replace("-", "_").upper()


_LOG_LEVELS = ("debug", "info", "warning", "error")
KNOBS = (
    Knob(
        "--listen",
        ("server.listen",),
        str,
        "ADDRESS",
        'where to serve: "host:port" (port 0: any free one) or "unix:/path"',
    ),
    Knob(
        "--env-cluster-layout",
        ("cluster.layout",),
        str,
        "LAYOUT",
        "the cluster: inline JSON, or the path of a JSON file",
    ),
    Knob("--env-num-cpus", ("cluster.num_cpus",), float, "CORES", "cores of each node whose layout names none"),
    Knob("--env-memory-gb", ("cluster.memory_gb",), float, "GIB", "GiB of each node whose layout names none"),
    Knob("--evaluator-batch-size", ("evaluator[].batch_size",), int, "N", "tasks to a batch, 0 for no limit"),
    Knob(
        "--evaluator-concurrency",
        ("evaluator[].resource.concurrency",),
        int,
        "N",
        "samples of one batch running at once",
    ),
    Knob("--log-level", ("server.log_level",), str, "LEVEL", ", ".join(_LOG_LEVELS), _LOG_LEVELS),
)


class Override(msgspec.Struct, frozen=True):
    """A knob that was turned: `text` as it was typed, `origin` for messages ("--listen", "PY_SCHEDULER_LISTEN")."""

    knob: Knob
    text: str
    origin: str


def overrides_of(flags: Mapping[str, str | None], environment: Mapping[str, str]) -> list[Override]:
    """What was said outside of the file. A flag beats its variable."""
    overrides = []
    for knob in KNOBS:
        flag = flags.get(knob.flag)
        if flag is not None:
            overrides.append(Override(knob, flag, knob.flag))
        elif knob.variable in environment:
            overrides.append(Override(knob, environment[knob.variable], knob.variable))
    return overrides


def load_config(path: Path, overrides: Iterable[Override] = ()) -> Config:
    """Reads a file. Raises ConfigError with every fault that was found."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"cannot read the configuration {path}: {reason}") from error
    return parse_config(text, overrides, str(path))


def parse_config(text: str, overrides: Iterable[Override] = (), name: str = "the configuration") -> Config:
    """Reads the text of a file that errors call `name`. Raises ConfigError with every fault that was found."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{name} is not TOML: {error}") from error
    return convert_config(tables, overrides)


def convert_config(tables: dict[str, Any], overrides: Iterable[Override] = ()) -> Config:
    """Types and checks what a file holds. Raises ConfigError with every fault that was found."""
    faults: list[FieldViolation] = []
    for override in overrides:
        _apply(override, tables, faults)
    config = _convert_tables(tables, faults)
    if not faults:
        faults.extend(_check(config))
    if faults:
        raise ConfigError(faults)
    return config


def _apply(override: Override, tables: dict[str, Any], faults: list[FieldViolation]) -> None:
    try:
        value = override.knob.parse(override.text)
    except ValueError:
        faults.append(FieldViolation(override.origin, f"is {override.text!r}, must be a number"))
        return
    if (known := override.knob.choices) and value not in known:
        faults.append(FieldViolation(override.origin, f"is {override.text!r}, must be one of {', '.join(known)}"))
        return
    for key in override.knob.keys:
        table_key, _, rest = key.partition(".")
        if table_key.endswith("[]"):
            targets = tables.get(table_key.removesuffix("[]"), [])
        else:
            targets = [tables.setdefault(table_key, {})]
        for target in targets if isinstance(targets, list) else []:
            *inner, last = rest.split(".")
            for name in inner:
                target = target.setdefault(name, {}) if isinstance(target, dict) else {}  # noqa: PLW2901
            if isinstance(target, dict):
                target[last] = value


# Typed values out of tables


def convert_table(table: object, target: type[T], key: str) -> T:
    """A table as a Struct of type `target`. Raises ConfigError; `key` is the table's own dotted key."""
    try:
        return msgspec.convert(table, target)
    except msgspec.ValidationError as error:
        raise ConfigError([_violation(str(error), target, key)]) from error


_MESSAGE = re.compile(r"^(?P<what>.*?)(?: - at `(?P<path>(?:key )?[^`]*)`)?$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>.*)`$", re.DOTALL)
_MISSING = re.compile(r"^Object missing required field `(?P<name>.*)`$", re.DOTALL)


def _violation(message: str, target: type, key: str) -> FieldViolation:
    match = _MESSAGE.match(message)
    what, path = (match["what"], match["path"] or "$") if match else (message, "$")
    inner = path.removeprefix("$")
    where = (key + inner).removeprefix(".")
    if unknown := _UNKNOWN.match(what):
        known = _keys_at(target, inner)
        near = difflib.get_close_matches(unknown["name"], known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known here: {', '.join(known)}" if known else "remove it"
        return FieldViolation(f"{where}.{unknown['name']}".removeprefix("."), f"unknown key: {hint}")
    if missing := _MISSING.match(what):
        return FieldViolation(f"{where}.{missing['name']}".removeprefix("."), "is missing: it has no default")
    return FieldViolation(where, f"must be {what.removeprefix('Expected ')}" if what.startswith("Expected ") else what)


def _keys_at(target: Any, inner_path: str) -> list[str]:
    """The known keys of the table at a path such as `.resource`; none where any key goes."""
    for name in filter(None, inner_path.split(".")):
        fields = {field.name: field.type for field in msgspec.structs.fields(target)} if _is_struct(target) else {}
        target = next(
            (t for t in (fields.get(name), *getattr(fields.get(name), "__args__", ())) if _is_struct(t)), None
        )
    return list(target.__struct_fields__) if _is_struct(target) else []


def _is_struct(target: Any) -> bool:
    return isinstance(target, type) and issubclass(target, msgspec.Struct)


def _convert_tables(tables: dict[str, Any], faults: list[FieldViolation]) -> Config:
    """Converts table by table, so that one faulty table does not hide the faults of another."""
    parts: dict[str, Any] = {}
    types = {field.name: field.type for field in msgspec.structs.fields(Config)}
    for key, table in tables.items():
        if key not in types:
            faults.append(_violation(f"Object contains unknown field `{key}`", Config, ""))
        elif key == "evaluator":
            parts[key] = _convert_evaluators(table, faults)
        elif key == "generation" and isinstance(table, dict):
            faults.extend(_not_tables(table))
            parts[key] = table
        else:
            with collecting(faults):
                parts[key] = convert_table(table, types[key], key)
    return Config(**parts)


def _convert_evaluators(tables: Any, faults: list[FieldViolation]) -> tuple[EvaluatorSettings, ...]:
    if not isinstance(tables, list):
        faults.append(FieldViolation("evaluator", "must be a list of tables: write [[evaluator]]"))
        return ()
    evaluators = []
    for number, table in enumerate(tables):
        with collecting(faults):
            evaluators.append(convert_table(table, EvaluatorSettings, f"evaluator[{number}]"))
    return tuple(evaluators)


def _not_tables(roles: dict[str, Any]) -> Iterator[FieldViolation]:
    for role, table in roles.items():
        if not isinstance(table, dict):
            yield FieldViolation(f"generation.{role}", f"must be a table: write [generation.{role}]")


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


# What types cannot say


def _check(config: Config) -> Iterator[FieldViolation]:
    yield from _check_listen(config.server)
    yield from _check_numbers(config.scheduler, "scheduler")
    yield from _check_numbers(config.cluster, "cluster")
    yield from _check_numbers(config.server, "server")
    if config.scheduler.max_running_samples < 1:
        yield FieldViolation("scheduler.max_running_samples", "must be at least 1, or nothing would ever run")
    if _MAX_STOP_GRACE_SECONDS < config.scheduler.stop_grace_seconds < math.inf:
        yield FieldViolation("scheduler.stop_grace_seconds", f"must be at most {_MAX_STOP_GRACE_SECONDS:g}")
    yield from _prefixed("sampling", check_sampling(config.sampling))
    yield from _prefixed("stopping", check_stopping(config.stopping))
    for role in config.generation:
        if fault := name_fault(role):
            yield FieldViolation(f"generation.{role}", fault)
    if not config.evaluator:
        yield FieldViolation(
            "evaluator", "there is none: add an [[evaluator]] table with evaluator_id, handler, resource"
        )
    ids = [evaluator.evaluator_id for evaluator in config.evaluator]
    for number, evaluator in enumerate(config.evaluator):
        key = f"evaluator[{number}]"
        yield from _check_evaluator(evaluator, key)
        if evaluator.evaluator_id in ids[:number]:
            yield FieldViolation(f"{key}.evaluator_id", f"{evaluator.evaluator_id!r} is taken by another evaluator")


def _check_listen(server: ServerSettings) -> Iterator[FieldViolation]:
    listen = server.listen
    if listen.startswith(UNIX_PREFIX):
        if listen == UNIX_PREFIX:
            yield FieldViolation("server.listen", 'names no path: write "unix:/path/of/the.sock"')
        return
    host, colon, port = listen.rpartition(":")
    if not (colon and host and port.isdecimal() and int(port) <= _MAX_PORT):
        yield FieldViolation("server.listen", f'is {listen!r}, must be "host:port" or "unix:/path"')
    elif not _LOOPBACK.match(host) and not server.insecure_remote:
        yield FieldViolation(
            "server.listen",
            f"{host} is not loopback, and there is no TLS and no token yet: anybody who reaches the port could use the "
            "service. Listen on 127.0.0.1, or set server.insecure_remote = true on a network that you trust",
        )


def _check_evaluator(evaluator: EvaluatorSettings, key: str) -> Iterator[FieldViolation]:
    if fault := name_fault(evaluator.evaluator_id):
        yield FieldViolation(f"{key}.evaluator_id", fault)
    if not _HANDLER.match(evaluator.handler):
        yield FieldViolation(f"{key}.handler", f'is {evaluator.handler!r}, must be "module:Class"')
    yield from _prefixed(f"{key}.default_sampling", check_sampling(evaluator.default_sampling))
    yield from _prefixed(f"{key}.default_stopping", check_stopping(evaluator.default_stopping))
    for name in ("resource", "run_resource", "eval_resource"):
        resource = getattr(evaluator, name)
        if resource is not None:
            yield from _check_numbers(resource, f"{key}.{name}")
            if resource.concurrency < 1:
                yield FieldViolation(f"{key}.{name}.concurrency", "must be at least 1")
    for name in ("run_timeout_seconds", "eval_timeout_seconds", "solve_threshold"):
        value = getattr(evaluator, name)
        if value is not None and not math.isfinite(value):
            yield FieldViolation(f"{key}.{name}", f"is {value}, must be a finite number")


def _check_numbers(settings: msgspec.Struct, key: str) -> Iterator[FieldViolation]:
    for field in settings.__struct_fields__:
        value = getattr(settings, field)
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            yield FieldViolation(f"{key}.{field}", f"is {value}, must be a finite number and not negative")


def _prefixed(prefix: str, violations: Iterable[FieldViolation]) -> Iterator[FieldViolation]:
    for violation in violations:
        yield FieldViolation(f"{prefix}.{violation.field}", violation.description)
