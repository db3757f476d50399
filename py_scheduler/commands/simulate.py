"""`py-scheduler simulate`: a server's scheduler in virtual time, before there is a server."""

from __future__ import annotations

import argparse
import difflib
import itertools
import os
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from py_scheduler.app import cluster_nodes
from py_scheduler.commands.common import positive, read_specs, standard_console
from py_scheduler.commands.views.report_plots import load_matplotlib
from py_scheduler.commands.views.simulate import SimulationView, show_simulation
from py_scheduler.commands.views.simulate_plots import MOST_DRAWN, draw_simulation
from py_scheduler.errors import FieldViolation, InvalidArgumentError
from py_scheduler.knobs import KNOBS, Kind, Knob, Override, add_flags, overrides_of
from py_scheduler.planning import BatchNeed, bounds_of_batch
from py_scheduler.simulation.simulate import LostNode, SimulationSettings, simulate
from py_scheduler.simulation.traces import is_trace, read_trace
from py_scheduler.simulation.workload import DrawnWorkload, SimulatedStep, parse_distribution

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from py_scheduler.config import Config

_FLAGS = (
    "--env-cluster-layout",
    "--env-num-cpus",
    "--env-memory-gb",
    "--evaluator-batch-size",
    "--evaluator-concurrency",
)
_KNOBS = tuple(knob for knob in KNOBS if knob.flag in _FLAGS)
_AHEAD = "ahead"
_SHORT = {"concurrency": "evaluator[].resource.concurrency", "batch_size": "evaluator[].batch_size"}
_DRAWN = {
    "steps": "steps",
    "groups": "groups",
    "samples": "samples",
    "evaluator": "evaluator_id",
    "eval_groups": "eval_groups",
    "eval_evaluator": "eval_evaluator_id",
}
"""Options that say how a workload is drawn, by the field that each sets."""
_SWITCHES = ("true", "false")


class Variant(msgspec.Struct, frozen=True):
    """One way to set what is compared. label: as it was typed, empty for the configuration as it is."""

    label: str
    overrides: tuple[Override, ...]
    ahead: str | None


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        f"{parser.description} No handler is imported: samples take as long as the workload says. Exit code 1: work is "
        "left that nothing can bring to its end."
    )
    parser.add_argument(
        "specs", type=Path, metavar="SPECS", help="a server's configuration, or any TOML or JSON file with evaluators"
    )
    add_flags(parser, _KNOBS)
    parser.add_argument(
        "--workload",
        default="lognormal",
        metavar="WORKLOAD",
        help="how long samples take, in seconds: lognormal, pareto, constant or empirical:FILE, with more words such "
        "as lognormal:median=55,sigma=1,longest=1800,alike=0.5; or a file: .csv or .parquet with a row to a sample, "
        ".jsonl of eval_details or of `journal export` (default %(default)s)",
    )
    for flag, default, what in (
        ("--steps", 1, "steps of the trainer"),
        ("--groups", 64, "tasks of a step"),
        ("--samples", 8, "samples of a task"),
    ):
        parser.add_argument(flag, type=positive, metavar="N", help=f"{what} (default {default})")
    parser.add_argument("--evaluator", metavar="ID", help="who runs the tasks (default: the first one)")
    parser.add_argument("--eval-groups", type=int, metavar="N", help="evals of one sample beside each step (default 0)")
    parser.add_argument("--eval-evaluator", metavar="ID", help="who runs them (default: that of the tasks)")
    parser.add_argument(
        "--ahead",
        metavar="N",
        help='steps that may be submitted beyond the oldest that is not done (default 0: each waits), or "all"; steps '
        "of a file come at their own moments unless this is said",
    )
    parser.add_argument(
        "--infra-rate", type=float, default=0.0, metavar="P", help="how likely the infrastructure fails an attempt"
    )
    parser.add_argument(
        "--lose-node", action="append", default=[], metavar="IP@SECONDS", help="a node that goes then; may be repeated"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="the same one gives the same run (default 0)")
    parser.add_argument(
        "--compare",
        action="append",
        default=[],
        metavar="KEY=A,B,..",
        help="runs the same workload with each value of a key of the configuration (scheduler.max_bypass, "
        "evaluator[].batch_size; short: concurrency, batch_size) or of --ahead; may be repeated, for every combination",
    )
    parser.add_argument(
        "--png", type=Path, metavar="FILE", help="draw when and where each sample ran, and what waited meanwhile"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object to a line for each run")


def run(options: argparse.Namespace) -> int:
    return run_simulations(options, standard_console())


def run_simulations(options: argparse.Namespace, console: Console) -> int:
    """Prints the figures of each variant; 0. Raises SchedulerError."""
    workload = _workload(options)
    base_dir = options.specs.resolve().parent
    turned = overrides_of(vars(options), os.environ, _KNOBS)
    # All are read before any runs: a fault in the last one shows at once.
    planned = [
        (variant, _config(options, [*turned, *variant.overrides]), _settings(options, variant.ahead))
        for variant in _variants(options)
    ]
    if options.png is not None:
        load_matplotlib()
        if len(planned) > MOST_DRAWN:
            raise InvalidArgumentError(f"draws {MOST_DRAWN} runs at most, {len(planned)} are compared", "--png")
    views = []
    for variant, config, settings in planned:
        steps = (
            workload if variant.ahead is None or isinstance(workload, DrawnWorkload) else list(map(_at_once, workload))
        )
        ran = simulate(config, steps, settings, seed=options.seed, base_dir=base_dir)
        views.append(SimulationView(label=variant.label, figures=ran.figures, spans=ran.spans))
        if options.json:
            line = {"variant": variant.label, "seed": options.seed} | msgspec.to_builtins(ran.figures)
            console.out(msgspec.json.encode(line).decode(), highlight=False)
    if options.png is not None:
        draw_simulation(views, options.png)
    if not options.json:
        show_simulation(views, cluster_nodes(planned[0][1].cluster, base_dir) or [], console)
        for variant, config, _ in planned:
            if "concurrency=" in variant.label:
                for line in _what_binds_instead(config):
                    console.print(f"{variant.label}: {line}", soft_wrap=True)
        if options.png is not None:
            console.print(f"wrote {options.png}", soft_wrap=True)
    return 0


def _what_binds_instead(config: Config) -> Iterator[str]:
    """Of each evaluator whose budget holds fewer samples than its concurrency."""
    for evaluator in config.evaluator:
        run, scoring = evaluator.run_resource, evaluator.eval_resource
        need = BatchNeed(
            evaluator_id=evaluator.evaluator_id,
            budget=evaluator.resource,
            per_sample=run if scoring is None else run.field_max(scoring),
        )
        bounds = bounds_of_batch(need)
        if "budget concurrency" not in bounds:
            yield f"not concurrency bounds the batches of {evaluator.evaluator_id!r}, but {', '.join(bounds)}"


def _workload(options: argparse.Namespace) -> DrawnWorkload | list[SimulatedStep]:
    """A file has steps of its own: what says how to draw them is refused then."""
    said = {name: value for name in _DRAWN if (value := getattr(options, name)) is not None}
    if not is_trace(options.workload):
        distribution = parse_distribution(options.workload)
        return DrawnWorkload(distribution=distribution, **{_DRAWN[name]: value for name, value in said.items()})
    if said:
        flag = "--" + next(iter(said)).replace("_", "-")
        raise InvalidArgumentError(
            f"says how to draw a workload, and {options.workload} has steps of its own: leave one of both out", flag
        )
    return read_trace(Path(options.workload))


def _at_once(step: SimulatedStep) -> SimulatedStep:
    """Without its moment: what it waits for are other steps."""
    return msgspec.structs.replace(step, at_seconds=0.0)


def _config(options: argparse.Namespace, overrides: Sequence[Override]) -> Config:
    config = read_specs(options.specs, overrides)
    known = [evaluator.evaluator_id for evaluator in config.evaluator]
    for flag, named in (("--evaluator", options.evaluator), ("--eval-evaluator", options.eval_evaluator)):
        if named and named not in known:
            raise InvalidArgumentError(f"no evaluator is called {named!r}: there are {', '.join(known)}", flag)
    return config


def _settings(options: argparse.Namespace, ahead: str | None) -> SimulationSettings:
    if ahead is None:
        ahead = "all" if is_trace(options.workload) else "0"
    if ahead != "all" and not ahead.isdecimal():
        raise InvalidArgumentError(f'is {ahead!r}, must be a whole number or "all"', "--ahead")
    return SimulationSettings(
        ahead=None if ahead == "all" else int(ahead),
        infra_rate=options.infra_rate,
        lost_nodes=tuple(map(_lost_node, options.lose_node)),
    )


def _lost_node(text: str) -> LostNode:
    node_ip, _, seconds = text.rpartition("@")
    try:
        return LostNode(node_ip, float(seconds))
    except ValueError:
        raise InvalidArgumentError(f"{text!r} is not IP@SECONDS", "--lose-node") from None


def _variants(options: argparse.Namespace) -> Iterator[Variant]:
    """Every combination of what is to be compared."""
    axes: list[list[tuple[str, str]]] = []
    for text in options.compare:
        key, _, values = text.partition("=")
        if not key or not values:
            raise InvalidArgumentError([FieldViolation("--compare", f"{text!r} is not KEY=A,B,..")])
        near = difflib.get_close_matches(key, (*_SHORT, _AHEAD), n=1) if "." not in key else []
        if near and near[0] != key:
            raise InvalidArgumentError(f"there is no key {key!r}: did you mean {near[0]}?", "--compare")
        axes.append([(key, value) for value in values.split(",")])
    for chosen in itertools.product(*axes):
        ahead = options.ahead
        overrides = []
        for key, value in chosen:
            if key == _AHEAD:
                ahead = value
            else:
                knob = Knob(variable="", keys=(_SHORT.get(key, key),), kind=_kind_of(value), help="")
                overrides.append(Override(knob, value, "--compare"))
        yield Variant(", ".join(f"{key}={value}" for key, value in chosen), tuple(overrides), ahead)


def _kind_of(value: str) -> Kind:
    """As TOML would read it."""
    if value in _SWITCHES:
        return Kind.SWITCH
    if value.isdecimal():
        return Kind.COUNT
    try:
        float(value)
    except ValueError:
        return Kind.TEXT
    return Kind.NUMBER
