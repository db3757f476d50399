"""What a simulated trainer submits: steps of tasks, of whose samples it is known how long each takes."""

from __future__ import annotations

import difflib
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from py_scheduler.domain.task import DEFAULT_NAMESPACE, BatchId
from py_scheduler.errors import FieldViolation, InvalidArgumentError

if TYPE_CHECKING:
    from collections.abc import Iterator

_WORDS = {
    "lognormal": ("median", "sigma", "longest", "alike"),
    "pareto": ("shortest", "alpha", "longest", "alike"),
    "constant": ("median", "longest", "alike"),
    "empirical": ("longest", "alike"),
}
"""What may be said of each kind of distribution; a number alone is meant as the first."""
KINDS = "lognormal, pareto, constant, empirical:FILE, or a file that ends in .csv, .parquet or .jsonl"
_TINY = 1e-12
"""Keeps a draw at the very end of a distribution from being infinite."""


class SimulatedTask(msgspec.Struct, frozen=True, gc=False):
    """A task of as many samples as it names durations. Seconds."""

    run_seconds: tuple[float, ...]
    """How long `run` takes, by sample_no."""
    eval_seconds: tuple[float, ...] = ()
    """How long `eval` takes; none: no time."""
    evaluator_id: str = ""
    """Empty: the first of the configuration."""


class SimulatedStep(msgspec.Struct, frozen=True):
    """What is submitted together. A barrier waits for `tasks`, and never for `evals`."""

    tasks: Sequence[SimulatedTask]
    evals: Sequence[SimulatedTask] = ()
    at_seconds: float = 0.0
    """Not before this moment of the simulation."""
    batch_id: BatchId | None = None
    """None: its number, from 0. Evals beside tasks have a label of their own."""
    namespace: str = DEFAULT_NAMESPACE


class DurationDistribution(msgspec.Struct, frozen=True, kw_only=True):
    """Of the seconds of a sample.

    `lognormal`: `median` x e^(`sigma` z). `pareto`: at least `shortest`, and longer than x with probability
    (`shortest` / x)^`alpha`. `constant`: `median`. `empirical`: drawn from `values`. `longest` bounds each. `alike` is
    how much of the spread belongs to the prompt and is shared by all samples of a task: 0 none, 1 all of it.
    """

    kind: Literal["lognormal", "pareto", "constant", "empirical"] = "lognormal"
    median: float = 55.0
    sigma: float = 1.0
    shortest: float = 20.0
    alpha: float = 1.3
    longest: float = 1800.0
    alike: float = 0.5
    values: tuple[float, ...] = ()

    def seconds(self, z: float) -> float:
        """The duration that stands where `z` stands in a standard normal distribution."""
        match self.kind:
            case "constant":
                drawn = self.median
            case "lognormal":
                drawn = self.median * math.exp(self.sigma * z)
            case "pareto":
                drawn = self.shortest * (1.0 - _below(z) + _TINY) ** (-1.0 / self.alpha)
            case _:
                drawn = self.values[min(int(_below(z) * len(self.values)), len(self.values) - 1)]
        return min(drawn, self.longest)


def _below(z: float) -> float:
    """How much of a standard normal distribution lies below z."""
    return 0.5 * (1.0 + math.erf(z / math.sqrt(2.0)))


class DrawnWorkload(msgspec.Struct, frozen=True, kw_only=True):
    """Steps that are drawn: `groups` tasks of `samples` each, and `eval_groups` evals beside each step."""

    distribution: DurationDistribution = DurationDistribution()
    steps: int = 1
    groups: int = 64
    samples: int = 8
    eval_groups: int = 0
    eval_samples: int = 1
    evaluator_id: str = ""
    eval_evaluator_id: str = ""
    """Of the evals; empty: the same as that of the tasks."""

    def draw(self, seed: int) -> Iterator[SimulatedStep]:
        """Each step when it is asked for, so that memory does not grow with their number. The same seed, the same
        steps.
        """
        drawn = random.Random(seed)
        for _ in range(self.steps):
            tasks = [self._task(drawn, self.samples, self.evaluator_id) for _ in range(self.groups)]
            evaluator_id = self.eval_evaluator_id or self.evaluator_id
            evals = [self._task(drawn, self.eval_samples, evaluator_id) for _ in range(self.eval_groups)]
            yield SimulatedStep(tasks, evals)

    def _task(self, drawn: random.Random, samples: int, evaluator_id: str) -> SimulatedTask:
        alike, seconds = self.distribution.alike, self.distribution.seconds
        prompt = math.sqrt(alike) * drawn.gauss(0.0, 1.0)
        own = math.sqrt(1.0 - alike)
        return SimulatedTask(
            tuple([seconds(prompt + own * drawn.gauss(0.0, 1.0)) for _ in range(samples)]), evaluator_id=evaluator_id
        )


def parse_distribution(text: str) -> DurationDistribution:
    """Of words such as `lognormal:median=55,sigma=1,longest=1800,alike=0.5`, or `empirical:FILE,alike=0.2` with a
    number to a line of the file. Raises InvalidArgumentError with every fault.
    """
    kind, _, words = text.partition(":")
    if kind not in _WORDS:
        near = difflib.get_close_matches(kind, _WORDS, n=1)
        hint = f": did you mean {near[0]!r}?" if near else ""
        raise InvalidArgumentError([FieldViolation("workload", f"{text!r} is none of {KINDS}{hint}")])
    faults: list[FieldViolation] = []
    said: dict[str, Any] = {"kind": kind}
    for word in filter(None, words.split(",")):
        name, has_value, value = word.partition("=")
        try:
            if not has_value and kind == "empirical":
                said["values"] = _values(Path(word))
            elif has_value and name in _WORDS[kind]:
                said[name] = _number(value, name)
            else:
                faults.append(FieldViolation("workload", _no_word(kind, word)))
        except (OSError, ValueError) as error:
            faults.append(FieldViolation("workload", f"{word!r} cannot be read: {error}"))
    if not faults:
        distribution = DurationDistribution(**said)
        faults = [FieldViolation("workload", fault) for fault in _faults(distribution)]
        if not faults:
            return distribution
    raise InvalidArgumentError(faults)


def _no_word(kind: str, word: str) -> str:
    first = _WORDS[kind][0]
    fault = f"{word!r} says nothing of {kind}, which knows {', '.join(_WORDS[kind])}"
    try:
        float(word)
    except ValueError:
        return fault
    return f"{fault}: did you mean {kind}:{first}={word}?"


def _number(text: str, what: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{what} is {text!r}, must be a number") from None


def _values(path: Path) -> tuple[float, ...]:
    """In order, so that a quantile is a place among them. Raises OSError, ValueError."""
    values = []
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").splitlines(), 1):
        for word in line.split():
            value = _number(word, f"line {number}")
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"line {number} is {word}, must be a number of seconds from 0 on")
            values.append(value)
    return tuple(sorted(values))


def _faults(distribution: DurationDistribution) -> Iterator[str]:
    for name in ("median", "sigma", "shortest", "alpha", "longest"):
        value: float = getattr(distribution, name)
        if not (math.isfinite(value) and value > 0):
            yield f"{name} is {value:g}, must be a number above 0"
    if not 0.0 <= distribution.alike <= 1.0:
        yield f"alike is {distribution.alike:g}, must be between 0 and 1"
    if distribution.kind == "empirical" and not distribution.values:
        yield "empirical needs a file with a number to a line: empirical:FILE"
