"""What one placed token costs, by number of nodes: this core beside what people use. Draws and tabulates one run.

    python benches/compare_placement.py --python python.json --criterion target/criterion --docs docs

`make bench` makes the inputs: pytest-benchmark's JSON of bench_placement.py, criterion's folder, the lines of
placement_ratios.rs, and what ray_placement.py and placement_service.py found. Writes placement_cost.md and
placement_cost.png. Every figure is the median of acquire and release together, per token; a ratio of things that are
close to one another is the median over rounds in which they took turns.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import tomllib
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

_SERVICE_CONFIG = Path(__file__).parent / "noop.toml"
_GROUP = re.compile(r"(empty pool|half full|refusal), (\d+) nodes")
_BEGIN, _END = "<!-- figures of make bench -->\n", "<!-- end of figures -->\n"
_SAME_RUN_SECONDS = 3_600.0
"""Criterion keeps results for ever; what is this much older than its newest one belongs to another run."""

# In the order of the table: the key, its words, how it is drawn.
SERIES = {
    "touch": ("touching memory (the bare limit)", "k:"),
    "pool": ("placement_core, Rust", "C0-o"),
    "core": ("placement_core, from Python", "C1-o"),
    "service": ("PlacementService, gRPC", "C4-v"),
    "heap": ("heap-based pool, Python", "C2-s"),
    "scan": ("linear scan, Rust", "C5-^"),
    "plain": ("straightforward pool, Python", "C3-D"),
    "ray": ("Ray placement groups", "C6-*"),
}


class Figure(NamedTuple):
    what: str
    nodes: int
    batch: int
    nanoseconds: float


Key = tuple[str, int, int]
"""What was measured, on how many nodes, in batches of how many tokens."""


class Run(NamedTuple):
    """What one run found. Ratios are of things that took turns; their keys say `this over that`."""

    costs: Mapping[Key, float]
    ratios: Mapping[Key, float]


class Goal(NamedTuple):
    """`measured` of a run, and its bound: at least or at most `bound`. None: a figure is missing."""

    words: str
    measured: Callable[[Run], float | None]
    bound: float
    at_least: bool = False
    unit: str = ""


def quotient(upper: Key, lower: Key) -> Callable[[Run], float | None]:
    """Of costs that were measured one after the other: for what is far apart."""

    def measured(run: Run) -> float | None:
        return run.costs[upper] / run.costs[lower] if upper in run.costs and lower in run.costs else None

    return measured


def worst(ratio: str, batch: int) -> Callable[[Run], float | None]:
    """Over all sizes from 16 nodes on."""

    def measured(run: Run) -> float | None:
        found = (
            value for (what, nodes, size), value in run.ratios.items() if what == ratio and size == batch and nodes > 1
        )
        return max(found, default=None)

    return measured


def ratio(key: Key) -> Callable[[Run], float | None]:
    return lambda run: run.ratios.get(key)


def cost(key: Key) -> Callable[[Run], float | None]:
    return lambda run: run.costs.get(key)


def above(upper: Key, lower: Key) -> Callable[[Run], float | None]:
    def measured(run: Run) -> float | None:
        return run.costs[upper] - run.costs[lower] if upper in run.costs and lower in run.costs else None

    return measured


def loss_over_lock(batch: int) -> Callable[[Run], float | None]:
    """What two threads lose on one pool, over what they lose on one bare lock: each against a thread by itself."""

    def measured(run: Run) -> float | None:
        lost = above(("pool, two threads", _SHARED, batch), ("pool, one thread", _SHARED, batch))(run)
        lock = above(("lock, two threads", _SHARED, batch), ("lock, one thread", _SHARED, batch))(run)
        return None if lost is None or lock is None or lock <= 0 else max(0.0, lost) / lock

    return measured


_SHARED, _LARGEST = 256, 10_000
_BARE, _CALLED = "pool over touch", "pool over touch, locked and handed out"
_SIZES = "10 000 nodes over 16 nodes"
GOALS = [
    Goal("core over the bare touch, 16 to 10 000 nodes, worst, batch 64", worst(_BARE, 64), 3),
    Goal("... batch 1 024", worst(_BARE, 1_024), 3),
    Goal("... batch 1, the bound taken literally", worst(_BARE, 1), 3.5),
    Goal("core over the called touch, worst, batch 1", worst(_CALLED, 1), 3.5),
    Goal("... batch 64, for comparison", worst(_CALLED, 64), 3),
    Goal("... batch 1 024, for comparison", worst(_CALLED, 1_024), 3),
    Goal("core at 10 000 nodes over 16, batch 64", ratio((f"{_SIZES}, empty pool", _LARGEST, 64)), 1.3),
    Goal("... half full at random", ratio((f"{_SIZES}, half full", _LARGEST, 64)), 2.5),
    Goal(
        "Rust scan over the core, 10 000 nodes, batch 64",
        quotient(("scan", _LARGEST, 64), ("pool", _LARGEST, 64)),
        500,
        True,
    ),
    Goal("core over the Rust scan, 1 node, batch 1", ratio(("pool over scan", 1, 1)), 1.5),
    Goal(
        "refusal of 64 over placing the 63 that fit",
        quotient(("63 of 64 fit", _LARGEST, 63), ("pool", _LARGEST, 64)),
        1,
    ),
    Goal("refusal with GPUs free and no CPU, 10 000 nodes", cost(("GPUs free, no CPU", _LARGEST, 1)), 50, unit=" ns"),
    Goal("heap over the core from Python, 256 nodes, batch 64", ratio(("heap over core", 256, 64)), 150, True),
    Goal("... batch 1", ratio(("heap over core", 256, 1)), 18, True),
    Goal(
        "plain Python over the core, 256 nodes, batch 64", quotient(("plain", 256, 64), ("core", 256, 64)), 4_000, True
    ),
    Goal("... 10 000 nodes", quotient(("plain", _LARGEST, 64), ("core", _LARGEST, 64)), 100_000, True),
    Goal(
        "core from Python above the bare core, 256 nodes, batch 64",
        above(("core", 256, 64), ("pool", 256, 64)),
        10,
        unit=" ns",
    ),
    Goal("loss of two threads on one pool over that on a bare lock, batch 1", loss_over_lock(1), 1),
    Goal("... batch 64", loss_over_lock(64), 1),
]
_LIMITS = """\
Two limits stand beside the core. The bare touch takes from known nodes and slots, gives back to them, and does nothing
else. The called touch does that as any pool must whose callers share it and own what they got: under a lock, handed out
in a list, given back under the lock again. The bounds go back to measurements of 5.7 ns a token over 2.3 touched, in
batches, and 38 over 12 touched, one by one. Bare, a single known token costs {bare_ns:.1f} ns here, so the 12 are taken
to include what a call costs, and single tokens are judged by the called touch; batches, where 2.3 ns leave no room for
a call, by the bare one. Taken literally ("node and slot touched once"), the bound for single tokens is the bare touch
too: that row is shown as well, and so are batches over the called touch.
"""


def python_figures(path: Path) -> Iterator[Figure]:
    """Of pytest-benchmark's JSON."""
    for about, stats in _python_benchmarks(path):
        if "ratio" not in about:
            yield Figure(about["what"], about["nodes"], about["batch"], stats["median"] / about["batch"] * 1e9)


def python_ratios(path: Path) -> Iterator[tuple[Key, float]]:
    for about, _ in _python_benchmarks(path):
        if "ratio" in about:
            yield (about["what"], about["nodes"], about["batch"]), about["ratio"]


def _python_benchmarks(path: Path) -> Iterator[tuple[dict[str, Any], dict[str, float]]]:
    for benchmark in json.loads(path.read_text())["benchmarks"]:
        yield benchmark["extra_info"], benchmark["stats"]


def core_ratios(path: Path) -> Iterator[tuple[Key, float]]:
    """Of the lines of placement_ratios.rs."""
    for line in _lines(path):
        first, *others = line["contenders"]
        case = "" if line["case"] == "over the limits" else f", {line['case']}"
        for other in others:
            words = f"{first['name']} over {other['name']}{case}"
            yield (words, line["nodes"], line["batch"]), other["first_over_it"]


def thread_figures(path: Path) -> Iterator[Figure]:
    """Of the same lines, what threads took on one pool."""
    for line in _lines(path):
        if line["case"] == "two threads":
            for one in line["contenders"]:
                yield Figure(one["name"], line["nodes"], line["batch"], one["nanoseconds"])


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines that are no JSON are somebody's chatter."""
    return (json.loads(line) for line in path.read_text().splitlines() if line.startswith("{"))


def criterion_figures(folder: Path) -> Iterator[Figure]:
    """Per token; of what is half full under that name, of a refusal per token that would have fitted."""
    estimates = list(folder.glob("*/*/*/new/estimates.json"))
    newest = max((path.stat().st_mtime for path in estimates), default=0.0)
    for path in estimates:
        about = json.loads(path.with_name("benchmark.json").read_text())
        match = _GROUP.fullmatch(about["group_id"])
        if match is None or path.stat().st_mtime < newest - _SAME_RUN_SECONDS:
            continue
        batch = int(about["value_str"])
        nanoseconds = json.loads(path.read_text())["median"]["point_estimate"]
        what = match[1] if match[1] == "half full" else about["function_id"]
        yield Figure(what, int(match[2]), batch, nanoseconds / batch)


def ray_figures(path: Path) -> Iterator[Figure]:
    """Of ray_placement.py."""
    for found in _lines(path):
        yield Figure("ray", found["nodes"], found["batch"], found["ns_per_token"])


def service_figures(path: Path) -> Iterator[Figure]:
    """Of placement_service.py, whose server runs with the layout of noop.toml."""
    nodes = len(tomllib.loads(_SERVICE_CONFIG.read_text())["cluster"]["layout"])
    for row in json.loads(path.read_text()):
        yield Figure("service", nodes, row["tokens"], row["us_per_cycle"] * 1e3 / row["tokens"])


class Comparison:
    """All figures of a run."""

    def __init__(self, figures: list[Figure], ratios: Iterable[tuple[Key, float]] = ()) -> None:
        costs = {(figure.what, figure.nodes, figure.batch): figure.nanoseconds for figure in figures}
        self._run = Run(costs, dict(ratios))

    def series(self, batch: int) -> dict[str, dict[int, float]]:
        """By what is measured, by nodes; in the order of SERIES, and without what was not measured."""
        found: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for (what, nodes, size), nanoseconds in sorted(self._run.costs.items()):
            if size == batch and nodes > 1:
                found[what][nodes] = nanoseconds
        return {what: found[what] for what in SERIES if what in found}

    def bare_touch(self) -> float | None:
        """Nanoseconds of a single token."""
        return self._run.costs.get(("touch", _SHARED, 1))

    def goals(self) -> Iterator[tuple[Goal, float, bool]]:
        """Each goal whose figures are there, with what was measured and whether it is reached."""
        for goal in GOALS:
            measured = goal.measured(self._run)
            if measured is not None:
                yield goal, measured, measured >= goal.bound if goal.at_least else measured <= goal.bound


def markdown(comparison: Comparison, batch: int) -> str:
    series, bare = comparison.series(batch), comparison.bare_touch()
    sizes = sorted({nodes for costs in series.values() for nodes in costs})
    lines = [
        "# What placing a token costs",
        "",
        f"Written by `make bench` on {os.cpu_count()} cores with Python {platform.python_version()},",
        f"load average {os.getloadavg()[2]:.1f} (of 15 minutes: others may have worked beside it).",
        "Nanoseconds a token, acquire and release together, median;",
        f"batches of {batch} shares of 0.33 on an empty pool of nodes with eight GPUs.",
        "Each placement was checked before it was timed. A dash: not measured at that size.",
        "Ray's nodes are raylet processes on this one machine; Ray does more than decide, it reserves on each node.",
        "",
        "![cost of a token over the number of nodes](placement_cost.png)",
        "",
        "| nodes | " + " | ".join(SERIES[what][0] for what in series) + " |",
        "|---:" * (len(series) + 1) + "|",
        *(
            f"| {nodes:,} | " + " | ".join(_number(costs.get(nodes)) for costs in series.values()) + " |"
            for nodes in sizes
        ),
        "",
        *([] if bare is None else [_LIMITS.format(bare_ns=bare)]),
        "| goal | bound | measured | |",
        "|---|---:|---:|---|",
    ]
    for goal, measured, reached in comparison.goals():
        bound = f"{'≥' if goal.at_least else '≤'} {goal.bound:,g}{goal.unit}"
        found = f"{_number(measured)}{goal.unit}"
        lines.append(f"| {goal.words} | {bound} | {found} | {'reached' if reached else 'not reached'} |")
    return "\n".join(lines) + "\n"


def short_table(comparison: Comparison, batch: int) -> str:
    """For the README: the smallest and the largest size that the core was measured at, and what else was there."""
    series = comparison.series(batch)
    sizes = sorted(series["core"])
    few, many = sizes[0], sizes[-1]
    lines = [f"| ns a token, batches of {batch} | {few:,} nodes | {many:,} nodes |", "|---|---:|---:|"]
    for what in ("core", "heap", "scan", "plain", "ray"):
        costs = series.get(what, {})
        if few in costs or many in costs:
            lines.append(f"| {SERIES[what][0]} | {_number(costs.get(few))} | {_number(costs.get(many))} |")
    return "\n".join(lines) + "\n"


def put_between_marks(path: Path, text: str) -> None:
    """Replaces what stands between the two marks. Raises ValueError when they are not there."""
    before, begin, rest = path.read_text(encoding="utf-8").partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        message = f"{path} has no lines {_BEGIN.strip()} and {_END.strip()}"
        raise ValueError(message)
    path.write_text(f"{before}{begin}{text}{end}{after}", encoding="utf-8")


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


def draw(comparison: Comparison, batch: int, path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - the table needs none of it

    mpl.use("Agg")
    import matplotlib.pyplot as plt  # noqa: PLC0415

    figure, axes = plt.subplots(figsize=(9, 6), layout="constrained")
    for what, costs in comparison.series(batch).items():
        words, style = SERIES[what]
        axes.loglog(list(costs), list(costs.values()), style, label=words, markersize=5)
    axes.set_xlabel("nodes with eight GPUs")
    axes.set_ylabel("nanoseconds a token, acquire and release")
    axes.set_title(f"What placing a token costs (batches of {batch})")
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(loc="outside right upper", frameon=False)
    # No version and no date, so that the same figures give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(description="Compares what placement costs.")
    parser.add_argument("--python", type=Path, required=True, help="pytest-benchmark's JSON")
    parser.add_argument("--criterion", type=Path, required=True, help="criterion's folder")
    parser.add_argument("--ratios", type=Path, required=True, help="what placement_ratios.rs printed")
    parser.add_argument("--ray", type=Path, help="what ray_placement.py printed; skipped when it is not there")
    parser.add_argument("--service", type=Path, help="the JSON of placement_service.py; likewise")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--docs", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--readme", type=Path, help="gets the short table between its marks")
    options = parser.parse_args()
    figures = [
        *criterion_figures(options.criterion),
        *thread_figures(options.ratios),
        *python_figures(options.python),
    ]
    for path, read in ((options.ray, ray_figures), (options.service, service_figures)):
        if path is not None and path.exists():
            figures.extend(read(path))
    comparison = Comparison(figures, [*core_ratios(options.ratios), *python_ratios(options.python)])
    text = markdown(comparison, options.batch)
    options.docs.mkdir(exist_ok=True)
    (options.docs / "placement_cost.md").write_text(text, encoding="utf-8")
    if options.readme:
        put_between_marks(options.readme, short_table(comparison, options.batch))
    draw(comparison, options.batch, options.docs / "placement_cost.png")
    print(text)


if __name__ == "__main__":
    main()
