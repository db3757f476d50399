"""One run of the engine in virtual time, from a server's configuration and a workload."""

from __future__ import annotations

import logging
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from py_scheduler.app import build_simulated, cluster_nodes
from py_scheduler.domain.task import RetryPolicy
from py_scheduler.errors import FailedPreconditionError, FieldViolation, InvalidArgumentError
from py_scheduler.simulation.figures import SimulationFigures, bounds_of, supply_of, tail_seconds, utilisation_of
from py_scheduler.simulation.handler import SimulatedAgent
from py_scheduler.simulation.spans import Spans
from py_scheduler.simulation.trainer import Trainer
from py_scheduler.simulation.virtual_time import run_in_virtual_time
from py_scheduler.simulation.workload import DrawnWorkload, SimulatedStep

if TYPE_CHECKING:
    from py_scheduler.config import Config
    from py_scheduler.placement import PlacementPool
    from py_scheduler.scheduler.engine import Engine
    from py_scheduler.simulation.virtual_time import VirtualClock
    from py_scheduler.simulation.workload import SimulatedTask


class LostNode(msgspec.Struct, frozen=True):
    """A node that goes at a moment, with all that runs on it, and does not come back."""

    node_ip: str
    at_seconds: float
    """From the beginning, at least 0."""


class SimulationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What surrounds the scheduler in a simulation."""

    ahead: int | None = 0
    """How many steps may be submitted beyond the oldest that is not done; None: a step waits for no other."""
    infra_rate: float = 0.0
    """The probability that the infrastructure fails an attempt."""
    lost_nodes: tuple[LostNode, ...] = ()
    """Nodes that go, each with all that runs on it."""
    retry: RetryPolicy = RetryPolicy(max_infra_refills=2)
    """Of every task."""


class SimulationRun(msgspec.Struct, frozen=True):
    """What came of it: the figures, and when and where each sample ran."""

    figures: SimulationFigures
    spans: Spans


def simulate(
    config: Config,
    workload: DrawnWorkload | Sequence[SimulatedStep],
    settings: SimulationSettings = SimulationSettings(),
    *,
    seed: int = 0,
    base_dir: Path = Path(),
) -> SimulationRun:
    """Runs the scheduler of that server under the workload, in virtual time. Not to be called from a running loop.

    Only the clock and what handlers and language models do are simulated: the queue, the ledger and the placement are
    those of a server. The same arguments give the same run. base_dir: paths in the configuration count from it.

    Raises ConfigError, InvalidArgumentError, UnplaceableError; FailedPreconditionError when work is left that nothing
    can bring to its end, or that was given up because no node is left that could hold it.
    """
    _check(config, settings)
    return _Simulation(config, workload, settings, seed, base_dir).run()


def _check(config: Config, settings: SimulationSettings) -> None:
    faults = []
    if not 0.0 <= settings.infra_rate < 1.0:
        faults.append(FieldViolation("infra_rate", f"is {settings.infra_rate:g}, must be at least 0 and below 1"))
    if settings.ahead is not None and settings.ahead < 0:
        faults.append(FieldViolation("ahead", f"is {settings.ahead}, must be at least 0"))
    for number, lost in enumerate(cast("tuple[object, ...]", settings.lost_nodes)):
        key = f"lost_nodes[{number}]"
        if not isinstance(lost, LostNode):
            faults.append(FieldViolation(key, f"is {lost!r}, must be a LostNode(node_ip, at_seconds)"))
        elif not (math.isfinite(lost.at_seconds) and lost.at_seconds >= 0):
            faults.append(FieldViolation(key, f"at_seconds is {lost.at_seconds:g}, must be a number from 0 on"))
    if faults:
        raise InvalidArgumentError(faults)
    if config.scheduler.staleness:
        raise FailedPreconditionError(
            "a simulated trainer updates no weights, so [scheduler.staleness] would hold its samples back for ever: "
            "leave the table out and say how many steps ahead it may submit"
        )


class _Simulation:
    def __init__(
        self,
        config: Config,
        workload: DrawnWorkload | Sequence[SimulatedStep],
        settings: SimulationSettings,
        seed: int,
        base_dir: Path,
    ) -> None:
        self._config = config
        self._steps = workload.draw(seed) if isinstance(workload, DrawnWorkload) else workload
        self._settings = settings
        self._seed = seed
        self._base_dir = base_dir
        self._tasks: dict[str, SimulatedTask] = {}
        self._agent = SimulatedAgent(self._tasks, infra_rate=settings.infra_rate, seed=seed)
        self._trainer: Trainer | None = None

    def run(self) -> SimulationRun:
        # The engine draws the waits between attempts from the module's generator, which is everybody's.
        before = random.getstate()
        random.seed(self._seed)
        log = logging.getLogger("py_scheduler")
        level = log.level
        log.setLevel(logging.ERROR)  # What fails in a simulation was asked to.
        try:
            return run_in_virtual_time(self._main, self._why_idle)
        finally:
            log.setLevel(level)
            random.setstate(before)

    async def _main(self, clock: VirtualClock) -> SimulationRun:
        engine, pool = build_simulated(self._config, self._base_dir, self._agent, clock)
        nodes = cluster_nodes(self._config.cluster, self._base_dir) or []
        specs = engine.specs
        slots = (
            {} if pool is None else {name: pool.max_tokens_for(spec.sample_resource) for name, spec in specs.items()}
        )
        supply = supply_of(nodes, specs.values(), slots, engine.settings.max_running_samples)
        async with engine:
            self._arm_losses(clock, engine, pool)
            trainer = self._trainer = Trainer(
                engine, clock, self._tasks, ahead=self._settings.ahead, retry=self._settings.retry
            )
            await trainer.run(self._steps)
        if trainer.given_up:
            raise FailedPreconditionError(
                f"{trainer.given_up:,} of {trainer.planned_samples:,} samples were given up: {trainer.why_given_up}"
            )
        spans, makespan = trainer.spans, trainer.last_end
        bound, step_bound = bounds_of(spans, specs, supply)
        waits = np.asarray(spans.wait_seconds) if len(spans) else np.zeros(1)
        figures = SimulationFigures(
            makespan_seconds=makespan,
            bound_seconds=bound.seconds,
            bound_by=bound.by,
            bound_share=bound.seconds / makespan if makespan else 1.0,
            step_bound_seconds=step_bound,
            utilisation=utilisation_of(spans, specs, supply, makespan),
            wait_p50_seconds=float(np.quantile(waits, 0.5)),
            wait_p95_seconds=float(np.quantile(waits, 0.95)),
            tail_share=tail_seconds(spans) / makespan if makespan else 0.0,
            steps=trainer.steps,
            steps_per_hour=3600.0 * trainer.steps / makespan if makespan else 0.0,
            tasks=trainer.submitted_tasks,
            samples=trainer.planned_samples,
            outcomes=dict(sorted(trainer.outcomes.items())),
            task_states=dict(sorted(trainer.states.items())),
            failed_attempts=trainer.failed_attempts,
            failed_seconds=trainer.failed_seconds,
        )
        return SimulationRun(figures, spans)

    def _why_idle(self) -> Exception:
        if self._trainer is None:
            return FailedPreconditionError("the simulation stopped before its first step")
        return self._trainer.why_idle()

    def _arm_losses(self, clock: VirtualClock, engine: Engine, pool: PlacementPool | None) -> None:
        known = set() if pool is None else {node.node_ip for node in pool.nodes()}
        for lost in self._settings.lost_nodes:
            if pool is None or lost.node_ip not in known:
                names = ", ".join(sorted(known)) or "none"
                raise InvalidArgumentError(f"there is no node {lost.node_ip!r}: the layout has {names}", "lost_nodes")
            clock.call_at(lost.at_seconds, _Loss(lost.node_ip, engine, pool, self._agent))


class _Loss:
    """What happens when a node goes."""

    def __init__(self, node_ip: str, engine: Engine, pool: PlacementPool, agent: SimulatedAgent) -> None:
        self._node_ip = node_ip
        self._engine = engine
        self._pool = pool
        self._agent = agent

    def __call__(self) -> None:
        self._pool.remove_node(self._node_ip)
        self._agent.lose_node(self._node_ip)
        self._engine.nodes_have_changed()
