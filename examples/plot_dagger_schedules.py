"""Draws the four decays of β and the ramp of t_max, as `DAggerSchedule` gives them.

python examples/plot_dagger_schedules.py [docs/dagger_schedules.png]
"""

from __future__ import annotations

import sys
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from py_scheduler import DAggerSchedule, Decay

ITERATIONS = range(16)
SCHEDULES = {
    "linear, 10 iterations": DAggerSchedule(decay=Decay.LINEAR, decay_iterations=10),
    "cosine, 10 iterations": DAggerSchedule(decay=Decay.COSINE, decay_iterations=10),
    "exponential, rate 0.7": DAggerSchedule(decay=Decay.EXPONENTIAL, rate=0.7),
    "step, rate 0.5 every 4": DAggerSchedule(decay=Decay.STEP, rate=0.5, step_iterations=4),
}
TAIL = DAggerSchedule(t_max_start=64, t_max_end=1_024, t_max_iterations=10)
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7")
MARKERS = ("o", "s", "^", "D")


def draw() -> Figure:
    """β on the left, t_max on the right, over iterations."""
    figure = Figure(figsize=(10, 3.8), layout="constrained")
    beta, tail = figure.subplots(1, 2, width_ratios=(3, 2))
    for (name, schedule), colour, marker in zip(SCHEDULES.items(), COLOURS, MARKERS, strict=True):
        values = [schedule.beta(rollout_id) for rollout_id in ITERATIONS]
        style = "steps-post" if schedule.decay is Decay.STEP else "default"
        beta.plot(ITERATIONS, values, marker=marker, markersize=4, drawstyle=style, color=colour, label=name)
    beta.set(title="β: how probably the teacher generates a turn", ylabel="β", ylim=(-0.03, 1.03))
    beta.legend(frameon=False)
    tail.plot(ITERATIONS, [TAIL.t_max(number) for number in ITERATIONS], marker="o", markersize=4, color="#444444")
    tail.set(title="t_max: 64 to 1024 over 10 iterations", ylabel="tokens", ylim=(0, None))
    for axes in (beta, tail):
        axes.set_xlabel("iteration")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    return figure


def main(arguments: list[str]) -> None:
    path = Path(arguments[0]) if arguments else Path(__file__).parents[1] / "docs" / "dagger_schedules.png"
    # Without the version of matplotlib, which would make it another file for each.
    draw().savefig(path, dpi=120, metadata={"Software": None})
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
