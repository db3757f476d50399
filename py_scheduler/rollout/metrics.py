"""Accuracy and pass@k. Source: seed 1, section 5 (eval outputs).

Invariant: rates are over model results alone. What the infrastructure ended is not among the n samples of a prompt, so
a broken machine makes a figure less certain but not worse.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import TYPE_CHECKING

from py_scheduler.domain.results import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterable


def pass_at_k(n: int, solved: int, k: int) -> float:
    """The unbiased estimate of the chance that at least one of k samples solves, from n samples of which some did.

    1 - C(n - solved, k) / C(n, k). Raises ValueError unless 1 <= k <= n and 0 <= solved <= n.
    """
    if not (1 <= k <= n and 0 <= solved <= n):
        raise ValueError(f"pass@{k} cannot be estimated from {solved} of {n} samples")
    if n - solved < k:
        return 1.0
    return 1.0 - prod(1.0 - k / i for i in range(n - solved + 1, n + 1))


def ks_up_to(n: int) -> list[int]:
    """1, 2, 4, ... below n, and n."""
    return [*(1 << bit for bit in range(max(0, (n - 1).bit_length()))), n] if n > 0 else []


class SolveTally:
    """How many of their n model results the prompts solved.

    Memory grows with the different (n, solved), not with the prompts.
    """

    def __init__(self) -> None:
        self._prompts: Counter[tuple[int, int]] = Counter()

    def add(self, outcomes: Iterable[Outcome]) -> None:
        """All samples of one prompt. One without a model result counts nowhere."""
        results = [outcome for outcome in outcomes if outcome.is_model_result]
        if results:
            self._prompts[len(results), results.count(Outcome.SOLVED)] += 1

    @property
    def model_results(self) -> int:
        return sum(n * prompts for (n, _), prompts in self._prompts.items())

    @property
    def accuracy(self) -> float | None:
        """Solved model results, of all; None when there is none."""
        results = self.model_results
        solved = sum(count * prompts for (_, count), prompts in self._prompts.items())
        return solved / results if results else None

    def pass_at(self, k: int) -> float | None:
        """The mean over the prompts with at least k model results; None when there is none."""
        estimates = [(pass_at_k(n, solved, k), prompts) for (n, solved), prompts in self._prompts.items() if n >= k]
        counted = sum(prompts for _, prompts in estimates)
        return sum(estimate * prompts for estimate, prompts in estimates) / counted if counted else None

    def pass_rates(self) -> dict[int, float]:
        """pass@k by k: 1, 2, 4, ... and the most samples that a prompt has; empty when none has more than one."""
        most = max((n for n, _ in self._prompts), default=0)
        rates = {k: self.pass_at(k) for k in ks_up_to(most)} if most > 1 else {}
        return {k: rate for k, rate in rates.items() if rate is not None}


def eval_metrics(tallies: Iterable[tuple[str, SolveTally]]) -> dict[str, float]:
    """`eval/{name}/accuracy` and, with several samples a prompt, `eval/{name}/pass@k`, for each data set."""
    metrics: dict[str, float] = {}
    for name, tally in tallies:
        if (accuracy := tally.accuracy) is not None:
            metrics[f"eval/{name}/accuracy"] = accuracy
        metrics |= {f"eval/{name}/pass@{k}": rate for k, rate in tally.pass_rates().items()}
    return metrics
