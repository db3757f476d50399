"""Every part of a server from its configuration. Nothing is started here."""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.api.server import ApiServer
from py_scheduler.app.backends import build_generation, check_staleness
from py_scheduler.app.runners import NodesOfRay, build_ray, build_runners
from py_scheduler.batching import BatchingStrategy, fifo_batching
from py_scheduler.config import Config, EvaluatorSettings, collecting
from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.domain.limits import MAX_MESSAGE_BYTES
from py_scheduler.errors import (
    ClusterLayoutError,
    ConfigError,
    FailedPreconditionError,
    FieldViolation,
    UnplaceableError,
)
from py_scheduler.handlers.loading import handler_elsewhere, load_factory, load_strategy, make_handler
from py_scheduler.handlers.parts import HANDLER_PARTS
from py_scheduler.interfaces.step_service import StepService
from py_scheduler.interfaces.task_scheduler import STEP_EVENTS, TaskScheduler
from py_scheduler.placement import PlacementPool, load_cluster_layout, tokens_in_budget
from py_scheduler.rollout.files.samples import require_torch
from py_scheduler.rollout.sources.sources import open_source, open_sources
from py_scheduler.scheduler.engine import Engine
from py_scheduler.version import version

if TYPE_CHECKING:
    from py_scheduler.api.generation_http import GenerationHttp
    from py_scheduler.config import ClusterSettings
    from py_scheduler.domain.evaluator import BaseAgent
    from py_scheduler.domain.ports import Clock, GenerationBackend, Journal
    from py_scheduler.domain.resources import NodeResource
    from py_scheduler.domain.training.data import DataSource
    from py_scheduler.rollout.sources.python import Factory
    from py_scheduler.rollout.sources.settings import SourceSettings
    from py_scheduler.scheduler.settings import EngineSettings

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A whole server, built and not started. `steps` drives whole steps over the scheduler, `step_service` from afar;
    `front` lets clients of OpenAI's API into episodes.
    """

    backends: dict[str, GenerationBackend]
    scheduler: Engine
    steps: TaskScheduler
    step_service: StepService
    api: ApiServer
    config: Config = field(default_factory=Config)
    front: GenerationHttp | None = None


def build(config: Config, base_dir: Path, state_dir: Path | None = None) -> Parts:
    """Relative paths in the configuration count from `base_dir`. state_dir: where the journal lies; None: in memory.

    Raises ConfigError with every fault.
    """
    config = config.located(base_dir)
    found = _find(config, base_dir)
    _tell(found.specs, found.pool, config)
    clock = LoopClock()
    front = _build_front(config, found.backends, clock)
    scheduler = _build_scheduler(config, found, base_dir, _build_journal(config, state_dir), clock, front)
    steps = TaskScheduler(
        scheduler,
        batching_strategy=found.batching_strategy,
        # A server trains on saved samples only where its file says so.
        settings=msgspec.structs.replace(config.rollout, reuse=config.rollout.reuse.defaulting_to("never")),
        source=found.source,
        eval_sources=found.eval_sources,
        artifact_root=found.artifact_root,
    )
    step_service = StepService(steps)
    api = ApiServer(scheduler, version(), config.server, step_service)
    if api.tokens is not None:
        api.tokens.on_change.append(scheduler.limit_namespaces)
        scheduler.limit_namespaces(api.tokens.quotas)
    return Parts(
        backends=found.backends,
        scheduler=scheduler,
        steps=steps,
        step_service=step_service,
        api=api,
        config=config,
        front=front,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Found:
    """What a configuration names: all that can be missing, or be wrong in itself."""

    specs: list[EvaluatorSpec]
    backends: dict[str, GenerationBackend]
    pool: PlacementPool | None
    source: DataSource | None
    eval_sources: list[DataSource]
    artifact_root: Path
    batching_strategy: BatchingStrategy


def _find(config: Config, base_dir: Path) -> _Found:
    """Looks for everything, and raises ConfigError with every fault."""
    faults: list[FieldViolation] = []
    specs = build_specs(config, faults)
    backends = build_generation(config, base_dir, faults)
    check_staleness(config, backends, faults)
    pool = None
    with collecting(faults):
        pool = build_pool(config, base_dir)
    source, eval_sources = build_sources(config, base_dir, faults)
    artifact_root = _artifact_root(config.rollout.artifact_dir, faults)
    _check_format(config, faults)
    if config.dataset or config.eval_dataset:
        _check_retention(config.scheduler, faults)
    batching_strategy = _load_batching(config, faults)
    if faults:
        raise ConfigError(faults)
    return _Found(
        specs=specs,
        backends=backends,
        pool=pool,
        source=source,
        eval_sources=eval_sources,
        artifact_root=artifact_root,
        batching_strategy=batching_strategy,
    )


def _build_scheduler(
    config: Config, found: _Found, base_dir: Path, journal: Journal, clock: LoopClock, front: GenerationHttp | None
) -> Engine:
    settings, pool = config.scheduler, found.pool
    ray = build_ray(config)
    runners = build_runners(config, pool, ray, clock)
    if ray is not None:
        settings = msgspec.structs.replace(settings, has_fixed_nodes=False)
    scheduler = Engine(
        specs=found.specs,
        pool=pool,
        generation_backends=found.backends,
        journal=journal,
        clock=clock,
        settings=settings,
        batching_strategy=found.batching_strategy,
        default_sampling=config.sampling,
        default_stopping=config.stopping,
        api_front=front,
        runners=runners,
        namespaces=config.namespace,
    )
    if ray is not None and pool is not None:
        on_ray = [runner for runner in runners.values() if runner.kind == ray.kind]
        ray.node_changed = NodesOfRay(pool, cluster_nodes(config.cluster, base_dir) or (), on_ray, scheduler).changed
    return scheduler


def _build_journal(config: Config, state_dir: Path | None) -> Journal:
    settings = config.scheduler
    if state_dir is None:
        return MemoryJournal(retained_events=settings.retained_events, retained_bytes=settings.retained_bytes)
    from py_scheduler.app.journal import file_journal  # noqa: PLC0415 - SQLite is loaded by who uses it

    return file_journal(config, state_dir)


def _build_front(config: Config, backends: dict[str, GenerationBackend], clock: LoopClock) -> GenerationHttp | None:
    if not (config.gateway.socket or config.gateway.listen):
        return None
    from py_scheduler.api.generation_http import GenerationHttp  # noqa: PLC0415 - most servers need none

    return GenerationHttp(config.gateway, backends, clock)


def _artifact_root(artifact_dir: str, faults: list[FieldViolation]) -> Path:
    try:
        root = Path(artifact_dir).resolve()
        if root.exists() and not root.is_dir():
            faults.append(FieldViolation("rollout.artifact_dir", f"{artifact_dir!r} is no folder: name another one"))
    except (OSError, ValueError) as error:  # Links in a circle; a path with NUL.
        faults.append(FieldViolation("rollout.artifact_dir", f"{artifact_dir!r} cannot be a folder: {error}"))
        root = Path()
    return root


def _check_format(config: Config, faults: list[FieldViolation]) -> None:
    """What writes the samples has to be there before a step has run that is to be saved."""
    if config.rollout.file_format == "pt":
        try:
            require_torch()
        except FailedPreconditionError as error:
            faults.append(FieldViolation("rollout.file_format", str(error)))
    elif config.dataset and importlib.util.find_spec("pyarrow") is None:
        reason = "samples are saved as Parquet, which needs pyarrow: install the extra 'parquet' of py-scheduler"
        faults.append(FieldViolation("rollout.file_format", reason))


def _check_retention(settings: EngineSettings, faults: list[FieldViolation]) -> None:
    """Steps read the events of their samples from what is retained."""
    if settings.retained_events < STEP_EVENTS:
        reason = f"is {settings.retained_events}: steps over data sets read their events from there, keep {STEP_EVENTS}"
        faults.append(FieldViolation("scheduler.retained_events", reason))
    if settings.retained_bytes < MAX_MESSAGE_BYTES:
        reason = f"is {settings.retained_bytes}: steps over data sets need {MAX_MESSAGE_BYTES}, to read their events"
        faults.append(FieldViolation("scheduler.retained_bytes", reason))


def _tell(specs: list[EvaluatorSpec], pool: PlacementPool | None, config: Config) -> None:
    if pool is None:
        _log.info("cluster: no layout, so batches are not gated by placement")
    else:
        nodes = pool.nodes()
        _log.info("cluster: %d nodes, %d GPUs", len(nodes), sum(len(node.gpu_ids) for node in nodes))
    for spec in specs:
        _tell_spec(spec, pool)
    if not config.generation:
        _log.info("no engine: handlers that generate will fail")


def _tell_spec(spec: EvaluatorSpec, pool: PlacementPool | None) -> None:
    sample = spec.sample_resource
    try:
        at_once = tokens_in_budget(spec.resource, sample)
    except UnplaceableError:
        return  # The engine refuses the evaluator, with the reason.
    _log.info("evaluator %s: at most %d samples of a batch at once, each %s", spec.evaluator_id, at_once, sample.words)
    if pool is not None and at_once > (possible := pool.max_tokens_for(sample)) > 0:
        _log.warning(
            "evaluator %s: its budget lets %d samples of a batch run at once, the empty cluster holds %d: a batch of "
            "more samples than that is refused when it is submitted. Lower resource.concurrency, what a sample takes "
            "or batch_size, or add nodes (py-scheduler plan)",
            spec.evaluator_id,
            at_once,
            possible,
        )


def build_simulated(
    config: Config, base_dir: Path, handler: BaseAgent, clock: Clock
) -> tuple[Engine, PlacementPool | None]:
    """The scheduler of a server as it would be, and its pool, but that `handler` stands for every evaluator's own, in
    the loop, and that it has no journal on disk, no language model and no other clock than this.

    Raises ConfigError with every fault.
    """
    config = config.located(base_dir)
    faults: list[FieldViolation] = []
    pool = None
    with collecting(faults):
        pool = build_pool(config, base_dir)
    batching_strategy = _load_batching(config, faults)
    if faults:
        raise ConfigError(faults)
    engine = Engine(
        specs=[
            _build_spec(msgspec.structs.replace(evaluator, runner="inline"), handler) for evaluator in config.evaluator
        ],
        pool=pool,
        generation_backends={},
        journal=MemoryJournal(
            retained_events=config.scheduler.retained_events,
            retained_bytes=config.scheduler.retained_bytes,
            unix_time=clock.unix_time,
        ),
        clock=clock,
        settings=config.scheduler,
        batching_strategy=batching_strategy,
        namespaces=config.namespace,
    )
    return engine, pool


def _load_batching(config: Config, faults: list[FieldViolation]) -> BatchingStrategy:
    if config.scheduler.batching_strategy:
        with collecting(faults):
            return load_strategy(config.scheduler.batching_strategy, "scheduler.batching_strategy")
    return fifo_batching


def build_specs(config: Config, faults: list[FieldViolation]) -> list[EvaluatorSpec]:
    """The evaluators with their handlers; `faults` gets what is wrong with the others."""
    specs = []
    for number, evaluator in enumerate(config.evaluator):
        with collecting(faults):
            _log.info("evaluator %s: importing %s", evaluator.evaluator_id, evaluator.handler)
            specs.append(_build_spec(evaluator, _build_handler(evaluator, f"evaluator[{number}]")))
    return specs


def _build_spec(evaluator: EvaluatorSettings, handler: BaseAgent) -> EvaluatorSpec:
    eval_resource = evaluator.run_resource if evaluator.eval_resource is None else evaluator.eval_resource
    return EvaluatorSpec(
        evaluator_id=evaluator.evaluator_id,
        handler=handler,
        resource=evaluator.resource,
        run_resource=evaluator.run_resource,
        eval_resource=eval_resource,
        batch_size=evaluator.batch_size or None,
        default_stopping=evaluator.default_stopping,
        default_sampling=evaluator.default_sampling,
        run_timeout_seconds=evaluator.run_timeout_seconds,
        eval_timeout_seconds=evaluator.eval_timeout_seconds,
        solve_threshold=evaluator.solve_threshold,
        on_weight_update=evaluator.on_weight_update,
        mask_off_policy_prefix=evaluator.mask_off_policy_prefix,
        runner=evaluator.runner,
    )


def _build_handler(evaluator: EvaluatorSettings, key: str) -> BaseAgent:
    if evaluator.runner == "inline":
        return make_handler(evaluator.handler, evaluator.handler_args, key, HANDLER_PARTS)
    return handler_elsewhere(evaluator.handler, key)


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


def build_sources(
    config: Config, base_dir: Path, faults: list[FieldViolation]
) -> tuple[DataSource | None, list[DataSource]]:
    """The training data sets as one source (None without any), and each eval data set, which is read to its end."""
    source: DataSource | None = None
    eval_sources: list[DataSource] = []
    with collecting(faults):
        factories = {
            table.name: _factory_of(table, f"dataset[{number}]") for number, table in enumerate(config.dataset)
        }
        source = open_sources(config.dataset, base_dir, factories=factories) if config.dataset else None
    for number, table in enumerate(config.eval_dataset):
        with collecting(faults):
            factory = _factory_of(table, f"eval_dataset[{number}]")
            eval_sources.append(open_source(msgspec.structs.replace(table, on_end="stop"), base_dir, factory))
    return source, eval_sources


def _factory_of(table: SourceSettings, key: str) -> Factory | None:
    """Of a python data set; None for the other kinds."""
    return load_factory(table.factory, table.options, key) if table.kind == "python" else None
