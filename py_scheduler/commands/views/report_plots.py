"""The plots of `py-scheduler report`, as PNG files. matplotlib comes with the extra `report`.

Colours are safe for colour-blind readers, and an outcome has the same one in every plot; infrastructure failures are
hatched, so that they are told from the model's own without any colour.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from py_scheduler.commands.views.report_data import iteration_name, outcomes_seen, slowest_samples
from py_scheduler.domain.results import Outcome
from py_scheduler.errors import FailedPreconditionError
from py_scheduler.rollout.files.paths import atomic_file

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from py_scheduler.commands.views.report_data import Report
    from py_scheduler.rollout.files.iteration_summary import DatasetSummary, IterationSummary

    Points = Sequence[tuple[int, float | None]]
    """What a line goes through: by rollout_id; None where there is no figure."""

OUTCOME_COLOURS = {
    Outcome.SOLVED.value: "#009E73",
    Outcome.WRONG_ANSWER.value: "#E69F00",
    Outcome.MAX_TURNS.value: "#56B4E9",
    Outcome.CONTEXT_OVERFLOW.value: "#0072B2",
    Outcome.AGENT_TIMEOUT.value: "#CC79A7",
    Outcome.INFRA_CONN.value: "#D55E00",
    Outcome.INFRA_SANDBOX.value: "#F0E442",
    Outcome.INFRA_OTHER.value: "#5B5B5B",
    Outcome.ABORTED.value: "#C4C4C4",
}
TIME_COLOURS = {
    "wait_seconds": ("wait", "#D9D9D9"),
    "generate_seconds": ("generate", "#332288"),
    "tool_seconds": ("tool", "#88CCEE"),
    "verify_seconds": ("verify", "#DDCC77"),
}
_UNKNOWN_COLOUR = "#8C8C8C"
STYLE: Any = {"axes.spines.top": False, "axes.spines.right": False, "font.size": 10, "hatch.linewidth": 0.6}
LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5B5B5B")
_MARKERS = "osD^vPX"
_INFRA_HATCH = "////"
_MAX_NODES = 32
_SLOWEST = 15
_PANELS_IN_A_ROW = 3
_MANY_POINTS = 40
_FEW_NAMES = 6
_MAX_NAME = 28
_DPI = 110


def draw_report(report: Report, folder: Path) -> list[Path]:
    """Writes one PNG for each thing there are figures of, and returns them. Raises FailedPreconditionError without
    matplotlib, and for a folder that cannot be written to or is a link to another place.
    """
    mpl, Figure = load_matplotlib(", or say --no-plots")  # noqa: N806 -- a class
    drawings: dict[str, Callable[[Report, Any], bool]] = {
        "outcomes": _outcomes,
        "reward": _reward,
        "pass_at_k": _pass_at_k,
        "time": _time,
        "placement": _placement,
        "slowest": _slowest,
    }
    if folder.is_symlink():
        raise FailedPreconditionError(f"{folder} is a symbolic link: name the folder that it leads to by --out")
    written = []
    with mpl.rc_context(STYLE):
        for name, draw in drawings.items():
            figure = Figure(layout="constrained")
            if draw(report, figure):
                path = folder / f"{name}.png"
                save(figure, path)
                written.append(path)
    return written


def load_matplotlib(way_out: str = "") -> tuple[Any, Any]:
    """matplotlib and its Figure. Raises FailedPreconditionError without the extra."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 (an optional extra)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError as error:
        raise FailedPreconditionError(
            f"drawing needs matplotlib ({error}): install the extra 'report' of py-scheduler{way_out}"
        ) from error
    return mpl, Figure


def save(figure: Any, path: Path) -> None:
    """As PNG, without version and date, so that the same figures give the same file. Raises FailedPreconditionError."""
    try:
        with atomic_file(path) as sink:
            figure.savefig(sink, format="png", dpi=_DPI, metadata={"Software": None})
    except OSError as error:
        raise FailedPreconditionError(f"{path} cannot be written: {error.strerror or error}") from error


def _outcomes(report: Report, figure: Any) -> bool:
    panels = _panels(report)
    seen = outcomes_seen(report.all)
    for axes, (title, summaries) in zip(_columns(figure, panels), panels, strict=True):
        bottoms = [0] * len(summaries)
        for outcome in seen:
            counts = [summary.total.outcomes.get(outcome, 0) for summary in summaries]
            axes.bar(range(len(summaries)), counts, bottom=bottoms, **_outcome_style(outcome))
            bottoms = [bottom + count for bottom, count in zip(bottoms, counts, strict=True)]
        _iterations_axis(axes, summaries, title)
        axes.set_ylim(0, 1.04 * max(*bottoms, 1))
        axes.set_ylabel("samples")
        axes.yaxis.get_major_locator().set_params(integer=True)
    _legend(figure, reverse=True)
    figure.suptitle("How samples ended")
    return bool(seen)


def _outcome_style(outcome: str) -> dict[str, Any]:
    return {
        "color": OUTCOME_COLOURS.get(outcome, _UNKNOWN_COLOUR),
        "hatch": _INFRA_HATCH if outcome.startswith("infra") else None,
        "edgecolor": "white",
        "linewidth": 0.5,
        "width": 0.8,
        "label": outcome.replace("_", " "),
    }


def _reward(report: Report, figure: Any) -> bool:
    lines: list[tuple[str, Points]] = [
        (title, [(summary.rollout_id, _mean_reward(summary.total)) for summary in summaries])
        for title, summaries in (("training", report.training), ("all evals", report.evals))
    ]
    names = _datasets(report.evals)
    if len(names) > 1:
        lines += [(f"eval {_short(name)}", _of_dataset(report.evals, name, _mean_reward)) for name in names]
    lines = [(label, points) for label, points in lines if any(mean is not None for _, mean in points)]
    if not lines:
        return False
    figure.set_size_inches(8.5, 4.4)
    axes = figure.subplots()
    _draw_lines(axes, lines)
    axes.set_ylabel("mean reward of model results")
    axes.set_title("Reward")
    _legend(figure)
    return True


def _mean_reward(figures: DatasetSummary) -> float | None:
    return figures.reward.mean if figures.reward.count else None


def _pass_at_k(report: Report, figure: Any) -> bool:
    """One panel for each data set of the evals."""
    names = [
        name
        for name in _datasets(report.evals)
        if any(value is not None for _, value in _of_dataset(report.evals, name, lambda figures: figures.accuracy))
    ]
    if not names:
        return False
    every = {int(k) for one in report.evals for figures in one.datasets.values() for k in figures.pass_at_k}
    columns = min(_PANELS_IN_A_ROW, len(names))
    rows = -(-len(names) // columns)
    figure.set_size_inches(2.4 + 3.4 * columns, 0.8 + 3.2 * rows)
    grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flat
    for axes in list(grid)[len(names) :]:
        axes.remove()
    for axes, name in zip(figure.axes, names, strict=True):
        lines = [("accuracy", _of_dataset(report.evals, name, lambda figures: figures.accuracy))]
        lines += [(f"pass@{k}", _of_dataset(report.evals, name, _pass_at(k))) for k in sorted(every - {1})]
        _draw_lines(axes, lines)
        axes.set_title(_short(name), fontsize=10)
        axes.set_ylim(-0.03, 1.03)
    _legend(figure)
    figure.suptitle("Accuracy and pass@k")
    return True


def _pass_at(k: int) -> Callable[[DatasetSummary], float | None]:
    return lambda figures: figures.pass_at_k.get(str(k))


def _time(report: Report, figure: Any) -> bool:
    panels = [
        (title, [summary for summary in summaries if summary.total.samples]) for title, summaries in _panels(report)
    ]
    panels = [(title, summaries) for title, summaries in panels if summaries]
    if not panels:
        return False
    for axes, (title, summaries) in zip(_columns(figure, panels), panels, strict=True):
        bottoms = [0.0] * len(summaries)
        for field, (label, colour) in TIME_COLOURS.items():
            seconds = [getattr(one.total.time, field) / one.total.samples for one in summaries]
            axes.bar(range(len(summaries)), seconds, 0.8, bottoms, color=colour, label=label, edgecolor="white")
            bottoms = [bottom + more for bottom, more in zip(bottoms, seconds, strict=True)]
        _iterations_axis(axes, summaries, title)
        axes.set_ylabel("seconds of a sample, mean")
    _legend(figure, reverse=True)
    figure.suptitle("Where the time went")
    return True


def _placement(report: Report, figure: Any) -> bool:
    """A map of nodes and iterations; nodes beyond the busiest share a row."""
    summaries = [one for one in report.all if one.nodes]
    totals: Counter[str] = Counter()
    for summary in summaries:
        totals.update({node: use.held_seconds for node, use in summary.nodes.items()})
    if not totals:
        return False
    busiest = [node for node, _ in totals.most_common(_MAX_NODES)]
    shown = sorted(busiest, key=_natural)
    rows = [[_held(one, [node]) for one in summaries] for node in shown]
    labels = [_short(node) or "(no node)" for node in shown]
    if hidden := totals.keys() - set(shown):
        rows.append([_held(one, hidden) for one in summaries])
        labels.append(f"{len(hidden)} more nodes")
    figure.set_size_inches(3.6 + min(10.0, max(3.0, 0.5 * len(summaries))), 1.6 + 0.3 * max(3, len(rows)))
    axes = figure.subplots()
    image = axes.imshow(rows, aspect="auto", cmap="cividis", vmin=0)
    axes.set_yticks(range(len(labels)), labels)
    _thinned_ticks(
        axes, [iteration_name(one) for one in summaries], rotate=bool(report.evals) and len(summaries) > _FEW_NAMES
    )
    axes.set_xlabel("iteration")
    axes.set_title("Placement: sample·seconds held on each node")
    axes.spines[:].set_visible(False)
    figure.colorbar(image, ax=axes, label="sample·seconds")
    return True


def _held(summary: IterationSummary, nodes: Iterable[str]) -> float:
    return sum(summary.nodes[node].held_seconds for node in nodes if node in summary.nodes)


def _slowest(report: Report, figure: Any) -> bool:
    samples = slowest_samples(report.all, _SLOWEST)
    if not samples:
        return False
    figure.set_size_inches(10, 1.6 + 0.32 * max(3, len(samples)))
    axes = figure.subplots()
    held = [sample.held_seconds for _, sample in samples]
    generate = [min(sample.generate_seconds, sample.held_seconds) for _, sample in samples]
    rest = [whole - part for whole, part in zip(held, generate, strict=True)]
    style = {"height": 0.75, "edgecolor": "white"}
    axes.barh(range(len(samples)), generate, color=TIME_COLOURS["generate_seconds"][1], label="generate", **style)
    tool = TIME_COLOURS["tool_seconds"][1]
    axes.barh(range(len(samples)), rest, left=generate, color=tool, label="tool and verify", **style)
    end = max(*held, 1e-9)
    for row, (_, sample) in enumerate(samples):
        colour = OUTCOME_COLOURS.get(sample.outcome, _UNKNOWN_COLOUR)
        axes.plot(held[row] + end * 0.015, row, marker="s", markersize=8, color=colour)
        axes.text(held[row] + end * 0.035, row, sample.outcome.replace("_", " "), va="center", fontsize=9)
    names = [f"{iteration_name(one)} · {_short(sample.task_id)} #{sample.sample_no}" for one, sample in samples]
    axes.set_xlim(0, end * 1.25)
    axes.set_yticks(range(len(samples)), names, fontsize=9)
    axes.set_ylim(len(samples) - 0.4, -0.6)
    axes.set_xlabel("seconds from the start of run to the end of eval")
    axes.set_title("Slowest samples")
    _legend(figure)
    return True


# What the plots share


def _panels(report: Report) -> list[tuple[str, Sequence[IterationSummary]]]:
    both = [("training", report.training), ("evals", report.evals)]
    return [(title, summaries) for title, summaries in both if summaries]


def _columns(figure: Any, panels: Sequence[tuple[str, Sequence[IterationSummary]]]) -> list[Any]:
    widths = [min(7.0, max(2.8, 0.35 * len(summaries))) for _, summaries in panels]
    figure.set_size_inches(2.6 + sum(widths), 4.4)
    return list(figure.subplots(1, len(panels), squeeze=False, width_ratios=widths).flat)


def _iterations_axis(axes: Any, summaries: Sequence[IterationSummary], title: str) -> None:
    _thinned_ticks(axes, [str(summary.rollout_id) for summary in summaries])
    # Few bars stay narrow, in the middle.
    margin = max(0.6, 2.0 - len(summaries) / 2)
    axes.set_xlim(-margin, len(summaries) - 1 + margin)
    axes.set_xlabel("iteration")
    axes.set_title(title, fontsize=10)


def _thinned_ticks(axes: Any, names: Sequence[str], *, rotate: bool = False, at_most: int = 20) -> None:
    step = -(-len(names) // at_most)
    axes.set_xticks(range(0, len(names), step), names[::step], rotation=60 if rotate else 0)


def _draw_lines(axes: Any, lines: Iterable[tuple[str, Points]]) -> None:
    """A line without points still takes its colour and its place in the legend, so that panels agree."""
    for number, (label, points) in enumerate(lines):
        known = [(x, y) for x, y in points if y is not None]
        style = {"marker": _MARKERS[number % len(_MARKERS)], "markersize": 4.5} if len(known) <= _MANY_POINTS else {}
        xs, ys = [x for x, _ in known], [y for _, y in known]
        axes.plot(xs, ys, color=LINES[number % len(LINES)], linewidth=1.6, label=label, **style)
    axes.set_xlabel("iteration")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(visible=True, axis="y", alpha=0.3)


def _legend(figure: Any, *, reverse: bool = False) -> None:
    """Beside the plots; what stands in several of them once."""
    entries: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    figure.legend(entries.values(), entries.keys(), loc="outside right center", frameon=False, reverse=reverse)


def _datasets(summaries: Iterable[IterationSummary]) -> list[str]:
    return list(dict.fromkeys(name for summary in summaries for name in summary.datasets))


def _of_dataset(
    summaries: Iterable[IterationSummary], name: str, figure_of: Callable[[DatasetSummary], float | None]
) -> Points:
    return [(one.rollout_id, figure_of(one.datasets[name])) for one in summaries if name in one.datasets]


def _natural(name: str) -> list[tuple[str, int]]:
    """Orders node 2 before node 10."""
    return [(text, int(number or 0)) for text, number in re.findall(r"(\D*)(\d*)", name)]


def _short(name: str) -> str:
    """Long names keep their end, which tells them apart."""
    return name if len(name) <= _MAX_NAME else "…" + name[1 - _MAX_NAME :]
