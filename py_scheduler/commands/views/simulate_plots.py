"""The plot of `py-scheduler simulate`: for each run when and where samples ran, and how many ran and waited meanwhile.

Colours tell steps apart, and evals are grey; the tail, in which nothing waits, has a ground of its own.
"""

from __future__ import annotations

import heapq
from typing import TYPE_CHECKING, Any

import numpy as np

from py_scheduler.commands.views.report_plots import LINES, STYLE, load_matplotlib, save
from py_scheduler.simulation.figures import course_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from py_scheduler.commands.views.simulate import SimulationView
    from py_scheduler.simulation.spans import Spans

MOST_DRAWN = 6
_EVAL_COLOUR = "#8C8C8C"
_TAIL_COLOUR = "#F4E9D8"
_LEAST_TAIL = 0.005
"""Of the makespan: what is shorter cannot be seen."""
_WIDTH, _HEIGHT = 11.0, 4.6
"""Inches; the height of one run."""


def draw_simulation(views: Sequence[SimulationView], path: Path) -> None:
    """Raises FailedPreconditionError without matplotlib, and for a file that cannot be written."""
    mpl, Figure = load_matplotlib()  # noqa: N806 -- a class
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(_WIDTH, _HEIGHT * len(views)), layout="constrained")
        axes = figure.subplots(2 * len(views), 1, squeeze=False, sharex=True, height_ratios=[3, 1] * len(views))[:, 0]
        for number, view in enumerate(views):
            _draw_run(view, axes[2 * number], axes[2 * number + 1])
        axes[-1].set_xlabel("seconds")
        axes[-1].set_xlim(0.0, max([view.figures.makespan_seconds for view in views]) or 1.0)
        save(figure, path)


def _draw_run(view: SimulationView, lanes: Any, course: Any) -> None:
    figures, spans = view.figures, view.spans
    lanes.set_title(
        f"{view.name}: {figures.makespan_seconds:,.0f} s, {100 * figures.bound_share:.0f} % of the bound,"
        f" tail {100 * figures.tail_share:.0f} %",
        loc="left",
    )
    times, waiting, running = course_of(spans)
    for begin, end in _tails(times, waiting, running, _LEAST_TAIL * figures.makespan_seconds):
        lanes.axvspan(begin, end, color=_TAIL_COLOUR, lw=0, zorder=0)
        course.axvspan(begin, end, color=_TAIL_COLOUR, lw=0, zorder=0)
    numbers = lanes_of(spans)
    started, held = np.asarray(spans.started), np.asarray(spans.held)
    colours = [
        _EVAL_COLOUR if is_eval else LINES[step % len(LINES)]
        for step, is_eval in zip(spans.step, spans.is_eval, strict=True)
    ]
    lanes.barh(numbers, held, left=started, height=0.8, color=colours, linewidth=0)
    lanes.set_ylabel("places to run in")
    lanes.set_ylim(max(numbers, default=0) + 0.5, -0.5)
    course.fill_between(times, running, step="post", color=LINES[0], lw=0)
    course.set_ylabel("running")
    course.set_ylim(bottom=0)
    queue = course.twinx()
    queue.spines["right"].set_visible(True)
    queue.plot(times, waiting, drawstyle="steps-post", color=LINES[1], ls="--")
    queue.set_ylabel("waiting (dashed)")
    queue.set_ylim(bottom=0)


def lanes_of(spans: Spans) -> list[int]:
    """A line for each sample, so that none lies upon another one; those of a node stand together."""
    free: dict[int, list[tuple[float, int]]] = {}
    used: dict[int, int] = {}
    own = [0] * len(spans)
    for place in np.argsort(np.asarray(spans.started), kind="stable"):
        node, start = spans.node[place], spans.started[place]
        ends = free.setdefault(node, [])
        if ends and ends[0][0] <= start + 1e-6:
            _, lane = heapq.heappop(ends)
        else:
            lane = used.get(node, 0)
            used[node] = lane + 1
        own[place] = lane
        heapq.heappush(ends, (start + spans.held[place], lane))
    above, first = 0, {}
    for node in sorted(used, key=lambda node: spans.nodes.names[node]):
        first[node] = above
        above += used[node]
    return [first[node] + lane for node, lane in zip(spans.node, own, strict=True)]


def _tails(times: Any, waiting: Any, running: Any, least: float) -> Iterator[tuple[float, float]]:
    """The stretches in which something runs and nothing waits."""
    is_tail = np.concatenate([[False], (waiting[:-1] == 0) & (running[:-1] > 0), [False]])
    edges = np.flatnonzero(np.diff(is_tail.astype(np.int8)))
    for begin, end in zip(times[edges[::2]], times[edges[1::2]], strict=True):
        if end - begin >= least:
            yield float(begin), float(end)
