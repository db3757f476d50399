"""What a rollout came to, per data set and in all.

Invariant: rates and mean rewards are over model results alone. Infrastructure failures and aborts are counted beside
them and never as a reward of 0, so a broken machine cannot look like a worse model.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.table import Table

from py_scheduler.domain.results import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from py_scheduler.domain.results import SampleDone
    from py_scheduler.domain.task import Task

_NO_FIGURE = "–"


@dataclass(slots=True)
class Figures:
    """Sums over finished samples; times in seconds. Prompt tokens are all that the model read and did not write."""

    outcomes: Counter[Outcome] = field(default_factory=Counter)
    model_reward_sum: float = 0.0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    wait_seconds: float = 0.0
    run_seconds: float = 0.0
    generate_seconds: float = 0.0
    eval_seconds: float = 0.0

    def add(self, sample: SampleDone) -> None:
        self.outcomes[sample.outcome] += 1
        if sample.outcome.is_model_result:
            self.model_reward_sum += sample.reward.score
        generated = sample.trajectory.generated_tokens
        self.generated_tokens += generated
        self.prompt_tokens += len(sample.trajectory) - generated
        self.wait_seconds += sample.timings.wait_seconds
        self.run_seconds += sample.timings.run_seconds
        self.generate_seconds += sample.timings.generate_seconds
        self.eval_seconds += sample.timings.eval_seconds

    @property
    def samples(self) -> int:
        return self.outcomes.total()

    @property
    def model_results(self) -> int:
        return sum(count for outcome, count in self.outcomes.items() if outcome.is_model_result)

    @property
    def solve_rate(self) -> float | None:
        """Of the model results; None when there is none."""
        return self.outcomes[Outcome.SOLVED] / self.model_results if self.model_results else None

    @property
    def mean_reward(self) -> float | None:
        """Of the model results; None when there is none."""
        return self.model_reward_sum / self.model_results if self.model_results else None

    @property
    def mean_wait_seconds(self) -> float:
        return self.wait_seconds / max(1, self.samples)

    @property
    def mean_run_seconds(self) -> float:
        """Of run and eval together: as long as a sample holds its resources."""
        return self.held_seconds / max(1, self.samples)

    @property
    def held_seconds(self) -> float:
        """Sample·seconds during which resources were held."""
        return self.run_seconds + self.eval_seconds


@dataclass(slots=True)
class RolloutSummary:
    """Figures by data set, in the order of their first sample, and of all samples."""

    datasets: dict[str, Figures] = field(default_factory=dict)
    total: Figures = field(default_factory=Figures)

    def add(self, sample: SampleDone, dataset: str) -> None:
        self.datasets.setdefault(dataset, Figures()).add(sample)
        self.total.add(sample)


def summarise(samples: Iterable[SampleDone], tasks: Mapping[str, Task]) -> RolloutSummary:
    """`tasks` is keyed by task id; samples of unknown tasks count under the data set ""."""
    summary = RolloutSummary()
    for sample in samples:
        task = tasks.get(sample.task_id)
        summary.add(sample, task.config.dataset if task else "")
    return summary


def summary_table(summary: RolloutSummary, title: str = "Rollout") -> Table:
    """For a terminal: one row per data set, one column per outcome that occurred."""
    seen = [outcome for outcome in Outcome if summary.total.outcomes[outcome]]
    table = Table(title=title, title_justify="left")
    table.add_column("data set", no_wrap=True)
    names = (outcome.value.replace("_", " ") for outcome in seen)
    for name in ("samples", *names, "solved %", "mean reward", "wait s", "run s"):
        table.add_column(name, justify="right")
    for name, figures in summary.datasets.items():
        table.add_row(name or "(none)", *_cells(figures, seen))
    table.add_section()
    table.add_row("all", *_cells(summary.total, seen), style="bold")
    return table


def _cells(figures: Figures, outcomes: Iterable[Outcome]) -> list[str]:
    rate, reward = figures.solve_rate, figures.mean_reward
    return [
        str(figures.samples),
        *(str(figures.outcomes[outcome]) for outcome in outcomes),
        _NO_FIGURE if rate is None else f"{100 * rate:.0f}",
        _NO_FIGURE if reward is None else f"{reward:.3f}",
        f"{figures.mean_wait_seconds:.2f}",
        f"{figures.mean_run_seconds:.2f}",
    ]
