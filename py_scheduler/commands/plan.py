"""`py-scheduler plan`: what a cluster can hold of each evaluator, before there is a server.

Needs no handler and no engine: an evaluator table may leave `handler` out, and nothing is imported.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.app import cluster_nodes
from py_scheduler.commands.common import positive, read_specs, standard_console
from py_scheduler.commands.views.plan import PlanView, show_plan
from py_scheduler.errors import ConfigError, FieldViolation, InvalidArgumentError
from py_scheduler.knobs import overrides_of
from py_scheduler.placement import load_cluster_layout
from py_scheduler.planning import BatchNeed, plan_spec, sample_packing

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from py_scheduler.config import Config, EvaluatorSettings
    from py_scheduler.domain.resources import NodeResource


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. layout: inline JSON or a path; None: the one in the file.

    num_cpus (cores), memory_gb (GiB): of nodes that name none. samples_per_task: repeat_times of the largest task, so
    that a batch holds batch_size times as many samples; None: as many as its budget allows. draw: the evaluator whose
    packing is drawn; None: the first that fits.
    """

    specs: Path
    layout: str | None = None
    num_cpus: float | None = None
    memory_gb: float | None = None
    samples_per_task: int | None = None
    draw: str | None = None


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description} Exit code 1: the largest batch of some evaluator can never run; says what would help."
    )
    parser.add_argument(
        "layout", nargs="?", metavar="LAYOUT", help="the cluster: inline JSON or a JSON file; none: the one in SPECS"
    )
    parser.add_argument(
        "specs", type=Path, metavar="SPECS", help="a server's configuration, or any TOML or JSON file with evaluators"
    )
    # The longer names are those of `serve`, which the layout's own messages name.
    parser.add_argument(
        "--num-cpus", "--env-num-cpus", type=float, metavar="CORES", help="cores of each node whose layout names none"
    )
    parser.add_argument(
        "--memory-gb", "--env-memory-gb", type=float, metavar="GIB", help="GiB of each node whose layout names none"
    )
    parser.add_argument(
        "--samples-per-task", type=positive, metavar="N", help="bounds a batch by batch_size times this"
    )
    parser.add_argument("--draw", metavar="EVALUATOR_ID", help="whose packing to draw (default: the first that fits)")


def run(options: argparse.Namespace) -> int:
    request = PlanRequest(
        specs=options.specs,
        layout=options.layout,
        num_cpus=options.num_cpus,
        memory_gb=options.memory_gb,
        samples_per_task=options.samples_per_task,
        draw=options.draw,
    )
    return run_plan(request, standard_console())


def run_plan(request: PlanRequest, console: Console) -> int:
    """Prints the plan; 0, or 1 when an evaluator's largest batch can never run. Raises InvalidArgumentError."""
    config = read_specs(request.specs, overrides_of({}, os.environ))
    nodes = _nodes(request, config)
    needs = [_need(evaluator, request.samples_per_task) for evaluator in config.evaluator]
    limit = config.scheduler.max_running_samples
    plans = [plan_spec(nodes, need, limit) for need in needs]
    fitting = [need for need, plan in zip(needs, plans, strict=True) if not plan.problem]
    drawn = _drawn(request.draw, needs, fitting)
    packing = sample_packing(nodes, drawn, limit) if drawn in fitting else None
    show_plan(PlanView(nodes=nodes, plans=plans, drawn=drawn, packing=packing), console)
    return int(len(fitting) < len(needs))


def _nodes(request: PlanRequest, config: Config) -> list[NodeResource]:
    cluster = config.cluster
    num_cpus = cluster.num_cpus if request.num_cpus is None else request.num_cpus
    memory_gb = cluster.memory_gb if request.memory_gb is None else request.memory_gb
    if request.layout is not None:
        nodes = load_cluster_layout(request.layout, num_cpus, memory_gb)
    else:
        cluster = msgspec.structs.replace(cluster, num_cpus=num_cpus, memory_gb=memory_gb)
        nodes = cluster_nodes(cluster, request.specs.resolve().parent)
    if nodes is None:
        raise ConfigError(
            f"there is no cluster layout: give one before {request.specs}, or as its table [cluster.layout]"
        )
    return nodes


def _need(evaluator: EvaluatorSettings, samples_per_task: int | None) -> BatchNeed:
    run, scoring = evaluator.run_resource, evaluator.eval_resource
    largest = None
    if samples_per_task is not None and evaluator.batch_size:
        largest = samples_per_task * evaluator.batch_size
    return BatchNeed(
        evaluator_id=evaluator.evaluator_id,
        budget=evaluator.resource,
        per_sample=run if scoring is None else run.field_max(scoring),
        max_batch_samples=largest,
    )


def _drawn(name: str | None, needs: Sequence[BatchNeed], fitting: Sequence[BatchNeed]) -> BatchNeed:
    if name is None:
        return (*fitting, *needs)[0]
    for need in needs:
        if need.evaluator_id == name:
            return need
    known = ", ".join(need.evaluator_id for need in needs)
    raise InvalidArgumentError([FieldViolation("--draw", f"no evaluator is called {name!r}: there are {known}")])
