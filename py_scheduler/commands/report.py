"""`py-scheduler report`: how training steps and evals went, from the summaries that they wrote.

Rates and mean rewards are over model results alone, as everywhere.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.table import Table

from py_scheduler.commands.common import standard_console
from py_scheduler.commands.views.report_data import iteration_name, outcomes_seen, read_report, slowest_samples
from py_scheduler.commands.views.report_plots import draw_report

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Iterator

    from rich.console import Console

    from py_scheduler.commands.views.report_data import Report
    from py_scheduler.domain.training.steps import FilterReport
    from py_scheduler.rollout.files.iteration_summary import DatasetSummary, IterationSummary, NodeUse

_NONE = "-"
_MAX_NODES = 20
_SLOWEST = 10


class Sheet(msgspec.Struct, frozen=True, kw_only=True):
    """A table before it is printed. The first `text_columns` columns are text, the others numbers.

    Names come from files and may be anybody's: what would drive a terminal is shown instead of sent.
    """

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    text_columns: int = 1

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "headings", tuple(map(_shown, self.headings)))
        msgspec.structs.force_setattr(self, "rows", [tuple(map(_shown, row)) for row in self.rows])


def _shown(text: str) -> str:
    """The text, with an escape for each character that cannot be printed."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="the artifact folder of a rollout, or its eval_details"
    )
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where plots are written (default: DIR/report)")
    parser.add_argument("--no-plots", action="store_true", help="tables only; matplotlib is not needed")
    parser.add_argument("--markdown", action="store_true", help="print the tables as Markdown, with the plots in it")


def run(options: argparse.Namespace) -> int:
    plots = None if options.no_plots else options.out or options.folder / "report"
    run_report(options.folder, plots, standard_console(), markdown=options.markdown)
    return 0


def run_report(folder: Path, plots: Path | None, console: Console, *, markdown: bool = False) -> None:
    """Prints the tables and draws the plots into the folder `plots`; None: no plots.

    Raises NotFoundError when there is no summary, FailedPreconditionError when plots are wanted without matplotlib.
    """
    report = read_report(folder)
    for trouble in report.troubles:
        # Not among the tables, which may well be piped into a document.
        sys.stderr.write(f"py-scheduler: left out: {_shown(trouble)}\n")
    drawn = [] if plots is None else draw_report(report, plots)
    for sheet in sheets(report):
        if not sheet.rows:
            continue
        console.print(as_markdown(sheet) if markdown else as_table(sheet), soft_wrap=markdown)
    for path in drawn:
        console.print(f"![{path.stem.replace('_', ' ')}]({path})\n" if markdown else f"wrote {path}", soft_wrap=True)


def sheets(report: Report) -> Iterator[Sheet]:
    yield _iterations("Training", report.training)
    yield _iterations("Evals", report.evals)
    yield _outcomes(report)
    yield _datasets(report)
    yield _time(report)
    yield _filters(report)
    yield _nodes(report)
    yield _slowest(report)
    warnings = [(iteration_name(one), warning) for one in report.all for warning in one.warnings]
    yield Sheet(title="Warnings", headings=("iteration", "warning"), rows=warnings, text_columns=2)


def _iterations(title: str, summaries: Sequence[IterationSummary]) -> Sheet:
    headings = ("iteration", "beta", "groups", "samples", "solved %", "mean reward", "teacher %", "dummies", "seconds")
    return Sheet(
        title=title,
        headings=headings,
        rows=[
            (
                str(one.rollout_id),
                _NONE if one.context is None else f"{one.context.beta:.2f}",
                f"{one.total.groups:,}",
                f"{one.total.samples:,}",
                _percent(one.total.accuracy),
                _reward(one.total),
                _percent(one.total.teacher_share),
                f"{one.dummies:,}",
                f"{one.elapsed_seconds:,.1f}",
            )
            for one in summaries
        ],
    )


def _outcomes(report: Report) -> Sheet:
    seen = outcomes_seen(report.all)
    return Sheet(
        title="How samples ended",
        headings=("iteration", *(name.replace("_", " ") for name in seen)),
        rows=[(iteration_name(one), *(f"{one.total.outcomes.get(name, 0):,}" for name in seen)) for one in report.all],
    )


def _datasets(report: Report) -> Sheet:
    """Only where a row says more than that of its iteration: several data sets, or pass@k."""
    shown = [one for one in report.all if len(one.datasets) > 1 or any(d.pass_at_k for d in one.datasets.values())]
    every = sorted({int(k) for one in shown for figures in one.datasets.values() for k in figures.pass_at_k})
    return Sheet(
        title="Data sets",
        headings=("iteration", "data set", "samples", "solved %", *(f"pass@{k} %" for k in every), "mean reward"),
        rows=[
            (
                iteration_name(one),
                name or "(none)",
                f"{figures.samples:,}",
                _percent(figures.accuracy),
                *(_percent(figures.pass_at_k.get(str(k))) for k in every),
                _reward(figures),
            )
            for one in shown
            for name, figures in one.datasets.items()
        ],
        text_columns=2,
    )


def _time(report: Report) -> Sheet:
    def row(one: IterationSummary) -> tuple[str, ...]:
        time, samples = one.total.time, max(1, one.total.samples)
        spans = (time.wait_seconds, time.generate_seconds, time.tool_seconds, time.verify_seconds)
        tokens = sum(one.total.tokens.values())
        return (iteration_name(one), *(f"{span / samples:,.2f}" for span in spans), f"{tokens / samples:,.0f}")

    headings = ("iteration", "wait s", "generate s", "tool s", "verify s", "token ids")
    return Sheet(title="Time of a sample, mean", headings=headings, rows=[row(one) for one in report.all])


def _filters(report: Report) -> Sheet:
    return Sheet(
        title="Filters",
        headings=("iteration", "filter", "why dropped", "kept groups", "dropped", "kept samples", "dropped"),
        rows=[
            (
                iteration_name(one),
                kept.filter,
                _reasons(kept) or _NONE,
                f"{kept.kept_groups:,}",
                f"{kept.dropped_groups:,}",
                f"{kept.kept_samples:,}",
                f"{kept.dropped_samples:,}",
            )
            for one in report.all
            for kept in one.filters
        ],
        text_columns=3,
    )


def _reasons(report: FilterReport) -> str:
    both = (("groups", report.group_reasons), ("samples", report.sample_reasons))
    return "; ".join(
        f"{what}: " + ", ".join(f"{reason} {count:,}" for reason, count in counts.items())
        for what, counts in both
        if counts
    )


def _nodes(report: Report) -> Sheet:
    uses: dict[str, list[NodeUse]] = {}
    for one in report.all:
        for node, use in one.nodes.items():
            uses.setdefault(node, []).append(use)
    held = {node: sum(use.held_seconds for use in of_node) for node, of_node in uses.items()}
    in_all = max(sum(held.values()), 1e-9)
    busiest = sorted(uses, key=lambda node: -held[node])
    rows = [
        (
            node or "(none)",
            _gpus(uses[node]),
            f"{sum(use.samples for use in uses[node]):,}",
            f"{held[node]:,.1f}",
            f"{100 * held[node] / in_all:.1f}",
        )
        for node in busiest[:_MAX_NODES]
    ]
    if hidden := busiest[_MAX_NODES:]:
        rows.append((f"and {len(hidden):,} more nodes", "", "", "", ""))
    headings = ("node", "sample·seconds by GPU", "samples", "sample·seconds", "%")
    return Sheet(title="Placement", headings=headings, rows=rows, text_columns=2)


def _gpus(uses: Iterable[NodeUse]) -> str:
    seconds: Counter[str] = Counter()
    for use in uses:
        seconds.update(use.gpu_seconds)
    return "  ".join(f"{gpu}: {held:,.1f}" for gpu, held in sorted(seconds.items())) or _NONE


def _slowest(report: Report) -> Sheet:
    return Sheet(
        title="Slowest samples",
        headings=("iteration", "task", "data set", "outcome", "node", "sample", "turns", "generate s", "held s"),
        rows=[
            (
                iteration_name(one),
                sample.task_id,
                sample.dataset or _NONE,
                sample.outcome.replace("_", " "),
                sample.node_ip or _NONE,
                str(sample.sample_no),
                str(sample.turns),
                f"{sample.generate_seconds:,.2f}",
                f"{sample.held_seconds:,.2f}",
            )
            for one, sample in slowest_samples(report.all, _SLOWEST)
        ],
        text_columns=5,
    )


def _percent(rate: float | None) -> str:
    return _NONE if rate is None else f"{100 * rate:.1f}"


def _reward(figures: DatasetSummary) -> str:
    return f"{figures.reward.mean:.3f}" if figures.reward.count else _NONE


# A sheet on paper


def as_table(sheet: Sheet) -> Table:
    table = Table(title=sheet.title, title_justify="left", box=box.ASCII2)
    for number, heading in enumerate(sheet.headings):
        text = number < sheet.text_columns
        table.add_column(heading, justify="left" if text else "right", overflow="fold")
    for row in sheet.rows:
        table.add_row(*row)
    return table


def as_markdown(sheet: Sheet) -> str:
    rules = ("---" if number < sheet.text_columns else "---:" for number in range(len(sheet.headings)))
    lines = [sheet.headings, tuple(rules), *sheet.rows]
    cells = (" | ".join(cell.replace("|", "\\|") for cell in line) for line in lines)
    return f"## {sheet.title}\n\n" + "".join(f"| {line} |\n" for line in cells)
