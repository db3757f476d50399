"""Every part of a server from its configuration. Nothing is started here."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.adapters.loop_clock import LoopClock
from py_scheduler.adapters.memory_journal import MemoryJournal
from py_scheduler.api.server import ApiServer
from py_scheduler.app.engines import build_generation
from py_scheduler.config import Config, EvaluatorSettings, collecting, convert_table
from py_scheduler.domain.evaluator import EvaluatorSpec
from py_scheduler.errors import ClusterLayoutError, ConfigError, FieldViolation, SandboxError
from py_scheduler.handlers import make_handler
from py_scheduler.interfaces.step_desk import StepDesk
from py_scheduler.interfaces.task_scheduler import TaskScheduler
from py_scheduler.placement import PlacementPool, load_cluster_layout
from py_scheduler.rollout.sources import open_source, open_sources
from py_scheduler.scheduler.engine import Engine
from py_scheduler.version import version

if TYPE_CHECKING:
    from py_scheduler.config import ClusterSettings
    from py_scheduler.domain.data import DataSource
    from py_scheduler.domain.ports import GenerationEngine
    from py_scheduler.domain.resources import NodeResource
    from py_scheduler.domain.sandbox import Sandbox

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Parts:
    """A whole server, built and not started. `steps` drives whole steps over the scheduler, `desk` from afar."""

    engines: dict[str, GenerationEngine]
    scheduler: Engine
    steps: TaskScheduler
    desk: StepDesk
    api: ApiServer
    config: Config = field(default_factory=Config)


def build(config: Config, base_dir: Path) -> Parts:
    """Relative paths in the configuration count from `base_dir`. Raises ConfigError with every fault."""
    config = config.located(base_dir)
    faults: list[FieldViolation] = []
    specs = build_specs(config, faults)
    engines = build_generation(config, base_dir, faults)
    pool = None
    with collecting(faults):
        pool = build_pool(config, base_dir)
    source, eval_sources = build_sources(config, base_dir, faults)
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
    steps = TaskScheduler(
        scheduler,
        settings=config.rollout,
        source=source,
        eval_sources=eval_sources,
        artifact_root=Path(config.rollout.artifact_dir),
    )
    desk = StepDesk(steps)
    api = ApiServer(scheduler, version(), config.server, desk)
    return Parts(engines=engines, scheduler=scheduler, steps=steps, desk=desk, api=api, config=config)


def _tell(specs: list[EvaluatorSpec], pool: PlacementPool | None, config: Config) -> None:
    if pool is None:
        _log.info("cluster: no layout, so batches are not gated by placement")
    else:
        nodes = pool.nodes()
        _log.info("cluster: %d nodes, %d GPUs", len(nodes), sum(len(node.gpu_ids) for node in nodes))
    for spec in specs:
        sample = spec.sample_resource
        _log.info(
            "evaluator %s: %d samples of a batch at once, each %s",
            spec.evaluator_id,
            spec.resource.concurrency,
            sample.words,
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
        handler=make_handler(evaluator.handler, evaluator.handler_args, key, {"sandbox": make_sandbox}),
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


def make_sandbox(table: object, key: str) -> Sandbox:
    """For handlers that ask for a `sandbox`. Raises ConfigError, also when it cannot be had on this machine."""
    from py_scheduler.adapters.sandbox import ProcessSandbox, SandboxSettings  # noqa: PLC0415 - most servers need none

    sandbox = ProcessSandbox(convert_table({} if table is None else table, SandboxSettings, key))
    try:
        sandbox.probe()
    except SandboxError as error:
        raise ConfigError(str(error), key) from error
    return sandbox


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
        source = open_sources(config.dataset, base_dir) if config.dataset else None
    for table in config.eval_dataset:
        with collecting(faults):
            eval_sources.append(open_source(msgspec.structs.replace(table, on_end="stop"), base_dir))
    return source, eval_sources
