"""How simulations are printed, one row to each. Every fact stands in the text."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from rich import box
from rich.table import Table

from py_scheduler.domain.resources import NODE_AMOUNTS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from py_scheduler.domain.resources import NodeResource
    from py_scheduler.simulation.figures import SimulationFigures
    from py_scheduler.simulation.spans import Spans


class SimulationView(msgspec.Struct, frozen=True, kw_only=True):
    """One run. label: what was set for it; empty when nothing was."""

    label: str
    figures: SimulationFigures
    spans: Spans

    @property
    def name(self) -> str:
        return self.label or "as configured"


def show_simulation(views: Sequence[SimulationView], nodes: Sequence[NodeResource], console: Console) -> None:
    first = views[0].figures
    amounts = [f"{sum(getattr(node, kind) for node in nodes):,.10g} {unit}" for kind, unit in NODE_AMOUNTS.items()]
    gpus = sum(len(node.gpus) for node in nodes)
    console.print(
        f"cluster: {len(nodes):,} nodes, {gpus:,} GPUs, {', '.join(amounts)}" if nodes else "cluster: no layout"
    )
    console.print(f"workload: {first.steps:,} steps, {first.tasks:,} tasks, {first.samples:,} samples")
    console.print(_table(views))
    console.print(
        "bound: the least time that any order of these samples takes on these nodes; barrier bound: the same where "
        "each step waits for the one before.\ntail: the part of the time in which something runs and nothing waits for "
        "room.",
        soft_wrap=True,
    )


def _table(views: Sequence[SimulationView]) -> Table:
    has_failures = any(view.figures.failed_attempts for view in views)
    table = Table(box=box.ASCII2)
    table.add_column("setting", no_wrap=True)
    headings = ["seconds", "bound", "of bound %", "barrier bound", "wait p50 s", "p95 s", "tail %", "steps/hour"]
    headings.append("solved %")
    for heading in (*headings, *(["failed attempts"] if has_failures else [])):
        table.add_column(heading, justify="right")
    table.add_column("used %", overflow="fold")
    table.add_column("bound by", overflow="fold")
    for view in views:
        figures = view.figures
        cells = [
            f"{figures.makespan_seconds:,.0f}",
            f"{figures.bound_seconds:,.0f}",
            _percent(figures.bound_share),
            f"{figures.step_bound_seconds:,.0f}",
            f"{figures.wait_p50_seconds:,.1f}",
            f"{figures.wait_p95_seconds:,.1f}",
            _percent(figures.tail_share),
            f"{figures.steps_per_hour:,.2f}",
            _percent(figures.outcomes.get("solved", 0) / max(figures.samples, 1)),
            *([f"{figures.failed_attempts:,}"] if has_failures else []),
        ]
        used = ", ".join(f"{kind} {_percent(share)}" for kind, share in figures.utilisation.items()) or "-"
        table.add_row(view.name, *cells, used, figures.bound_by)
    return table


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"
