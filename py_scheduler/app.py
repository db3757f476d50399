"""The composition root of the server: builds every part from a Config, runs it, and takes it down again.

    configuration -> specs, pool, engines, scheduler, API -> bind -> start engines -> serve
    SIGTERM -> NOT_SERVING -> no new tasks -> running samples finish (drain_seconds) -> streams end with a cursor

Invariants: nothing is started before everything was built and the port was bound, so most faults of a configuration
show within a second; after the signal the process ends within `stop_limit_seconds`, whatever a handler does.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import json
import logging
import os
import signal
import sys
import threading
import time
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.api.server import ApiServer
from py_scheduler.config import Config, EvaluatorSettings, collecting, convert_table
from py_scheduler.containment import contained_task
from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.errors import ClusterLayoutError, ConfigError, EngineUnavailableError, FieldViolation
from py_scheduler.handlers import make_handler
from py_scheduler.placement import PlacementPool, load_cluster_layout
from py_scheduler.scheduler.engine import Engine
from py_scheduler.version import version

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType

    from py_scheduler.config import ClusterSettings
    from py_scheduler.domain.ports import GenerationEngine
    from py_scheduler.domain.resources import NodeResource

_log = logging.getLogger(__name__)

_EXIT_SECONDS = 8.0
"""What the end takes beside drain and grace, at most: streams that are cut off, the journal, the engines' processes."""


# Building


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A whole server, built and not started."""

    engines: dict[str, GenerationEngine]
    scheduler: Engine
    api: ApiServer
    config: Config = field(default_factory=Config)


def build(config: Config, base_dir: Path) -> Parts:
    """Relative paths in the configuration count from `base_dir`. Raises ConfigError with every fault."""
    faults: list[FieldViolation] = []
    specs = build_specs(config, faults)
    engines = build_generation(config, base_dir, faults)
    pool = None
    with collecting(faults):
        pool = build_pool(config, base_dir)
    if faults:
        raise ConfigError(faults)
    _tell(specs, pool, config)
    settings = config.scheduler
    scheduler = Engine(
        specs=specs,
        pool=pool,
        generation_engines=engines,
        journal=MemoryJournal(retained_events=settings.retained_events, retained_bytes=settings.retained_bytes),
        clock=LoopClock(),
        settings=settings,
        default_sampling=config.sampling,
        default_stopping=config.stopping,
    )
    api = ApiServer(scheduler, version(), config.server)
    return Parts(engines=engines, scheduler=scheduler, api=api, config=config)


def _tell(specs: list[EvaluatorSpec], pool: PlacementPool | None, config: Config) -> None:
    if pool is None:
        _log.info("cluster: no layout, so batches are not gated by placement")
    else:
        nodes = pool.nodes()
        _log.info("cluster: %d nodes, %d GPUs", len(nodes), sum(len(node.gpu_ids) for node in nodes))
    for spec in specs:
        sample = spec.sample_resource
        _log.info(
            "evaluator %s: %d samples of a batch at once, each gpu %g, cpu %g, memory_gb %g",
            spec.evaluator_id,
            spec.resource.concurrency,
            sample.gpu,
            sample.cpu,
            sample.memory_gb,
        )
    if not config.generation:
        _log.info("no engine: handlers that generate will fail")


def build_specs(config: Config, faults: list[FieldViolation]) -> list[EvaluatorSpec]:
    """The evaluators with their handlers; `faults` gets what is wrong with the others."""
    specs = []
    for number, evaluator in enumerate(config.evaluator):
        with collecting(faults):
            _log.info("evaluator %s: importing %s", evaluator.evaluator_id, evaluator.handler)
            specs.append(_build_spec(evaluator, f"evaluator[{number}]"))
    return specs


def _build_spec(evaluator: EvaluatorSettings, key: str) -> EvaluatorSpec:
    eval_resource = evaluator.run_resource if evaluator.eval_resource is None else evaluator.eval_resource
    return EvaluatorSpec(
        evaluator_id=evaluator.evaluator_id,
        handler=make_handler(evaluator.handler, evaluator.handler_args, key),
        resource=evaluator.resource,
        run_resource=evaluator.run_resource,
        eval_resource=eval_resource,
        batch_size=evaluator.batch_size or None,
        default_stopping=evaluator.default_stopping,
        default_sampling=evaluator.default_sampling,
        run_timeout_seconds=evaluator.run_timeout_seconds,
        eval_timeout_seconds=evaluator.eval_timeout_seconds,
        solve_threshold=evaluator.solve_threshold,
    )


def build_pool(config: Config, base_dir: Path) -> PlacementPool | None:
    """The pool of the cluster layout; None without one. Raises ConfigError."""
    nodes = cluster_nodes(config.cluster, base_dir)
    return None if nodes is None else PlacementPool(nodes)


def cluster_nodes(cluster: ClusterSettings, base_dir: Path) -> list[NodeResource] | None:
    """The nodes of the cluster layout; None without one. Raises ConfigError."""
    if isinstance(cluster.layout, dict):
        layout = json.dumps(cluster.layout)
    elif cluster.layout is None or cluster.layout.lstrip().startswith("{"):
        layout = cluster.layout or ""
    else:
        layout = str(base_dir / cluster.layout)
    try:
        return load_cluster_layout(layout or None, cluster.num_cpus, cluster.memory_gb)
    except ClusterLayoutError as error:
        faults = [
            FieldViolation("cluster.layout" + (f".{fault.field}" if fault.field else ""), fault.description)
            for fault in error.violations
        ]
        raise ConfigError(faults) from error


def build_generation(config: Config, base_dir: Path, faults: list[FieldViolation]) -> dict[str, GenerationEngine]:
    """One engine for each role; `faults` gets what is wrong with the others."""
    engines = {}
    for role, table in config.generation.items():
        with collecting(faults):
            engines[role] = _build_engine(table, f"generation.{role}", base_dir)
    return engines


def _build_engine(table: dict[str, Any], key: str, base_dir: Path) -> GenerationEngine:
    """The adapter is imported only when it is asked for: each has optional dependencies of its own."""
    rest = dict(table)
    kind = rest.pop("kind", None)
    if kind == "sglang":
        from py_scheduler.adapters.sglang import SglangEngine, SglangSettings  # noqa: PLC0415

        base_url = _text(rest, "base_url", f"{key}.base_url", 'such as "http://127.0.0.1:30000"')
        return SglangEngine(base_url, settings=convert_table(rest, SglangSettings, key))
    if kind == "embedded":
        from py_scheduler.adapters.llama_cpp import LlamaCppEngine, LlamaCppSettings  # noqa: PLC0415

        gguf_path = _gguf_path(rest.pop("gguf_path", ""), f"{key}.gguf_path", base_dir)
        return LlamaCppEngine(gguf_path, settings=convert_table(rest, LlamaCppSettings, key))
    raise ConfigError(f'is {kind!r}, must be "embedded" or "sglang"', f"{key}.kind")


def _gguf_path(value: object, key: str, base_dir: Path) -> Path:
    """The model file that is named, or else the one that `fetch-model` left in the cache."""
    if not isinstance(value, str):
        raise ConfigError("must be the path of a GGUF file", key)
    if value:
        path = base_dir / Path(value).expanduser()
        if not path.is_file():
            raise ConfigError(f"there is no file {path}: correct the path", key)
        return path
    from py_scheduler.adapters.model_store import SMOLLM2, default_cache_dir  # noqa: PLC0415

    path = default_cache_dir() / Path(SMOLLM2.file).name
    if not path.is_file():
        raise ConfigError(f"is absent, and {path} is not there: run `py-scheduler fetch-model`, or name a file", key)
    return path


def _text(table: dict[str, Any], name: str, key: str, example: str) -> str:
    value = table.pop(name, None)
    if not isinstance(value, str) or not value:
        raise ConfigError(f"is missing or no text: {example}", key)
    return value


# Running


async def serve(config: Config, base_dir: Path, announce: Callable[[str], None], stop: asyncio.Event) -> int:
    """Serves until `stop` is set, then stops gracefully; returns how many handlers would not end.

    `announce` gets the address once calls are answered. Raises ConfigError, EngineUnavailableError.
    """
    parts = build(config, base_dir)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(parts.api.stop)
        address = parts.api.bind()
        if not await _start_engines(parts, stack, stop):
            return 0
        await stack.enter_async_context(parts.scheduler)
        # Before the scheduler's own end: streams must not outlive it.
        stack.push_async_callback(parts.api.stop)
        await parts.api.start()
        announce(address)
        await stop.wait()
        _log.info("stopping: no new tasks; running samples have %g seconds", config.server.drain_seconds)
        parts.api.stop_serving()
        await parts.scheduler.drain(config.server.drain_seconds)
    return parts.scheduler.stranded_workers


async def _start_engines(parts: Parts, stack: AsyncExitStack, stop: asyncio.Event) -> bool:
    """Starts all at once; False when the server is told to stop meanwhile. Whatever happens, they get closed, and none
    of them while it still starts.
    """
    for engine in parts.engines.values():
        stack.push_async_callback(engine.close)
    try:
        async with asyncio.TaskGroup() as tasks:
            starting = [tasks.create_task(_start_engine(parts, role)) for role in parts.engines]
            stopping = tasks.create_task(_cancel_upon(stop, starting))
            if starting:
                await asyncio.wait(starting)
            stopping.cancel()
    except BaseExceptionGroup as group:
        raise _first_of(group) from None
    return not any(task.cancelled() for task in starting)


async def _start_engine(parts: Parts, role: str) -> None:
    engine, table = parts.engines[role], parts.config.generation.get(role, {})
    kind = table.get("kind", type(engine).__name__)
    _log.info("engine %s: %s is loading", role, kind)
    begun = time.monotonic()
    try:
        await engine.start()
    except EngineUnavailableError as error:
        key = "base_url" if "base_url" in table else "kind"
        raise EngineUnavailableError(f"generation.{role}.{key}: the engine does not start: {error}") from error
    _log.info("engine %s: %s is ready after %.1f s", role, kind, time.monotonic() - begun)


async def _cancel_upon(stop: asyncio.Event, tasks: list[asyncio.Task[None]]) -> None:
    await stop.wait()
    for task in tasks:
        task.cancel()


def _first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    first = group.exceptions[0]
    return _first_of(first) if isinstance(first, BaseExceptionGroup) else first


def stop_limit_seconds(config: Config) -> float:
    """From the signal to the end of the process, at most: beyond it something is stuck, such as the loop itself."""
    return config.server.drain_seconds + config.scheduler.stop_grace_seconds + _EXIT_SECONDS


@contextmanager
def stop_signals(stop: asyncio.Event, exit_seconds: float) -> Iterator[None]:
    """SIGTERM and SIGINT set `stop`; a second one, or `exit_seconds` without an end, ends the process at once."""
    loop = asyncio.get_running_loop()
    watchdogs: list[threading.Timer] = []

    def on_signal(number: int, _frame: FrameType | None) -> None:
        if watchdogs:
            os._exit(128 + number)
        # A thread, because what keeps the process from ending may well be a handler that blocks the loop.
        watchdog = threading.Timer(exit_seconds, _end_hard, (exit_seconds,))
        watchdog.daemon = True
        watchdogs.append(watchdog)
        watchdog.start()
        loop.call_soon_threadsafe(stop.set)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for watchdog in watchdogs:
            watchdog.cancel()


def _end_hard(seconds: float) -> None:
    sys.stderr.write(f"py-scheduler: still not stopped after {seconds:g} seconds; ending\n")
    sys.stderr.flush()
    os._exit(1)


def run(config: Config, config_file: Path) -> None:
    """`py-scheduler serve`: serves until a signal comes. Raises what `serve` raises."""
    base_dir = config_file.resolve().parent
    # Handlers may lie beside the configuration that names them; last, so that nothing there hides an installed module.
    sys.path.append(str(base_dir))
    logging.basicConfig(level=config.server.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")

    _log.info("py-scheduler %s, configuration %s", version(), config_file)

    def announce(address: str) -> None:
        sys.stdout.write(f"listening on {address}\n")
        sys.stdout.flush()

    _tune_collector()

    async def main() -> int:
        asyncio.get_running_loop().set_task_factory(contained_task)
        stop = asyncio.Event()
        with stop_signals(stop, stop_limit_seconds(config)):
            return await serve(config, base_dir, announce, stop)

    with asyncio.Runner(loop_factory=_loop_factory(config)) as runner:
        stranded = runner.run(main())
        if stranded:
            # The runner would wait for them; nothing but the end of the process stops them.
            _log.warning("%d handlers did not end: ending without them", stranded)
            logging.shutdown()
            os._exit(0)


def _tune_collector() -> None:
    """Hundreds of thousands of waiting tasks are no garbage, and hold no cycles: look for those less often.

    At the default thresholds the collector took a third of the processor time of a full queue.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


def _loop_factory(config: Config) -> Callable[[], asyncio.AbstractEventLoop] | None:
    if config.server.event_loop == "asyncio":
        return None
    try:
        uvloop = importlib.import_module("uvloop")
    except ImportError as error:
        if config.server.event_loop == "uvloop":
            reason = 'uvloop is not installed: install py-scheduler[uvloop], or say "auto"'
            raise ConfigError(reason, "server.event_loop") from error
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory
