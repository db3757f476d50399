"""One dict of metrics for a task, from what each of its runs measured.

A name may end in how its values are put together: `:sum`, `:max`, `:min`, `:last`, `:mean`; without one, by their mean.
An eval's means are spread out as `name/mean@n`, `name/std@n` and, for k = 2, 4, ... below n and for n itself,
`name/best@k` and `name/worst@k`: what the best and the worst of k runs are to be expected to give, of runs drawn from
the n with replacement. Times are means for evals too.
"""

from __future__ import annotations

import math
import statistics
from typing import TYPE_CHECKING, Any

from py_scheduler.domain.values.plain import plain_number, safe_text

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

TASK_SECONDS = "time/task_execution"
"""How long a SubTask ran, all of its attempts together."""
RUN_SECONDS = "time/run_execution"
"""How long one run took."""

_REDUCERS: dict[str, Callable[[Sequence[float]], float]] = {
    "mean": statistics.fmean,
    "sum": math.fsum,
    "max": max,
    "min": min,
    "last": lambda values: values[-1],
}


def task_metrics(runs: Iterable[Mapping[str, float]], *, is_eval: bool) -> dict[str, float]:
    """`runs` in the order in which they ended; what is not a number is left out."""
    values_of: dict[tuple[str, str], list[float]] = {}
    of_key: dict[str, list[float]] = {}
    for run in runs:
        for key, value in run.items():
            if isinstance(value, int | float):
                if (values := of_key.get(key)) is None:
                    values = of_key[key] = values_of.setdefault(_name_and_rule(key), [])
                values.append(float(value))
    metrics: dict[str, float] = {}
    for (name, rule), values in values_of.items():
        if rule != "mean":
            metrics[f"{name}:{rule}"] = _REDUCERS[rule](values)
        elif is_eval and name not in (TASK_SECONDS, RUN_SECONDS):
            metrics.update(_spread(name, values))
        else:
            metrics[name] = _REDUCERS[rule](values)
    return metrics


def plain_metrics(measured: Mapping[Any, Any]) -> dict[str, float]:
    """Numbers of numpy as Python's own, and names as text that can be stored; what is no number is left out."""
    plain = {}
    for name, value in measured.items():
        number = plain_number(value)
        if isinstance(number, int | float):
            try:
                plain[safe_text(str(name))] = float(number)
            except OverflowError:
                continue
    return plain


def _name_and_rule(key: str) -> tuple[str, str]:
    name, colon, rule = key.rpartition(":")
    return (name, rule) if colon and rule in _REDUCERS else (key, "mean")


def _spread(name: str, values: list[float]) -> Iterator[tuple[str, float]]:
    count = len(values)
    yield f"{name}/mean@{count}", statistics.fmean(values)
    yield f"{name}/std@{count}", statistics.pstdev(values)
    ordered = sorted(values)
    for size in _sizes(count):
        yield f"{name}/best@{size}", expected_best(ordered, size)
        yield f"{name}/worst@{size}", -expected_best([-value for value in reversed(ordered)], size)


def _sizes(count: int) -> Iterator[int]:
    size = 2
    while size < count:
        yield size
        size *= 2
    if count > 1:
        yield count


def expected_best(ordered: Sequence[float], size: int) -> float:
    """The mean of the greatest of `size` values, drawn with replacement from `ordered` (rising).

    The greatest is at most the i-th of n with probability (i / n) ** size.
    """
    count = len(ordered)
    weights = [(place / count) ** size - ((place - 1) / count) ** size for place in range(1, count + 1)]
    return math.fsum([weight * value for weight, value in zip(weights, ordered, strict=True)])
