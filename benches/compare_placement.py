"""What one placed token costs, by number of nodes: this core beside what people use. Draws and tabulates one run.

    python benches/compare_placement.py --python python.json --criterion target/criterion --docs docs

`make bench` makes the inputs: pytest-benchmark's JSON of bench_placement.py, criterion's folder, and what
ray_placement.py and placement_service.py found. Writes placement_cost.md and placement_cost.png. Every figure is the
median of acquire and release together, per token.
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
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_SERVICE_CONFIG = Path(__file__).parent / "noop.toml"
_GROUP = re.compile(r"(empty pool|half full|refusal|two threads), (\d+) nodes")
_BEGIN, _END = "<!-- figures of make bench -->\n", "<!-- end of figures -->\n"
_SAME_RUN_SECONDS = 3_600.0
"""Criterion keeps results for ever; what is this much older than its newest one belongs to another run."""

# In the order of the table: the key, its words, how it is drawn.
SERIES = {
    "touch": ("touching memory (the limit)", "k:"),
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


class Goal(NamedTuple):
    """`measured` of a run's costs, and its bound: at least or at most `bound`. None: a figure is missing."""

    words: str
    measured: Callable[[Mapping[Key, float]], float | None]
    bound: float
    at_least: bool = False
    unit: str = ""


def ratio(upper: Key, lower: Key) -> Callable[[Mapping[Key, float]], float | None]:
    def measured(costs: Mapping[Key, float]) -> float | None:
        return costs[upper] / costs[lower] if upper in costs and lower in costs else None

    return measured


def worst_over(limit: str, batch: int) -> Callable[[Mapping[Key, float]], float | None]:
    """The core's worst ratio to a limit, over all sizes from 16 nodes on."""

    def measured(costs: Mapping[Key, float]) -> float | None:
        keys = [(nodes, size) for what, nodes, size in costs if what == limit and size == batch and nodes >= _SMALLEST]
        ratios = [costs["pool", *key] / costs[limit, *key] for key in keys if ("pool", *key) in costs]
        return max(ratios, default=None)

    return measured


def cost(key: Key) -> Callable[[Mapping[Key, float]], float | None]:
    return lambda costs: costs.get(key)


def above(upper: Key, lower: Key) -> Callable[[Mapping[Key, float]], float | None]:
    def measured(costs: Mapping[Key, float]) -> float | None:
        return costs[upper] - costs[lower] if upper in costs and lower in costs else None

    return measured


def loss_over_lock(batch: int) -> Callable[[Mapping[Key, float]], float | None]:
    """What two threads lose on one pool, over what they lose on one bare lock: each against a thread by itself."""

    def measured(costs: Mapping[Key, float]) -> float | None:
        lost = above(("pool, two threads", _SHARED, batch), ("pool, one thread", _SHARED, batch))(costs)
        lock = above(("lock, two threads", _SHARED, batch), ("lock, one thread", _SHARED, batch))(costs)
        return None if lost is None or lock is None or lock <= 0 else max(0.0, lost) / lock

    return measured


_SMALLEST, _SHARED, _LARGEST = 16, 256, 10_000
TOUCH, LOCKED = "touch", "touch, locked and handed out"
GOALS = [
    Goal("core over the limit, 16 to 10 000 nodes, worst, batch 64", worst_over(TOUCH, 64), 3),
    Goal("... batch 1 024", worst_over(TOUCH, 1_024), 3),
    Goal("... batch 1", worst_over(TOUCH, 1), 3.5),
    Goal("core over the limit under a lock, handed out, worst, batch 64", worst_over(LOCKED, 64), 3),
    Goal("... batch 1 024", worst_over(LOCKED, 1_024), 3),
    Goal("... batch 1", worst_over(LOCKED, 1), 3.5),
    Goal("core at 10 000 nodes over 16, batch 64", ratio(("pool", _LARGEST, 64), ("pool", _SMALLEST, 64)), 1.3),
    Goal("... half full at random", ratio(("half full", _LARGEST, 64), ("half full", _SMALLEST, 64)), 2.5),
    Goal(
        "Rust scan over the core, 10 000 nodes, batch 64",
        ratio(("scan", _LARGEST, 64), ("pool", _LARGEST, 64)),
        500,
        True,
    ),
    Goal("core over the Rust scan, 1 node, batch 1", ratio(("pool", 1, 1), ("scan", 1, 1)), 1.5),
    Goal(
        "refusal of 64 over placing the 63 that fit", ratio(("63 of 64 fit", _LARGEST, 63), ("pool", _LARGEST, 64)), 1
    ),
    Goal("refusal with GPUs free and no CPU, 10 000 nodes", cost(("GPUs free, no CPU", _LARGEST, 1)), 50, unit=" ns"),
    Goal("heap over the core from Python, 256 nodes, batch 64", ratio(("heap", 256, 64), ("core", 256, 64)), 150, True),
    Goal("... batch 1", ratio(("heap", 256, 1), ("core", 256, 1)), 18, True),
    Goal("plain Python over the core, 256 nodes, batch 64", ratio(("plain", 256, 64), ("core", 256, 64)), 4_000, True),
    Goal("... 10 000 nodes", ratio(("plain", _LARGEST, 64), ("core", _LARGEST, 64)), 100_000, True),
    Goal(
        "core from Python above the bare core, 256 nodes, batch 64",
        above(("core", 256, 64), ("pool", 256, 64)),
        10,
        unit=" ns",
    ),
    Goal("loss of two threads on one pool over that on a bare lock, batch 1", loss_over_lock(1), 1),
    Goal("... batch 64", loss_over_lock(64), 1),
]


def python_figures(path: Path) -> Iterator[Figure]:
    """Of pytest-benchmark's JSON."""
    for benchmark in json.loads(path.read_text())["benchmarks"]:
        about = benchmark["extra_info"]
        seconds = benchmark["stats"]["median"]
        yield Figure(about["what"], about["nodes"], about["batch"], seconds / about["batch"] * 1e9)


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
    """Of ray_placement.py; lines that are no JSON are Ray's chatter."""
    for line in path.read_text().splitlines():
        if line.startswith("{"):
            found = json.loads(line)
            yield Figure("ray", found["nodes"], found["batch"], found["ns_per_token"])


def service_figures(path: Path) -> Iterator[Figure]:
    """Of placement_service.py, whose server runs with the layout of noop.toml."""
    nodes = len(tomllib.loads(_SERVICE_CONFIG.read_text())["cluster"]["layout"])
    for row in json.loads(path.read_text()):
        yield Figure("service", nodes, row["tokens"], row["us_per_cycle"] * 1e3 / row["tokens"])


class Comparison:
    """All figures of a run."""

    def __init__(self, figures: list[Figure]) -> None:
        self._costs = {(figure.what, figure.nodes, figure.batch): figure.nanoseconds for figure in figures}

    def series(self, batch: int) -> dict[str, dict[int, float]]:
        """By what is measured, by nodes; in the order of SERIES, and without what was not measured."""
        found: defaultdict[str, dict[int, float]] = defaultdict(dict)
        for (what, nodes, size), nanoseconds in sorted(self._costs.items()):
            if size == batch and nodes > 1:
                found[what][nodes] = nanoseconds
        return {what: found[what] for what in SERIES if what in found}

    def goals(self) -> Iterator[tuple[Goal, float, bool]]:
        """Each goal whose figures are there, with what was measured and whether it is reached."""
        for goal in GOALS:
            measured = goal.measured(self._costs)
            if measured is not None:
                yield goal, measured, measured >= goal.bound if goal.at_least else measured <= goal.bound


def markdown(comparison: Comparison, batch: int) -> str:
    series = comparison.series(batch)
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
    parser.add_argument("--ray", type=Path, help="what ray_placement.py printed; skipped when it is not there")
    parser.add_argument("--service", type=Path, help="the JSON of placement_service.py; likewise")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--docs", type=Path, required=True, help="the folder to write to")
    parser.add_argument("--readme", type=Path, help="gets the short table between its marks")
    options = parser.parse_args()
    figures = [*criterion_figures(options.criterion), *python_figures(options.python)]
    for path, read in ((options.ray, ray_figures), (options.service, service_figures)):
        if path is not None and path.exists():
            figures.extend(read(path))
    comparison = Comparison(figures)
    text = markdown(comparison, options.batch)
    options.docs.mkdir(exist_ok=True)
    (options.docs / "placement_cost.md").write_text(text, encoding="utf-8")
    if options.readme:
        put_between_marks(options.readme, short_table(comparison, options.batch))
    draw(comparison, options.batch, options.docs / "placement_cost.png")
    print(text)


if __name__ == "__main__":
    main()
