"""What types cannot say: ranges of finite numbers, names, addresses, ids that are taken."""

from __future__ import annotations

import difflib
import math
import re
from typing import TYPE_CHECKING

from py_scheduler.config.tables import UNIX_PREFIX
from py_scheduler.domain.limits import check_sampling, check_stopping, name_fault
from py_scheduler.domain.resources import check_extras
from py_scheduler.domain.runners.runner import check_runner_settings
from py_scheduler.errors import FieldViolation, InvalidArgumentError
from py_scheduler.rollout.reuse import check_reuse
from py_scheduler.rollout.sources.sources import check_source

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import msgspec

    from py_scheduler.config.tables import Config, EvaluatorSettings, GatewaySettings, ServerSettings, TlsSettings
    from py_scheduler.domain.runners.runner import RaySettings
    from py_scheduler.rollout.settings import RolloutSettings
    from py_scheduler.rollout.sources.settings import SourceSettings

_MAX_PORT = 65_535
_HANDLER = re.compile(r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")
_LOOPBACK = re.compile(r"^(127(\.\d{1,3}){3}|localhost|\[::1\])$")
_MAX_STOP_GRACE_SECONDS = 600.0


def check(config: Config) -> Iterator[FieldViolation]:
    """Everything that is wrong with a configuration whose types are right."""
    yield from _check_listen(config.server)
    yield from _check_gateway(config.gateway)
    yield from _check_ray(config.ray)
    yield from _check_tls(config.server.tls, "server.tls")
    yield from _check_tls(config.gateway.tls, "gateway.tls")
    yield from _check_namespaces(config)
    yield from _check_numbers(config.scheduler, "scheduler")
    yield from _check_numbers(config.journal, "journal")
    yield from _check_numbers(config.cluster, "cluster")
    yield from _check_numbers(config.server, "server")
    yield from _check_scheduler(config)
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
    yield from _check_rollout(config.rollout)
    for key in ("dataset", "eval_dataset"):
        yield from _check_sources(getattr(config, key), key, ids)


def _check_scheduler(config: Config) -> Iterator[FieldViolation]:
    if config.scheduler.max_running_samples < 1:
        yield FieldViolation("scheduler.max_running_samples", "must be at least 1, or nothing would ever run")
    for role, limit in config.scheduler.max_running_generations.items():
        key = f"scheduler.max_running_generations.{role}"
        if role not in config.generation:
            known = ", ".join(config.generation) or "none"
            yield FieldViolation(key, f"there is no such role (configured: {known}): add [generation.{role}]")
        if limit < 1:
            yield FieldViolation(key, "must be at least 1, or nothing would ever be generated")
    for namespace in config.scheduler.staleness:
        if fault := name_fault(namespace):
            yield FieldViolation(f"scheduler.staleness.{namespace}", fault)
    if _MAX_STOP_GRACE_SECONDS < config.scheduler.stop_grace_seconds < math.inf:
        yield FieldViolation("scheduler.stop_grace_seconds", f"must be at most {_MAX_STOP_GRACE_SECONDS:g}")
    strategy = config.scheduler.batching_strategy
    if strategy and not _HANDLER.match(strategy):
        yield FieldViolation("scheduler.batching_strategy", f'is {strategy!r}, must be "module:function"')


def _check_listen(server: ServerSettings) -> Iterator[FieldViolation]:
    listen = server.listen
    if listen.startswith(UNIX_PREFIX):
        if listen == UNIX_PREFIX:
            yield FieldViolation("server.listen", 'names no path: write "unix:/path/of/the.sock"')
        return
    host = _host_of(listen)
    if host is None:
        yield FieldViolation("server.listen", f'is {listen!r}, must be "host:port" or "unix:/path"')
    elif not _LOOPBACK.match(host) and not server.insecure_remote and not (server.tls.is_on and server.tokens_file):
        yield FieldViolation(
            "server.listen",
            f"{host} is not loopback, and {_missing(server)}: anybody who reaches the port could use the service, or "
            "listen in. Set server.tls.certificate, server.tls.key and server.tokens_file (`py-scheduler token new` "
            "makes its lines), listen on 127.0.0.1, or set server.insecure_remote = true on a network that you trust",
        )


def _missing(server: ServerSettings) -> str:
    if server.tls.is_on:
        return "there are no tokens"
    return "there is no TLS" if server.tokens_file else "there is no TLS and there are no tokens"


def _check_tls(tls: TlsSettings, key: str) -> Iterator[FieldViolation]:
    if bool(tls.certificate) != bool(tls.key):
        yield FieldViolation(f"{key}.{'key' if tls.certificate else 'certificate'}", "is missing: TLS needs both files")
    elif tls.client_ca and not tls.certificate:
        yield FieldViolation(f"{key}.certificate", "is missing: client_ca is asked for in TLS alone")


def _check_namespaces(config: Config) -> Iterator[FieldViolation]:
    for namespace, settings in config.namespace.items():
        if fault := name_fault(namespace):
            yield FieldViolation(f"namespace.{namespace}", fault)
        if namespace == "*":
            yield FieldViolation("namespace.*", "would be one of that name alone: write a table for each namespace")
        yield from _check_numbers(settings, f"namespace.{namespace}")


def _check_gateway(gateway: GatewaySettings) -> Iterator[FieldViolation]:
    listen = gateway.listen
    host = _host_of(listen)
    if listen.startswith(UNIX_PREFIX):
        yield FieldViolation("gateway.listen", 'must be "host:port": the path of a unix socket goes to gateway.socket')
    elif listen and host is None:
        yield FieldViolation("gateway.listen", f'is {listen!r}, must be "host:port"')
    elif host is not None and not _LOOPBACK.match(host) and not gateway.insecure_remote and not gateway.tls.is_on:
        yield FieldViolation(
            "gateway.listen",
            f"{host} is not loopback, and there is no TLS: keys and conversations could be read on the way. Set "
            "gateway.tls.certificate and gateway.tls.key, listen on 127.0.0.1, or set gateway.insecure_remote = true "
            "on a network that you trust",
        )


def _check_ray(ray: RaySettings) -> Iterator[FieldViolation]:
    host = _host_of(ray.listen)
    if host is None:
        yield FieldViolation("ray.listen", f'is {ray.listen!r}, must be "host:port"')
    elif not _LOOPBACK.match(host) and not ray.insecure_remote:
        yield FieldViolation(
            "ray.listen",
            f"{host} is not loopback, and what runners and server say there is not encrypted. Listen on 127.0.0.1, or "
            "set ray.insecure_remote = true on a network that you trust",
        )


def is_local(listen: str) -> bool:
    """Whether only this machine reaches what listens there."""
    host = _host_of(listen)
    return listen.startswith(UNIX_PREFIX) or (host is not None and bool(_LOOPBACK.match(host)))


def _host_of(listen: str) -> str | None:
    """Of "host:port"; None when it is no such thing."""
    host, colon, port = listen.rpartition(":")
    return host if colon and host and port.isdecimal() and int(port) <= _MAX_PORT else None


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
            yield from _prefixed(f"{key}.{name}", check_extras(resource, is_budget=name == "resource"))
            if name != "resource" and 1 < resource.gpu < math.inf and not resource.gpu.is_integer():
                rule = "below 1 (a share of one GPU) or a whole number of GPUs"
                yield FieldViolation(f"{key}.{name}.gpu", f"is {resource.gpu:g}, must be {rule}")
            if resource.concurrency < 1:
                yield FieldViolation(f"{key}.{name}.concurrency", "must be at least 1")
    if evaluator.eval_resource is not None:
        try:
            evaluator.run_resource.field_max(evaluator.eval_resource)
        except InvalidArgumentError as error:
            yield from _prefixed(f"{key}.eval_resource", error.violations)
    yield from _prefixed(f"{key}.runner_settings", check_runner_settings(evaluator.runner_settings))
    for name in ("run_timeout_seconds", "eval_timeout_seconds", "solve_threshold"):
        value = getattr(evaluator, name)
        if value is not None and not math.isfinite(value):
            yield FieldViolation(f"{key}.{name}", f"is {value}, must be a finite number")


def _check_rollout(rollout: RolloutSettings) -> Iterator[FieldViolation]:
    if not rollout.artifact_dir:
        yield FieldViolation("rollout.artifact_dir", "must not be empty: name a folder")
    yield from check_reuse(rollout.reuse)


def _check_sources(sources: Sequence[SourceSettings], table: str, ids: Sequence[str]) -> Iterator[FieldViolation]:
    names = [source.name for source in sources]
    for number, source in enumerate(sources):
        key = f"{table}[{number}]"
        yield from _prefixed(key, check_source(source))
        if source.kind == "python" and source.factory and not _HANDLER.match(source.factory):
            yield FieldViolation(f"{key}.factory", f'is {source.factory!r}, must be "module:function"')
        if source.name in names[:number]:
            yield FieldViolation(f"{key}.name", f"{source.name!r} is taken by another {table}")
        if ids and source.task_type not in ids:
            near = difflib.get_close_matches(source.task_type, ids, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(ids)}"
            yield FieldViolation(f"{key}.task_type", f"no evaluator is called {source.task_type!r}: {hint}")


def _check_numbers(settings: msgspec.Struct, key: str) -> Iterator[FieldViolation]:
    for field in settings.__struct_fields__:
        value = getattr(settings, field)
        if isinstance(value, int | float) and not (math.isfinite(value) and value >= 0):
            yield FieldViolation(f"{key}.{field}", f"is {value}, must be a finite number and not negative")


def _prefixed(prefix: str, violations: Iterable[FieldViolation]) -> Iterator[FieldViolation]:
    for violation in violations:
        yield FieldViolation(f"{prefix}.{violation.field}", violation.description)
